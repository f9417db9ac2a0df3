"""Drops what nobody can look at. Imports `ir_nodes` only."""

from __future__ import annotations

from typing import Sequence

from ir_nodes import Graph, Node
from ir_nodes.ops import COLLECTIVE, info


def eliminate_dead(graph: Graph) -> Graph:
    """Keep the nodes that some live buffer's last value is computed from, and those that are run for no value at all.

    Assertions are such nodes, and collectives, in which other ranks take part. A live generator's state counts as such a
    buffer, and a partial write keeps the value whose other bytes survive. Linear in nodes and operands. Returns ``graph``,
    without the dead nodes and their values.
    """
    alive = reachable(graph)
    drop(graph, [node for node in graph.nodes if node not in alive])
    return graph


def drop(graph: Graph, dead: Sequence[Node]) -> None:
    """Remove nodes, which nobody else uses, with their values."""
    graph.remove(dead)
    gone = set(dead)
    for values in graph.values:
        values[:] = [value for value in values if value.producer not in gone]


def reachable(graph: Graph) -> set[Node]:
    """The nodes that `eliminate_dead` keeps."""
    pending = [value.producer for value in graph.outputs()]
    pending += [node for node in graph.nodes if not node.all_writes() or info(node.target).kind in COLLECTIVE]
    alive: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is None or node in alive:
            continue
        alive.add(node)
        pending.extend(value.producer for value in node.inputs())
    return alive
