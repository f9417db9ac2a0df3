"""Which stretches of a graph belong to which call of a segment. Imports `ir_nodes` only."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from ir_nodes import Node, SegmentCall

Run = tuple[SegmentCall | None, int, int]
"""A stretch of nodes of one segment (None: of none): the segment, its first position, the position behind its last."""


class Measured(NamedTuple):
    """How long a stretch of ops took on the device. ``waits``: nothing computed, it waited for a collective."""

    call: SegmentCall | None
    waits: bool
    seconds: float


def runs_of(nodes: Sequence[Node]) -> list[Run]:
    """All nodes, stretch by stretch."""
    runs: list[Run] = []
    start = 0
    last = nodes[0].segment if nodes else None
    for position, node in enumerate(nodes):
        if node.segment is not last:
            runs.append((last, start, position))
            start, last = position, node.segment
    return [*runs, (last, start, len(nodes))] if nodes else []


def calls_of(runs: Sequence[Run]) -> dict[str, list[SegmentCall]]:
    """The calls of each segment by name, in the order in which they ran."""
    found: dict[str, dict[SegmentCall, None]] = {}
    for segment, _, _ in runs:
        for call in segment.chain() if segment else ():
            found.setdefault(call.name, {})[call] = None
    return {name: sorted(calls, key=lambda call: call.call) for name, calls in found.items()}


def first_come(runs: Sequence[Run]) -> list[SegmentCall]:
    """Every call by its first node; a segment stands before those inside it."""
    seen: dict[SegmentCall, None] = {}
    for segment, _, _ in runs:
        for call in reversed(list(segment.chain())) if segment else ():
            seen[call] = None
    return list(seen)


def positions_of(runs: Sequence[Run]) -> dict[SegmentCall, list[int]]:
    """The positions of each call's nodes, those of segments inside it included."""
    found: dict[SegmentCall, list[int]] = {}
    for segment, start, end in runs:
        for call in segment.chain() if segment else ():
            found.setdefault(call, []).extend(range(start, end))
    return found
