"""Which nodes would share a kernel and what that leaves in memory, before any kernel is made: what passes ask. Imports `ir_nodes`
and codegen's planning modules."""

from __future__ import annotations

from codegen.fuse import fused, units_of, users_of
from codegen.lowered import Lowered
from codegen.tuning import HOPPER, Tuning
from ir_nodes import Graph
from ir_nodes.kernels import Kernel


def partition(graph: Graph, tuning: Tuning = HOPPER, lowered: Lowered | None = None) -> list[Kernel]:
    """The kernels that ``graph`` would become.

    ``lowered``: what earlier passes know of its nodes, and what later ones may. Ops over lists, which are in many kernels, count
    as run by ATen: an optimizer's are most of what planning costs.
    """
    groups = fused(units_of(graph, (), tuning, lists=False, lowered=lowered), tuning, {}).groups()
    home = {unit: group for group in groups for unit in group.units}
    readers = users_of(list(home))
    lasting = dict.fromkeys(graph.outputs())
    return [Kernel(tuple(dict.fromkeys(unit.node for unit in group.units)), group.fusible, tuple(
        value for unit in group.units for value in unit.makes
        if value in lasting or not group.fusible or any(home[user] is not group for user in readers.get(value, ()))
    )) for group in groups]
