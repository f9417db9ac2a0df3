"""The cheapest set of vertices that parts sources from sinks. Imports nothing of ours.

Ford and Fulkerson's theorem with the shortest augmenting paths of Edmonds and Karp (1972), on vertices with capacities: each is
two, with its capacity between them. Networks here have some dozens of vertices.
"""

from __future__ import annotations

from collections import deque
from typing import Hashable, Mapping, Sequence, TypeVar

V = TypeVar("V", bound=Hashable)
NEVER = 1 << 62
"""The capacity of a vertex that cannot be cut."""


def min_cut(capacity: Mapping[V, int], after: Mapping[V, Sequence[V]], sources: Sequence[V], sinks: Sequence[V]) -> set[V] | None:
    """Of the cheapest cuts the one nearest to the ``sinks``; None where every cut holds a vertex of capacity NEVER.

    ``after``: for each vertex those that its edges lead to. A source or a sink may be cut itself.
    """
    names = list(capacity)
    number = {name: index for index, name in enumerate(names)}
    source, sink = 2 * len(names), 2 * len(names) + 1
    room: list[dict[int, int]] = [{} for _ in range(sink + 1)]

    def edge(start: int, end: int, limit: int) -> None:
        room[start][end] = limit
        room[end].setdefault(start, 0)

    for name, index in number.items():
        edge(2 * index, 2 * index + 1, capacity[name])
        for other in after.get(name, ()):
            edge(2 * index + 1, 2 * number[other], NEVER)
    for name in sources:
        edge(source, 2 * number[name], NEVER)
    for name in sinks:
        edge(2 * number[name] + 1, sink, NEVER)
    while (path := _path(room, source, sink)) is not None:
        amount = min(room[start][end] for start, end in zip(path, path[1:]))
        if amount >= NEVER // 2:
            return None
        for start, end in zip(path, path[1:]):
            room[start][end] -= amount
            room[end][start] += amount
    reaches = _reaching(room, sink)
    return {name for name, index in number.items() if 2 * index + 1 in reaches and 2 * index not in reaches}


def _path(room: Sequence[Mapping[int, int]], source: int, sink: int) -> list[int] | None:
    """The shortest way on which there is room."""
    came: dict[int, int] = {source: source}
    waiting = deque([source])
    while waiting:
        vertex = waiting.popleft()
        for other, limit in room[vertex].items():
            if limit > 0 and other not in came:
                came[other] = vertex
                waiting.append(other)
    if sink not in came:
        return None
    path = [sink]
    while path[-1] != source:
        path.append(came[path[-1]])
    return path[::-1]


def _reaching(room: Sequence[Mapping[int, int]], sink: int) -> set[int]:
    """What can still reach the sink."""
    found = {sink}
    waiting = [sink]
    while waiting:
        vertex = waiting.pop()
        for other in room[vertex]:
            if other not in found and room[other].get(vertex, 0) > 0:
                found.add(other)
                waiting.append(other)
    return found
