"""The order with the smallest peak of memory among several. Imports `ir_nodes` and `barriers` parts only."""

from __future__ import annotations

from typing import Callable, Sequence

from barriers.dependencies import predecessors
from barriers.model import memory
from ir_nodes import Graph, Node
from ir_nodes.ops import COLLECTIVE, info

WORTH = 0.98
"""What a peak must come down to, as a part of the program's, for an order to be preferred to the program's."""


def lower_peak(graph: Graph, moved: Callable[[Graph], int] = lambda graph: 0) -> Graph:
    """Make values when they are needed, depth first, where the model of memory says that this lowers the peak. Returns ``graph``.

    Orders that a schedule or collectives have a say in stay. ``moved``: bytes that a graph moves through memory; an order under
    which fewer ops share a kernel, so that more is moved, is not taken. Linear.
    """
    if any(node.segment is not None or node.stage or info(node.target).kind in COLLECTIVE for node in graph.nodes):
        return graph
    nodes = graph.nodes
    order = [nodes[position] for position in depth_first(predecessors(graph))]
    if _peak(graph, order) <= WORTH * _peak(graph, nodes):
        before = moved(graph)
        graph.nodes = order
        if moved(graph) > before:
            graph.nodes = nodes
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
