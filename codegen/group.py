"""Which parts may share a kernel: early returns, each with its reason. Imports codegen's leaf modules and `ir_nodes`.

A kernel's programs run in no order, so within one kernel an element may be written and read only by the program that owns
it. Hence the one rule on memory: two accesses of a group that overlap, one of them a write, must visit the same elements in
the same order. Everything else is about one common iteration space and about size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from codegen import forms
from codegen.footprint import Footprint
from codegen.forms import Form, Reduced
from codegen.instructions import FULL, KEPT, Part
from codegen.tuning import Tuning
from ir_nodes.node import Node, Value

MAX_NODES, MAX_OPERANDS, MAX_DIMS = 64, 20, 6


@dataclass(slots=True, eq=False)
class Unit:
    """What fusion moves around: one part of a node, or a node that ATen runs (``part`` None, with the reason)."""

    position: int
    node: Node
    part: Part | None
    reason: str = ""
    needs: tuple[Value, ...] = ()  # what must exist before it runs
    makes: tuple[Value, ...] = ()
    lasts: bool = False  # somebody outside of the recording needs what it makes
    followers: dict["Unit", None] = field(default_factory=dict)  # units that need what it makes
    before: dict["Unit", None] = field(default_factory=dict)  # units that must run earlier


FootKey = tuple[Form | None, torch.dtype, int, int]
Touched = dict[int, dict[FootKey, Footprint]]


@dataclass(slots=True, eq=False)
class Group:
    """Units that will be one kernel (or one extern call). ``level`` rises along every edge between groups."""

    units: list[Unit]
    level: int
    numel: int = 0
    reduced: Reduced | None = None
    split: bool = False
    draws: bool = False
    multiplies: bool = False
    cuts: tuple[int, ...] = ()
    kept_units: dict[Unit, None] = field(default_factory=dict)  # pointwise units placed over the kept elements
    touched: Touched = field(default_factory=dict)
    patterns: dict[Form, None] = field(default_factory=dict)  # of indices that it computes with, over the full space
    late: dict[Value, None] = field(default_factory=dict)  # values that exist only once a reduction is complete
    preds: dict["Group", None] = field(default_factory=dict)
    succs: dict["Group", None] = field(default_factory=dict)
    merged_into: "Group | None" = None

    @property
    def stage(self) -> int:
        return self.units[0].node.stage

    @property
    def fusible(self) -> bool:
        return self.units[0].part is not None

    @property
    def kept(self) -> int:
        return self.numel // forms.reduced_extent(self.reduced or ())

    def root(self) -> "Group":
        group = self
        while group.merged_into is not None:
            group = group.merged_into
        return group


def new_group(unit: Unit, level: int, tuning: Tuning) -> Group:
    """The group of one unit."""
    group = Group([unit], level)
    part = unit.part
    if part is not None:
        group.numel, group.reduced = part.numel, part.reduced
        group.split = part.reduces and not part.waits and tuning.splits(part)
        group.draws, group.multiplies = part.draws, part.multiplies
        group.cuts = forms.reduced_cuts(part.reduced or (), part.numel)
        absorb(group, [unit], {})
    return group


def absorb(group: Group, units: list[Unit], kept_units: dict[Unit, None]) -> None:
    """Add the memory behaviour of ``units`` to the group's summary."""
    for unit in units:
        for pattern, level in unit.part.patterns() if unit.part else ():
            form = full_form(pattern, KEPT if unit in kept_units else level, group)
            if form is not None:
                group.patterns[form] = None
                group.cuts = forms.merge_cuts(group.cuts, forms.cuts(form)) or group.cuts
        for mode, access in unit.part.accesses() if unit.part else ():
            level = KEPT if unit in kept_units else access.level
            form = full_form(access.form, level, group)
            group.cuts = forms.merge_cuts(group.cuts, forms.cuts(form or ())) or group.cuts
            gathers = access.index_stride != 0 or access.scattered
            key = (form, access.dtype, access.byte_offset, gathers + access.scattered)
            per_buffer = group.touched.setdefault(id(access.value.buffer), {})
            foot = per_buffer.setdefault(key, Footprint(form, access.dtype, access, gathers))
            if mode == "w":
                foot.written[access.value] = None
                if level == KEPT:
                    group.late[access.value] = None


def full_form(form: Form, level: int, group: Group) -> Form | None:
    """A form over the group's whole space."""
    return form if level == FULL else forms.embed(form, group.reduced or (), group.numel)


@dataclass(frozen=True, slots=True)
class Joint:
    """How two groups fit into one space."""

    numel: int
    reduced: Reduced | None
    kept_units: tuple[Unit, ...]
    split: bool


def joint_space(left: Group, right: Group) -> Joint | str:
    """One iteration space for both groups, or why there is none."""
    if left.reduced is None and right.reduced is not None:
        left, right = right, left
    kept = (*left.kept_units, *right.kept_units)
    split = left.split or right.split
    if right.reduced is not None:
        if left.reduced != right.reduced or left.numel != right.numel:
            return "they reduce different dimensions"
        return Joint(left.numel, left.reduced, kept, split)
    if right.numel == left.numel:
        return Joint(left.numel, left.reduced, kept, split)
    if left.reduced is not None and right.numel == left.kept:
        return Joint(left.numel, left.reduced, (*kept, *right.units), split)
    return f"their index spaces differ ({left.numel} and {right.numel} elements)"


def can_fuse(left: Group, right: Group) -> Joint | str:
    """How the two groups become one kernel, or the reason why they do not."""
    if not left.fusible or not right.fusible:
        return "one of them is run by ATen"
    if left.stage != right.stage:
        return "the schedule keeps their segments apart"
    if len(left.units) + len(right.units) > MAX_NODES:
        return f"more than {MAX_NODES} nodes in one kernel"
    if left.draws and right.draws:
        return "each draws random numbers"
    operands = sum(len(feet) for group in (left, right) for feet in group.touched.values())
    if operands > MAX_OPERANDS and _distinct(left, right) > MAX_OPERANDS:
        return f"more than {MAX_OPERANDS} operands in one kernel"
    joint = joint_space(left, right)
    if isinstance(joint, str):
        return joint
    if left.multiplies + right.multiplies + (joint.reduced is not None) > 1:
        return "a matrix product's tiles suit no other product and no reduction"
    return _memory_reason(left, right, joint) or _split_reason(left, right, joint) or joint


def _distinct(left: Group, right: Group) -> int:
    """Operands in memory: what a value is read or written through, but for values that stay inside."""
    inside = dict.fromkeys((*left.units, *right.units))
    hidden = {value for unit in inside if not unit.lasts and unit.followers and all(other in inside for other in unit.followers)
              for value in unit.makes}
    return len({(access.value.buffer.index, access.form, access.dtype, access.byte_offset) for unit in inside
                for _, access in (unit.part.accesses() if unit.part else ()) if access.value not in hidden})


def _memory_reason(left: Group, right: Group, joint: Joint) -> str | None:
    cuts: tuple[int, ...] | None = forms.reduced_cuts(joint.reduced or (), joint.numel)
    sides: list[Touched] = []
    for group in (left, right):
        moved = group if group.numel == joint.numel else embedded(group, joint)
        cuts = None if cuts is None or moved is None else forms.merge_cuts(cuts, moved.cuts)
        if moved is None or cuts is None:
            return "their operands' dimensions do not nest"
        sides.append(moved.touched)
    if cuts is not None and len(cuts) + 1 > MAX_DIMS:
        return f"more than {MAX_DIMS} dimensions that do not merge"
    for buffer in sides[0].keys() & sides[1].keys():
        for one in sides[0][buffer].values():
            if any(one.collides(two) for two in sides[1][buffer].values()):
                return "one writes memory that the other touches in another order"
    return None


def embedded(group: Group, joint: Joint) -> Group | None:
    """What the pointwise ``group`` touches once it runs over the kept elements of a reduction; None where that does not nest."""
    moved = Group(group.units, group.level, joint.numel, joint.reduced)
    for form in (*group.patterns, *(foot.form or () for feet in group.touched.values() for foot in feet.values())):
        full = forms.embed(form, joint.reduced or (), joint.numel)
        cuts = None if full is None else forms.merge_cuts(moved.cuts, forms.cuts(full))
        if cuts is None:
            return None
        moved.cuts = cuts
    for buffer, feet in group.touched.items():
        moved.touched[buffer] = {key: Footprint(forms.embed(foot.form or (), joint.reduced or (), joint.numel), foot.dtype,
                                                foot.access, foot.gathers, foot.written) for key, foot in feet.items()}
    return moved


def _split_reason(left: Group, right: Group, joint: Joint) -> str | None:
    if not joint.split:
        return None
    late = {**left.late, **right.late}
    placed = dict.fromkeys(joint.kept_units)
    for unit in (*left.units, *right.units):
        part = unit.part
        if part is None:
            continue
        reads = [access.value for mode, access in part.accesses() if mode == "r"]
        if unit in placed and not any(value in late for value in reads):
            return "the reduction is split over programs, so it cannot take part in work per result"
        if part.waits and part.reduced is not None:
            return "one reduction is split over programs, the other needs whole rows"
        if unit not in placed and any(value in late for value in reads):
            return "the reduction is split over programs, so its result is not known inside the kernel"
    return None


def merge(left: Group, right: Group, joint: Joint, level: int) -> Group:
    """Make one group of two; ``left`` stays, the other's `Group.root` becomes it."""
    joined = sorted([*left.units, *right.units], key=lambda unit: unit.position)
    known = [(group.numel, group.reduced) == (joint.numel, joint.reduced) for group in (left, right)]
    left.level, left.numel, left.reduced, left.split = level, joint.numel, joint.reduced, joint.split
    left.kept_units = dict.fromkeys(joint.kept_units)
    left.draws, left.multiplies = left.draws or right.draws, left.multiplies or right.multiplies
    if not known[0]:
        left.cuts = forms.reduced_cuts(joint.reduced or (), joint.numel)
        left.touched, left.late, left.patterns = {}, {}, {}
        absorb(left, left.units, left.kept_units)
    if known[1]:
        take_over(left, right)
    else:
        absorb(left, right.units, left.kept_units)
    left.units = joined
    for neighbour in right.preds:
        neighbour.succs.pop(right, None)
        if neighbour is not left:
            neighbour.succs[left] = None
            left.preds[neighbour] = None
    for neighbour in right.succs:
        neighbour.preds.pop(right, None)
        if neighbour is not left:
            neighbour.preds[left] = None
            left.succs[neighbour] = None
    left.preds.pop(right, None)
    left.succs.pop(right, None)
    right.merged_into = left
    return left


def take_over(left: Group, right: Group) -> None:
    """Add the summary of ``right``, which runs over the same space."""
    for buffer, feet in right.touched.items():
        known = left.touched.setdefault(buffer, {})
        for key, foot in feet.items():
            known.setdefault(key, foot).written.update(foot.written)
    left.late.update(right.late)
    left.patterns.update(right.patterns)
    left.cuts = forms.merge_cuts(left.cuts, right.cuts) or left.cuts


def joint_level(left: Group, right: Group) -> int | None:
    """A level for the merged group above all it waits for and below all that waits for it; None: merging could deadlock."""
    waited = [group.level for side, other in ((left, right), (right, left)) for group in side.preds if group is not other]
    waiting = [group.level for side, other in ((left, right), (right, left)) for group in side.succs if group is not other]
    level = max(waited, default=-1) + 1
    return level if level < min(waiting, default=math.inf) else None
