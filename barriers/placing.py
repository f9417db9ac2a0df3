"""List scheduling: of the nodes that are ready, the one with the smallest key runs next. Imports `barriers` parts only.

Keys are recorded positions, except that a wish may give a segment the place beside another. Time grows linearly with nodes,
edges and wishes, but for the heap.
"""

from __future__ import annotations

import heapq
from typing import Sequence

from ir_nodes.estimate import Cost

START = -1.0
_STEP = 2.0**-24
Edges = Sequence[tuple[list[int], list[int]]]
"""All of the first positions before all of the second."""


def beside(position: int, number: int, behind: bool) -> float:
    """The key right before, or right ``behind``, a position; of several the later ``number`` stands nearer."""
    return position + 0.5 - number * _STEP if behind else position - 0.5 + number * _STEP


def keys(places: Sequence[tuple[list[int], float]], late: Sequence[list[int]], before: list[list[int]]) -> list[float] | None:
    """The key of each node, None where nothing moves.

    ``places``: positions and the key that they would like; what they need comes forward with them. ``late``: positions that run
    right before whoever needs them first.
    """
    if not places and not late:
        return None
    key: list[float] = list(range(len(before)))
    pulled = False
    for positions, place in places:
        pulled = pulled or place < positions[-1]
        for position in positions:
            key[position] = place
    if late:
        delay(key, {position for positions in late for position in positions}, before)
    if pulled:
        pull(key, before)
    return key


def delay(key: list[float], waits: set[int], before: list[list[int]]) -> None:
    """Right before the first who needs it, or to the end."""
    first: list[float] = [len(key)] * len(key)
    for position in range(len(key) - 1, -1, -1):
        late = position in waits
        if late:
            key[position] = first[position]
        bound = key[position] if late else key[position] - 0.5
        for other in before[position]:
            if bound < first[other]:
                first[other] = bound


def pull(key: list[float], before: list[list[int]]) -> None:
    """What a node needs comes forward with it, where the node is to run before its recorded place."""
    for position in range(len(key) - 1, -1, -1):
        wanted = key[position]
        if wanted < position:
            for other in before[position]:
                if wanted < key[other]:
                    key[other] = wanted


def list_schedule(
    before: list[list[int]], key: list[float] | None, edges: Edges, costs: Sequence[Cost] | None = None
) -> list[int]:
    """Positions in their new order. Each of ``edges`` becomes one node that does nothing.

    With ``costs``, collectives start as soon as they can, and what waits for one gives way to what need not.
    """
    count = len(before)
    total = count + len(edges)
    waiting = [len(others) for others in before] + [len(first) for first, _ in edges]
    after: list[list[int]] = [[] for _ in range(total)]
    for position, others in enumerate(before):
        for other in others:
            after[other].append(position)
    for number, (first, then) in enumerate(edges, count):
        for position in first:
            after[position].append(number)
        for position in then:
            waiting[position] += 1
        after[number] = list(then)
    by_rank = range(count) if key is None else sorted(range(count), key=key.__getitem__)
    rank = list(range(count)) + [number - total for number in range(count, total)]  # what does nothing goes first
    for place, position in enumerate(by_rank):
        rank[position] = place
    order = run(after, waiting, rank, by_rank, count) if costs is None else run_overlapped(after, waiting, rank, before, costs)
    assert len(order) == count, "a wish was granted that makes a circle"
    return order


def run(after: list[list[int]], waiting: list[int], rank: list[int], by_rank: Sequence[int], count: int) -> list[int]:
    ready = [rank[position] for position in range(len(waiting)) if not waiting[position]]
    heapq.heapify(ready)
    push, pop = heapq.heappush, heapq.heappop
    order: list[int] = []
    total = len(waiting)
    while ready:
        place = pop(ready)
        if place >= 0:
            position = by_rank[place]
            order.append(position)
        else:
            position = place + total
        for other in after[position]:
            waiting[other] -= 1
            if not waiting[other]:
                push(ready, rank[other])
    return order


def run_overlapped(
    after: list[list[int]], waiting: list[int], rank: list[int], before: list[list[int]], costs: Sequence[Cost]
) -> list[int]:
    """Two lanes, computation and communication, each of which runs one op after the other."""
    count = len(costs)
    now = link = 0.0
    done = [0.0] * len(waiting)
    ready: list[tuple[int, int]] = []  # may run now, by rank; collectives first
    later: list[tuple[float, int, int]] = []  # waits for a collective that ends then

    def arrive(position: int) -> None:
        if position < count and costs[position].collective:
            heapq.heappush(ready, (rank[position] - count, position))
            return
        until = max((done[other] for other in before[position]), default=0.0) if position < count else 0.0
        if position < count and costs[position].waits:
            done[position] = until
        elif until > now:
            heapq.heappush(later, (until, rank[position], position))
            return
        heapq.heappush(ready, (rank[position], position))

    for position, missing in enumerate(waiting):
        if not missing:
            arrive(position)
    order: list[int] = []
    while ready or later:
        if not ready:
            now = max(now, later[0][0])
        while later and later[0][0] <= now:
            heapq.heappush(ready, heapq.heappop(later)[1:])
        _, position = heapq.heappop(ready)
        if position < count:
            order.append(position)
            cost = costs[position]
            if cost.collective:
                link = done[position] = max(link, now) + cost.seconds
            elif not cost.waits:
                now = done[position] = now + cost.seconds
        for other in after[position]:
            waiting[other] -= 1
            if not waiting[other]:
                arrive(other)
    return order
