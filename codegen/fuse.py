"""Turns a graph into an ordered plan of kernels and ATen calls. Imports `ir_nodes` and codegen's planning modules.

First in recorded order: each node starts a group of its own and is merged into the groups that make its operands, where
`codegen.rules.can_fuse` allows. Then in rounds, the best pairs of groups first (`codegen.rounds`), those that only read the same
among them. Groups carry a level that rises along every dependency; a merge must keep that so, which is a local test and excludes
cycles.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Collection, Iterable, Mapping, Sequence

from codegen import formulas, inline
from codegen.crops import read_crops
from codegen.expressions import Unsupported
from codegen.group import Group, Unit, joint_level, lifted_level, merge, new_group, sort_groups
from codegen.instructions import MemAccess, Part
from codegen.kernel import Plan, Refusal
from codegen.lowered import Lowered, check
from codegen.norm_rows import Norms
from codegen.onehot import Hots, known_sums, remember_hot
from codegen.pad_products import pad_products
from codegen.product import lower_product
from codegen.pulled import nothing_known
from codegen.reordering import follow, stores
from codegen.rounds import pairs
from codegen.row_totals import by_rows
from codegen.rules import can_fuse
from codegen.steps import Steps
from codegen.taken import compute_taken
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings
from ir_nodes.graph import Graph
from ir_nodes.node import Node, Value
from ir_nodes.remarks import Remarks

MAX_CANDIDATES = 6
MAX_NEIGHBOURS = 256
MAX_ROUNDS = 4

Sides = Mapping[int, tuple[int, int]]
"""For units by position (what, side): two of one ``what`` on different sides do not share a kernel."""


def plan(graph: Graph, order: Iterable[tuple[Node, Node]] = (), tuning: Tuning = HOPPER, sides: Sides = MappingProxyType({}),
         products: Collection[Node] = (), lowered: Lowered | None = None, remarks: Remarks | None = None) -> Plan:
    """Kernels and extern calls for ``graph``, in an order that keeps data flow, overwrites and the extra edges ``order``.

    ``order`` holds (earlier, later) pairs that data flow does not show: collectives, segments; ``graph.nodes`` already keeps
    them. ``sides`` and ``products`` are what measurements have found; ``lowered``: what earlier passes know;
    ``remarks`` are told what became of padding.
    """
    return plan_units(units_of(graph, order, tuning, products, lowered=lowered, remarks=remarks), graph.outputs(), tuning, sides)


def units_of(graph: Graph, order: Iterable[tuple[Node, Node]], tuning: Tuning, products: Collection[Node] = (),
             lists: bool = True, lowered: Lowered | None = None, remarks: Remarks | None = None) -> list[Unit]:
    """Every node that is needed as units, which know what they wait for; ``products`` are multiplied by kernels. Without
    ``lists``, ops over lists are left to ATen."""
    if lists and settings.enabled("pad_rows"):
        pad_products(graph, remarks, tuning.overreads)
    units = lower_all(graph, tuning, lists, lowered)
    units = needed_units(by_rows(units) if settings.enabled("row_totals") else units, dict.fromkeys(graph.outputs()))
    for unit in units:
        if unit.node in products and unit.node not in graph.left:
            unit.part = lower_product(unit.node)
            unit.needs, unit.makes = memory_of(unit.part, {})
    add_dependencies(graph, units, order)
    return units


def plan_units(units: Sequence[Unit], wanted: Iterable[Value], tuning: Tuning, sides: Sides) -> Plan:
    """Kernels and extern calls for ``units``, which leave the values ``wanted`` in memory."""
    fuser = fused(units, tuning, sides)
    groups = sort_groups(fuser.groups())
    made = Steps(wanted, users_of(units), tuning)
    for group in groups:
        made.add(group)
    return Plan(tuple(made.steps), made.scratch.all(), tuple(fuser.refusals), tuple(made.needs))


def lower_all(graph: Graph, tuning: Tuning = HOPPER, lists: bool = True, lowered: Lowered | None = None) -> list[Unit]:
    """Every node as units, in order."""
    lowered = lowered or Lowered()
    units: list[Unit] = []
    scratch, made_by_aten, known = 0, 0, nothing_known()
    recipes: inline.Recipes = {}
    known_numbers: formulas.Formulas = {}
    hots: Hots = {}
    makers: dict[Value, MemAccess] = {}
    copies: dict[Value, MemAccess] = {}  # made by nodes that are there for those who follow them
    norms = Norms(graph, recipes)
    ordered, inlined, computed, windows = map(settings.enabled, ("loop_order", "recompute", "formulas", "windows"))
    for node in graph.nodes:
        try:
            check(node, graph.left, lists)
            parts = inlined and norms.parts(node) or lowered.parts(node, scratch, tuning, known)
        except Unsupported as refusal:
            made = tuple(write.value for write in node.all_writes())
            made_by_aten += sum(value.buffer.nbytes for value in made)
            units.append(Unit(len(units), node, None, str(refusal), tuple(node.inputs()), made))
            known.remember(node, [])
            continue
        if computed:
            parts = [formulas.compute(part, known_numbers) for part in parts]
            formulas.remember(node, parts, known_numbers)
        serves = is_there_for_others(node)
        if ordered:
            parts = [follow(part, copies if serves else makers) for part in parts]
        for part in parts:
            makers.update(stores(part))
            if serves:
                copies.update(stores(part))
        if inlined:
            parts = [known_sums(inline.inline(part, recipes), hots) for part in parts]
        if windows:
            parts = [compute_taken(part, known) if "take" in part.facts.kinds else read_crops(part, known) for part in parts]
        known.remember(node, parts)
        partial = {write.value: write.base for write in node.all_writes() if write.base is not None
                   and not write.layout.covers(write.value.buffer.nbytes)}
        for part in parts:
            needs, makes = memory_of(part, partial)
            units.append(Unit(len(units), node, part, "", needs, makes, made_by_aten))
            scratch += sum(1 for value in makes if value.buffer.index < 0)
        inline.remember(graph, node, parts, recipes)
        remember_hot(graph, node, parts, hots)
    return units


def needed_units(units: Sequence[Unit], outputs: Iterable[Value]) -> list[Unit]:
    """Without those whose readers compute for themselves what they would have stored."""
    needed = dict.fromkeys(outputs)
    kept: list[Unit] = []
    for unit in reversed(units):
        if unit.part is None or unit.part.draws or any(value in needed for value in unit.makes):
            needed.update(dict.fromkeys(unit.needs))
            kept.append(unit)
    return kept[::-1]


def is_there_for_others(node: Node) -> bool:
    """Is it made again for those who follow it? It shares a kernel with them, and walks as they do, not with what it reads."""
    return node.again and node.joins is None


def memory_of(part: Part, partial: dict[Value, Value]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """What must exist before a part runs, what it reads and what it partly overwrites; and what it makes. ``partial``: what is
    partly overwritten, by what replaces it."""
    accesses = part.accesses()
    makes = [access.value for mode, access in accesses if mode == "w"]
    needs = [*part.after, *(access.value for mode, access in accesses if mode == "r")]
    whole = [access.value for mode, access in accesses if mode == "w" and access.covers] if partial else []
    needs += [partial[value] for value in dict.fromkeys(makes) if value in partial and value not in whole] if partial else []
    if part.draws:
        makes += [write.value for write in part.node.effects]
        needs += [write.base for write in part.node.effects if write.base is not None]
    return tuple(needs), tuple(makes)


def values_written_by(group: Group) -> list[Value]:
    return [value for unit in group.units for value in unit.makes]


def users_of(units: Sequence[Unit]) -> dict[Value, dict[Unit, None]]:
    users: dict[Value, dict[Unit, None]] = {}
    for unit in units:
        for value in unit.needs:
            users.setdefault(value, {})[unit] = None
    return users


def add_dependencies(graph: Graph, units: Sequence[Unit], order: Iterable[tuple[Node, Node]]) -> None:
    """Fill `Unit.before`: producers of what it needs, and whoever needs or made the values that it overwrites."""
    producers: dict[Value, dict[Unit, None]] = {}
    users: dict[Value, dict[Unit, None]] = {}
    by_node: dict[Node, list[Unit]] = {}
    outputs = dict.fromkeys(graph.outputs())
    overwritten = {new: old for values in graph.values for old, new in zip(values, values[1:])}  # passes leave gaps in versions
    for unit in units:
        by_node.setdefault(unit.node, []).append(unit)
        for value in unit.needs:
            for maker in producers.get(value, ()):
                unit.before[maker] = None
                maker.followers[unit] = None
            users.setdefault(value, {})[unit] = None
        for value in unit.makes:
            producers.setdefault(value, {})[unit] = None
            unit.lasts = unit.lasts or value in outputs
            old = overwritten.get(value)
            while old is not None and old not in producers and old not in users:  # its readers know it without memory
                old = overwritten.get(old)
            if old is not None:
                unit.before.update(users.get(old, {}))
                unit.before.update(producers.get(old, {}))
        unit.before.pop(unit, None)
    for earlier, later in order:
        for unit in by_node.get(later, ()):
            unit.before.update(dict.fromkeys(by_node.get(earlier, ())))


def fused(units: Iterable[Unit], tuning: Tuning, sides: Sides) -> Fuser:
    """All units placed and merged."""
    fuser = Fuser(tuning, sides)
    for unit in units:
        fuser.place(unit)
    fuser.finish()
    return fuser


class Fuser:
    """Places units into groups one by one, then looks again at what could share a kernel until nothing does."""

    def __init__(self, tuning: Tuning, sides: Sides) -> None:
        self.refusals: list[Refusal] = []
        self._tuning, self._sides = tuning, sides
        self._enabled, self._horizontal = settings.enabled("fusion"), settings.enabled("horizontal")
        self._group: dict[Unit, Group] = {}
        self._all: list[Group] = []
        self._makers: dict[Value, dict[Unit, None]] = {}

    def groups(self) -> list[Group]:
        return [group for group in self._all if group.merged_into is None]

    def place(self, unit: Unit) -> None:
        """Give the unit a group, then merge that with every neighbour that allows it."""
        before = dict.fromkeys(self._group[other].root() for other in unit.before)
        later = unit.part.later if unit.part is not None else 0
        group = new_group(unit, max((other.level for other in before), default=-1) + 1 + later, self._tuning)
        for other in before:
            group.preds[other] = None
            other.succs[group] = None
        self._group[unit] = group
        self._all.append(group)
        if unit.part is not None and self._enabled:
            self._merge_all(unit, group)
        self._remember(unit)

    def finish(self) -> None:
        """Rounds of merging the best pairs, of which there were more to choose from once all units had a group."""
        for _ in range(MAX_ROUNDS if self._enabled else 0):
            refused: list[Refusal] = []
            merged = False
            for pair in pairs(self.groups(), self._horizontal):
                first, second = pair.first.root(), pair.second.root()
                reason = self._try(first, second, pair.vertical) if first is not second else None
                merged |= first is not second and reason is None
                if reason is not None and not pair.vertical:  # what one makes for the other has been told
                    refused.append(Refusal(first.units[0].node, second.units[0].node, reason))
            if not merged:
                self.refusals += refused
                return

    def _merge_all(self, unit: Unit, group: Group) -> None:
        for maker in self._candidates(unit):
            other = self._group[maker].root()
            group = group.root()
            if other is group or not other.fusible:
                continue
            reason = self._try(other, group)
            if reason is not None and maker in unit.before:
                self.refusals.append(Refusal(maker.node, unit.node, reason))

    def _candidates(self, unit: Unit) -> list[Unit]:
        """Units worth sharing a kernel with: makers of the operands, latest first, then who makes another part of the same
        value. What only loads the same waits: the unit may have to go with its readers."""
        assert unit.part is not None
        loads = [access for mode, access in unit.part.accesses() if mode == "r"]
        makers = dict.fromkeys(maker for access in loads for maker in self._makers.get(access.value, ()))
        vertical = sorted(makers, key=lambda maker: (-self._group[maker].root().level, maker.position))
        if is_there_for_others(unit.node):
            return [maker for maker in vertical if maker.node.again][:MAX_CANDIDATES]
        beside = [other for value in unit.makes for other in self._makers.get(value, ())][-1:] if self._horizontal else []
        return list(dict.fromkeys([*vertical, *beside]))[:MAX_CANDIDATES]

    def _try(self, other: Group, group: Group, lifts: bool = True) -> str | None:
        """Why the two are not merged; None: they are. ``lifts``: one reads what the other makes, and others may wait for both."""
        if len(other.succs) > MAX_NEIGHBOURS or len(other.preds) > MAX_NEIGHBOURS:
            return "too many kernels depend on it"
        if self._sides and self._apart(other, group):
            return "measured, they are faster apart"
        joint = can_fuse(other, group)
        if isinstance(joint, str):
            return joint
        level = joint_level(other, group)
        if level is None and (lifts or other.totals and group.totals or other.wants or group.wants):
            level = lifted_level(other, group)
        if level is None:
            return "what lies between them has to run between them"
        merge(other, group, joint, level)
        return None

    def _apart(self, other: Group, group: Group) -> bool:
        found = dict.fromkeys(self._sides[unit.position] for unit in (*other.units, *group.units) if unit.position in self._sides)
        return len(found) > len({what for what, _ in found})

    def _remember(self, unit: Unit) -> None:
        for value in unit.makes:
            self._makers.setdefault(value, {})[unit] = None
