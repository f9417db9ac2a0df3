"""Parts a graph into as few runs as possible of nodes that one compiler takes together, with the others between them. Imports
`ir_nodes` only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ir_nodes.graph import Graph
from ir_nodes.node import Node, Value


@dataclass(slots=True)
class Run:
    """Nodes in order. ``together``: one compiled run; else each is a call of its own."""

    together: bool
    nodes: list[Node] = field(default_factory=list)


def part(graph: Graph, taken: Collection[Node]) -> list[Run]:
    """Runs in an order that keeps data flow, overwrites and stages.

    Others come as early as they can, runs as late: what needs no run's result stands before the first one.
    """
    level: dict[Node, int] = {}
    runs: list[Run] = []
    stage, first = None, 0
    for node in graph.nodes:
        if node.stage != stage:
            stage, first = node.stage, len(runs)
        together = node in taken
        place = first + (first % 2 != together)  # runs stand at odd places
        for earlier in before(graph, node):
            if earlier in level:
                place = max(place, level[earlier] + (level[earlier] % 2 != together))
        level[node] = place
        while len(runs) <= place:
            runs.append(Run(len(runs) % 2 == 1))
        runs[place].nodes.append(node)
    return [run for run in runs if run.nodes]


def before(graph: Graph, node: Node) -> dict[Node, None]:
    """What must have run: makers of what it needs, makers and readers of what it overwrites."""
    found: dict[Node, None] = {}
    for value in node.inputs():
        if value.producer is not None:
            found[value.producer] = None
    for write in node.all_writes():
        for old in overwritten(graph, write.value):
            found.update(old.users)
            if old.producer is not None:
                found[old.producer] = None
    found.pop(node, None)
    return found


def overwritten(graph: Graph, value: Value) -> list[Value]:
    """Earlier values of its buffer, back to the last one that is still made: passes leave gaps."""
    found: list[Value] = []
    for old in reversed([one for one in graph.values[value.buffer.index] if one.version < value.version]):
        found.append(old)
        if old.users:
            break
    return found


def stored(graph: Graph, run: Run) -> list[Value]:
    """Values made in ``run`` that must be in memory after it: the last of a buffer, where anybody outside needs it."""
    inside = set(run.nodes)
    outputs = set(graph.outputs())
    last: dict[int, Value] = {}
    for node in run.nodes:
        for write in node.writes:
            last[write.value.buffer.index] = write.value
    return [value for value in last.values() if value in outputs or any(user not in inside for user in value.users)]
