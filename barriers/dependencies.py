"""Which nodes must run before which. Imports `ir_nodes` only.

Three kinds of edge, as in a compiler's textbook: a node *reads* what another made, it *overwrites* memory that another reads,
or it overwrites what another wrote. The last two exist because all values of a buffer share its memory.
"""

from __future__ import annotations

from typing import Iterator, Sequence

from ir_nodes import Graph, Node, Value


def older_values(graph: Graph) -> dict[Value, Value]:
    """For each value the one that it replaces in memory, where a node knows that one. Passes may have removed some in between."""
    found: dict[Value, Value] = {}
    for values in graph.values:
        if len(values) > 2 or (len(values) == 2 and values[0].users):
            found.update((new, old) for old, new in zip(values, values[1:]) if old.users or old.producer)
    return found


def needs(node: Node, older: dict[Value, Value]) -> Iterator[tuple[Node, Value, str]]:
    """Every node that must run before ``node``, the value that says so, and how: "needs" or "overwrites". May repeat."""
    for value in node.inputs():
        if value.producer is not None and value.producer is not node:
            yield value.producer, value, "needs"
    for write in node.all_writes():
        old = older.get(write.value)
        if old is None:
            continue
        for user in old.users:
            if user is not node:
                yield user, old, "overwrites"
        if old.producer is not None and old.producer is not node:
            yield old.producer, old, "overwrites"


def predecessors(graph: Graph, nodes: Sequence[Node] | None = None) -> list[list[int]]:
    """For each of ``nodes`` (None: the graph's) the positions of those that must run before it. Linear in operands.

    The same as `needs`, written out: this is most of what scheduling costs.
    """
    older = older_values(graph)
    nodes = graph.nodes if nodes is None else nodes
    place = {node: position for position, node in enumerate(nodes)}
    found: list[list[int]] = []
    for node in nodes:
        others: dict[int, None] = {}
        for operand in node.reads:
            producer = operand.value.producer
            if producer is not None:
                others[place[producer]] = None
        for write in node.writes + node.effects if node.effects else node.writes:
            if write.base is not None and write.base.producer is not None:
                others[place[write.base.producer]] = None
            old = older.get(write.value) if older else None
            if old is not None:
                others.update((place[user], None) for user in old.users)
                if old.producer is not None:
                    others[place[old.producer]] = None
        others.pop(place[node], None)
        found.append(list(others))
    return found
