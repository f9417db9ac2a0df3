"""Groups of parts that will share a kernel, what each touches, how two become one, and their order. Imports codegen's leaf
modules and `ir_nodes`; which may share one is in `codegen.rules`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Sequence

import torch

from codegen import forms, mixing
from codegen.footprint import Footprint, picked_by_index
from codegen.forms import Form, Reduced
from codegen.instructions import FULL, KEPT, MemAccess, Part
from codegen.tuning import Tuning
from ir_nodes import settings
from ir_nodes.node import Node, Value

MAX_NODES, MAX_OPERANDS, MAX_DIMS = 64, 20, 6
MAX_LIFTED = 16


@dataclass(slots=True, eq=False)
class Unit:
    """What fusion moves around: one part of a node, or a node that ATen runs (``part`` None, with the reason)."""

    position: int
    node: Node
    part: Part | None
    reason: str = ""
    needs: tuple[Value, ...] = ()  # what must exist before it runs
    makes: tuple[Value, ...] = ()
    made_by_aten: int = 0  # bytes that ATen makes before it
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
    scans: int = 0  # as `Part.scans`
    mixes: bool = False  # may rows and columns be reduced together?
    crossed: dict[Unit, None] = field(default_factory=dict)  # units that reduce columns while the others reduce rows
    cuts: tuple[int, ...] = ()
    kept_units: dict[Unit, None] = field(default_factory=dict)  # pointwise units placed over the kept elements
    touched: Touched = field(default_factory=dict)
    patterns: dict[Form, None] = field(default_factory=dict)  # of indices that it computes with, over the full space
    operands: int = 0  # ways in which it touches memory
    moved: int = 0  # bytes that its units load and store, each by itself
    loads: dict[Value, int] = field(default_factory=dict)  # what its units read, with the bytes; 0 where indices say which
    stores: dict[Value, None] = field(default_factory=dict)
    preds: dict["Group", None] = field(default_factory=dict)
    succs: dict["Group", None] = field(default_factory=dict)
    wants: dict[Node, None] = field(default_factory=dict)  # nodes whose kernel it is to join; see `Node.joins`
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

    @property
    def totals(self) -> bool:
        """True where it makes numbers of all its elements, so that it has next to nothing to write."""
        return self.reduced is not None and self.kept == 1

    @property
    def leaves_room(self) -> bool:
        """Is it, or some of it, meant to be higher than what it waits for asks?"""
        return any(unit.part is not None and unit.part.later for unit in self.units)

    def root(self) -> "Group":
        group = self
        while group.merged_into is not None:
            group = group.merged_into
        return group


def new_group(unit: Unit, level: int, tuning: Tuning) -> Group:
    """The group of one unit."""
    group = Group([unit], level)
    part = unit.part
    if unit.node.joins is not None:
        group.wants[unit.node.joins] = None
    if part is not None:
        picked = picked_by_index(part)
        group.numel, group.reduced = part.numel, part.reduced
        group.split = part.reduces and not part.waits and tuning.splits(part) and settings.enabled("split")
        group.mixes = mixing.mixes(part, tuning)
        group.draws, group.multiplies, group.scans = part.draws, part.multiplies, part.scans
        group.cuts = forms.reduced_cuts(part.reduced or (), part.numel)
        group.moved = part.facts.moved
        for mode, access in part.accesses():
            if mode == "w":
                group.stores[access.value] = None
            elif unit.node.joins is not None or not unit.node.again:  # made for those who follow it only
                nbytes = 0 if access in picked else access.high - access.low
                group.loads[access.value] = max(group.loads.get(access.value, 0), nbytes)
        absorb(group, [unit])
    return group


def absorb(group: Group, units: list[Unit]) -> None:
    """Add how ``units`` touch the memory of the group's space to its summary."""
    for unit in units:
        if unit.part is None:
            continue
        placed = unit in group.kept_units or unit in group.crossed
        for pattern, level in unit.part.patterns():
            form = full_form(pattern, level_in(group, unit, level), group, unit)
            if form is not None:
                group.patterns[form] = None
                _cut(group, form)
        for mode, access in unit.part.accesses():
            level = level_in(group, unit, access.level) if placed else access.level
            form = access.form if level == FULL else full_form(access.form, level, group, unit)
            _cut(group, form or ())
            _touch(group, mode, access, form)


def _cut(group: Group, form: Form) -> None:
    if len(form) > 1:
        group.cuts = forms.merge_cuts(group.cuts, forms.cuts(form)) or group.cuts


def _touch(group: Group, mode: str, access: MemAccess, form: Form | None) -> None:
    gathers = access.index_stride != 0 or access.scattered
    key = (form, access.dtype, access.byte_offset, gathers + access.scattered)
    feet = group.touched.setdefault(id(access.value.buffer), {})
    foot = feet.get(key)
    if foot is None:
        foot = feet[key] = Footprint(form, access.dtype, access, gathers)
        group.operands += 1
    if mode == "w":
        foot.written[access.value] = None


def level_in(group: Group, unit: Unit, level: int) -> int:
    """The level of a unit's instruction or access within the group."""
    follows = unit in group.crossed and unit.part is not None and unit.part.reduced is None
    return min(level, KEPT) if unit in group.kept_units or follows else level


def full_form(form: Form, level: int, group: Group, unit: Unit) -> Form | None:
    """A pattern over the group's whole space."""
    return mixing.embedded(form, group.reduced or (), group.numel, unit in group.crossed, level)


@dataclass(frozen=True, slots=True)
class Joint:
    """How two groups fit into one space."""

    numel: int
    reduced: Reduced | None
    kept_units: tuple[Unit, ...]
    split: bool
    crossed: tuple[Unit, ...] = ()


def merge(left: Group, right: Group, joint: Joint, level: int) -> Group:
    """Make one group of two; ``left`` stays, the other's `Group.root` becomes it."""
    joined = sorted([*left.units, *right.units], key=lambda unit: unit.position)
    known = [(group.numel, group.reduced) == (joint.numel, joint.reduced) for group in (left, right)]
    left.mixes = all(group.mixes for group in (left, right) if group.reduced)
    left.level, left.numel, left.reduced, left.split = level, joint.numel, joint.reduced, joint.split
    left.kept_units, left.crossed = dict.fromkeys(joint.kept_units), dict.fromkeys(joint.crossed)
    left.draws, left.multiplies = left.draws or right.draws, left.multiplies or right.multiplies
    left.scans |= right.scans
    if not known[0]:
        left.cuts = forms.reduced_cuts(joint.reduced or (), joint.numel)
        left.touched, left.patterns, left.operands = {}, {}, 0
        absorb(left, left.units)
    if known[1]:
        take_over(left, right)
    else:
        absorb(left, right.units)
    left.units = joined
    if left.wants or right.wants:
        left.wants = dict.fromkeys(left.wants | right.wants)
        for unit in joined:
            left.wants.pop(unit.node, None)
    left.moved += right.moved
    left.stores.update(right.stores)
    for value, nbytes in right.loads.items():
        left.loads[value] = max(left.loads.get(value, 0), nbytes)
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
            if key in known:
                known[key].written.update(foot.written)
            else:
                known[key] = foot
                left.operands += 1
    left.patterns.update(right.patterns)
    left.cuts = forms.merge_cuts(left.cuts, right.cuts) or left.cuts


def joint_level(left: Group, right: Group) -> int | None:
    """A level for the merged group above all it waits for and below all that waits for it; None: merging could deadlock.
    Totals that leave room below them, for what waits for others and shares a kernel with their rows, stay there if they can."""
    waited = [group.level for side, other in ((left, right), (right, left)) for group in side.preds if group is not other]
    waiting = [group.level for side, other in ((left, right), (right, left)) for group in side.succs if group is not other]
    level, limit = max(waited, default=-1) + 1, min(waiting, default=math.inf)
    later = max([level, *(group.level for group in (left, right) if group.totals and group.leaves_room)])
    return later if later < limit else level if level < limit else None


def lifted_level(left: Group, right: Group) -> int | None:
    """As `joint_level`, where groups that wait for either may be moved up, a few of them, and are if that is enough."""
    level = max((group.level for side in (left, right) for group in side.preds if group not in (left, right)), default=-1) + 1
    higher: dict[Group, int] = {}
    stack = [(group, level + 1) for side in (left, right) for group in side.succs if group not in (left, right)]
    while stack:
        group, least = stack.pop()
        if group in (left, right) or len(higher) > MAX_LIFTED:
            return None
        if max(group.level, higher.get(group, 0)) < least:
            higher[group] = least
            stack += [(after, least + 1) for after in group.succs]
    for group, least in higher.items():
        group.level = least
    return level


def sort_groups(groups: Sequence[Group]) -> list[Group]:
    """By stage and each group's first node; what a group waits for, and nothing else, comes before it where it would come later.

    So a value that is computed again for backward is computed there, although it could be long before.
    """
    order = sorted(groups, key=lambda group: (group.stage, group.units[0].position))
    place = {group: number for number, group in enumerate(order)}
    begun: set[Group] = set()
    done: dict[Group, None] = {}
    for last in order:
        waiting = [last]
        while waiting:
            group = waiting[-1]
            missing = [] if group in begun else [other for other in group.preds if other not in done]
            begun.add(group)
            waiting += sorted(missing, key=place.__getitem__, reverse=True)
            if not missing:
                done[waiting.pop()] = None
    out = list(done)
    assert len(out) == len(groups), "fusion made a cycle"
    return out
