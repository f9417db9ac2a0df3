"""Where collectives are waited for, and in which order they start. Imports `ir_nodes` and `barriers.dependencies` only.

A collective is recorded as two nodes, its start and its wait. The start belongs to the segment that it was recorded in and
moves with it. The wait belongs to nobody: it runs right before the first node that needs it, or at the end.
"""

from __future__ import annotations

import itertools
from typing import Iterator

from barriers.dependencies import predecessors
from ir_nodes import Graph, Node
from ir_nodes.ops import COLLECTIVE, info

_POINT_TO_POINT = ("lazysched::send", "lazysched::recv", "lazysched::launch")


def release_waits(graph: Graph) -> bool:
    """Take each wait out of its segment. Are there collectives?"""
    found = False
    for node in graph.nodes:
        kind = info(node.target).kind
        found = found or kind in COLLECTIVE
        if kind == "wait":
            node.segment = None
    return found


def sink_waits(graph: Graph) -> None:
    """Move each wait right before the first node that needs it. The order of all other nodes stays."""
    if not any(info(node.target).kind == "wait" for node in graph.nodes):
        return
    before = predecessors(graph)
    floating: dict[int, None] = {}
    order: list[int] = []

    def needed_by(position: int) -> Iterator[int]:
        """The waits that are still to come and must run before; by data flow they may need one another."""
        for other in sorted(before[position]):
            if other in floating:
                del floating[other]
                yield from needed_by(other)
                yield other

    for position, node in enumerate(graph.nodes):
        if info(node.target).kind == "wait":
            floating[position] = None
            continue
        order.extend(needed_by(position))
        order.append(position)
    while floating:
        last = next(iter(floating))
        del floating[last]
        order.extend(needed_by(last))
        order.append(last)
    graph.nodes = [graph.nodes[position] for position in order]


def join_launches(graph: Graph) -> None:
    """Put sends and receives that stand side by side before the launches of each, so that the first launch starts them all."""
    order: list[Node] = []
    for together, nodes in itertools.groupby(graph.nodes, lambda node: node.target in _POINT_TO_POINT):
        order += sorted(nodes, key=lambda node: together and node.name == "launch")
    graph.nodes = order


def part_stages(graph: Graph) -> None:
    """A stage of its own for what follows each start and each wait, so that no kernel joins what lies on both sides of one.

    Fusion may then neither delay a start nor bring a wait forward, and collectives start in the order of ``graph.nodes``.
    """
    stage, last = 0, None
    for node in graph.nodes:
        if info(node.target).kind in COLLECTIVE or (last is not None and node.stage != last):
            stage += 1
        last, node.stage = node.stage, stage


def starts(graph: Graph) -> list[Node]:
    """The collectives in the order in which they start."""
    return [node for node in graph.nodes if info(node.target).kind == "collective"]
