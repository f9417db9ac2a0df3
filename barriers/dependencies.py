"""Which nodes must run before which. Imports `ir_nodes` only.

Three kinds of edge, as in a compiler's textbook: a node *reads* what another made, it *overwrites* memory that another reads,
or it overwrites what another wrote. The last two exist because all values of a buffer share its memory.
"""

from __future__ import annotations

from typing import Iterator

from ir_nodes import Graph, Node, Value


def older_values(graph: Graph) -> dict[Value, Value]:
    """For each value the one that it replaces in memory. Passes may have removed versions between the two."""
    return {new: old for values in graph.values for old, new in zip(values, values[1:])}


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


def predecessors(graph: Graph) -> list[list[int]]:
    """For each node of ``graph.nodes`` the positions of those that must run before it. Linear in operands."""
    older = older_values(graph)
    place = {node: position for position, node in enumerate(graph.nodes)}
    return [list({place[other]: None for other, _, _ in needs(node, older)}) for node in graph.nodes]
