"""Which nodes would share a kernel and what that leaves in memory, before any kernel is made: what passes ask. Imports `ir_nodes`
and codegen's planning modules."""

from __future__ import annotations

from codegen.fuse import fused, units_of, users_of
from codegen.group import Group
from codegen.lowered import Lowered
from codegen.tuning import HOPPER, Tuning
from ir_nodes import Graph, Node


def partition(graph: Graph, tuning: Tuning = HOPPER, lowered: Lowered | None = None) -> list[tuple[tuple[Node, ...], bool]]:
    """The kernels that ``graph`` would become, each as its nodes and whether it is fused; otherwise ATen runs it.

    ``lowered``: what earlier passes know of its nodes, and what later ones may. Ops over lists, which are in many kernels, count
    as run by ATen: an optimizer's are most of what planning costs.
    """
    groups = groups_of(graph, tuning, lowered)
    return [(tuple(dict.fromkeys(unit.node for unit in group.units)), group.fusible) for group in groups]


def groups_of(graph: Graph, tuning: Tuning, lowered: Lowered | None) -> list[Group]:
    return fused(units_of(graph, (), tuning, lists=False, lowered=lowered), tuning, {}).groups()


def unstored(graph: Graph, tuning: Tuning = HOPPER, lowered: Lowered | None = None) -> set[int]:
    """Buffers whose values would never leave a kernel, or would be computed again by everyone who reads them."""
    groups = groups_of(graph, tuning, lowered)
    home = {unit: group for group in groups for unit in group.units}
    readers = users_of(list(home))
    lasting = set(graph.outputs())
    stored = {value.buffer.index for unit, group in home.items() for value in unit.makes
              if value in lasting or not group.fusible or any(home[user] is not group for user in readers.get(value, ()))}
    written = {write.value.buffer.index for node in graph.nodes for write in node.all_writes()}
    return written - stored
