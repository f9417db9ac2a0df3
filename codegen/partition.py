"""Which nodes would share a kernel, before any kernel is made: what `barriers.passes.recompute` asks. Imports `ir_nodes` and
codegen's planning modules."""

from __future__ import annotations

from codegen.fuse import fused, units_of
from codegen.lowered import Lowered
from codegen.tuning import HOPPER, Tuning
from ir_nodes import Graph, Node


def partition(graph: Graph, tuning: Tuning = HOPPER, lowered: Lowered | None = None) -> list[tuple[tuple[Node, ...], bool]]:
    """The kernels that ``graph`` would become, each as its nodes and whether it is fused; otherwise ATen runs it.

    ``lowered``: what earlier passes know of its nodes, and what later ones may. Ops over lists, which are in many kernels, count
    as run by ATen: an optimizer's are most of what planning costs.
    """
    groups = fused(units_of(graph, (), tuning, lists=False, lowered=lowered), tuning, {}).groups()
    return [(tuple(dict.fromkeys(unit.node for unit in group.units)), group.fusible) for group in groups]
