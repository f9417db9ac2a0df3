"""The order with the smallest peak of memory among several. Imports `ir_nodes` and `barriers` parts only."""

from __future__ import annotations

from typing import Callable, Sequence

from barriers.dependencies import predecessors
from barriers.model import memory
from ir_nodes import Graph, Node
from ir_nodes.ops import COLLECTIVE, info
from ir_nodes.remarks import Remarks

WORTH = 0.98
"""What a peak must come down to, as a part of the program's, for an order to be preferred to the program's."""


def lower_peak(graph: Graph, moved: Callable[[Graph], int] = lambda graph: 0, remarks: Remarks | None = None) -> Graph:
    """Make values when they are needed, depth first, where the model of memory says that this lowers the peak. Returns ``graph``.

    Orders that a schedule or collectives have a say in stay. ``moved``: bytes that a graph moves through memory; an order under
    which fewer ops share a kernel, so that more is moved, is not taken. Linear.
    """
    remarks = remarks or Remarks()
    if any(node.segment is not None or node.stage or info(node.target).kind in COLLECTIVE for node in graph.nodes):
        remarks.refused("peak_order", "", "a schedule or collectives have a say in the order")
        return graph
    nodes = graph.nodes
    order = [nodes[position] for position in depth_first(predecessors(graph))]
    mine, other = _peak(graph, nodes), _peak(graph, order)
    told = f"{100 * (mine - other) / max(mine, 1):.0f} % less memory held at most, before fusion"
    if other > WORTH * mine:
        remarks.refused("peak_order", "", "making values only when they are needed would hold " + (
            "no less memory at most" if other >= mine else "hardly less memory at most"))
        return graph
    before = moved(graph)
    graph.nodes = order
    if moved(graph) > before:
        graph.nodes = nodes
        remarks.refused("peak_order", "", f"fewer ops would share a kernel in the better order ({told})")
    else:
        remarks.did("peak_order", "", f"values are made when they are needed: {told}")
    return graph


def depth_first(before: Sequence[Sequence[int]]) -> list[int]:
    """Positions so that each comes right behind all that it needs, what nobody needs in the given order."""
    needed = {other for others in before for other in others}
    order: list[int] = []
    state = [0] * len(before)  # 1: what it needs is on the way, 2: done
    for last in range(len(before)):
        stack = [last] if last not in needed else []
        while stack:
            position = stack[-1]
            if state[position] == 0:
                state[position] = 1
                stack += sorted((other for other in before[position] if not state[other]), reverse=True)
                continue
            stack.pop()
            if state[position] == 1:
                state[position] = 2
                order.append(position)
    return order


def _peak(graph: Graph, nodes: Sequence[Node]) -> int:
    return max(memory(graph, nodes), default=0)
