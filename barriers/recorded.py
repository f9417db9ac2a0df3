"""What a schedule hook is told, and what it may answer. Imports `ir_nodes` and `barriers` parts only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable, Sequence

from barriers.calls import Run, first_come
from barriers.model import last_uses, touched
from ir_nodes import BufferKind, Graph, SegmentCall
from ir_nodes.estimate import Cost


@dataclass(slots=True, eq=False)
class RecordedSegment:
    """One recorded run of a segment; what it says of ops counts those of the segments inside it too.

    ``call``: runs of a segment in one recording count from 0; ``inside``: the segment around it; ``ops``: targets such as
    "aten::mm" in recorded order; ``seconds``: what computing is estimated to take, ``communication`` what its collectives take;
    ``bytes_made``, ``bytes_freed``: of buffers that it is the first, the last to use; ``needs``: the segments whose results it
    reads or overwrites, at once or through ops outside any segment.
    """

    name: str
    backward: bool
    call: int
    inside: RecordedSegment | None
    ops: list[str] = field(default_factory=list)
    seconds: float = 0.0
    communication: float = 0.0
    bytes_made: int = 0
    bytes_freed: int = 0
    needs: tuple[RecordedSegment, ...] = ()
    holds_others: bool = False  # segments run inside it
    buffers: dict[int, None] = field(default_factory=dict)  # numbers of those that it touches

    def __str__(self) -> str:
        return f"{self.name}#{self.call}" if self.call else self.name


Named = RecordedSegment | str
"""A segment: the object, its name (every call), or one call's name ("mlp#1")."""


@dataclass(frozen=True, slots=True)
class Before:
    """``earlier`` runs as a whole before ``later``; ``beside``: and right beside it, by moving "earlier" or "later"."""

    earlier: Named
    later: Named
    beside: str | None = None


@dataclass(frozen=True, slots=True)
class Early:
    """The segment runs as soon as what it needs can be there; what it needs comes first."""

    segment: Named


@dataclass(frozen=True, slots=True)
class Late:
    """The segment runs right before whoever needs it first, or at the end."""

    segment: Named


@dataclass(frozen=True, slots=True)
class Overlap:
    """Collectives start as soon as they can, and what waits for one gives way to what need not.

    ``pull``: what they need comes first as well.
    """

    pull: bool = False


Constraint = Before | Early | Late | Overlap | tuple[Named, Named]
Ask = Callable[["Recorded"], Iterable[Constraint] | None]


class Recorded:
    """The segments of one recording in recorded order.

    ``buffers``, by number: bytes, is it alive in the end, was it there before. ``communicates``: are there any collectives?
    """

    def __init__(
        self,
        segments: Sequence[RecordedSegment],
        buffers: Sequence[tuple[int, bool, bool]],
        communicates: bool,
        peak: Callable[[Sequence[Constraint]], int],
        seconds: Callable[[Sequence[Constraint]], float],
        allows: Callable[[RecordedSegment, RecordedSegment], bool],
    ) -> None:
        self.segments = tuple(segments)
        self.buffers = tuple(buffers)
        self.communicates = communicates
        self._peak, self._seconds, self._allows = peak, seconds, allows

    @property
    def innermost(self) -> tuple[RecordedSegment, ...]:
        """The segments that no other runs inside of."""
        return tuple(segment for segment in self.segments if not segment.holds_others)

    def peak_bytes(self, constraints: Sequence[Constraint] = ()) -> int:
        """The most bytes that would be held at once under these constraints; none: under those asked for so far."""
        return self._peak(constraints)

    def seconds(self, constraints: Sequence[Constraint] = ()) -> float:
        """How long it would take, with collectives beside the computation."""
        return self._seconds(constraints)

    def allows(self, earlier: RecordedSegment, later: RecordedSegment) -> bool:
        """May ``earlier`` run as a whole before ``later``, by data flow and what was asked for so far?"""
        return self._allows(earlier, later)


def describe_calls(graph: Graph, runs: Sequence[Run], before: list[list[int]], costs: Sequence[Cost],
                   owner: int | None) -> dict[SegmentCall, RecordedSegment]:
    """What a hook is told of each call, in recorded order; with ``owner``, of the calls under that scheduler."""
    told: dict[SegmentCall, RecordedSegment] = {}
    for call in first_come(runs):
        if owner is None or owner in call.owners:
            around = told.get(call.parent) if call.parent else None
            told[call] = RecordedSegment(call.name, call.backward, call.call, around)
            if around is not None:
                around.holds_others = True
    last = last_uses(graph.nodes)
    seen = {buffer.index for buffer in graph.buffers if buffer.kind is not BufferKind.FRESH}
    for call, start, end in runs:
        chain = [told[one] for one in call.chain() if one in told] if call else []
        for position in range(start, end):
            note_node(graph, position, chain, costs[position], seen, last)
    for call, others in needs_of(graph, runs, before).items():
        if call in told:
            told[call].needs = tuple(segment for other, segment in told.items() if other in others)
    return told


def note_node(graph: Graph, position: int, chain: Sequence[RecordedSegment], cost: Cost, seen: set[int],
              last: dict[int, int]) -> None:
    """Add one node to the segments that it belongs to."""
    node = graph.nodes[position]
    used = touched(node)
    made = freed = 0
    for index in used:
        buffer = graph.buffers[index]
        if index not in seen:
            made += buffer.nbytes
        if last[index] == position and not buffer.live and buffer.kind is not BufferKind.GENERATOR:
            freed += buffer.nbytes
    seen.update(used)
    for segment in chain:
        segment.ops.append(node.target)
        segment.buffers.update(used)
        segment.bytes_made += made
        segment.bytes_freed += freed
        if cost.collective:
            segment.communication += cost.seconds
        else:
            segment.seconds += cost.seconds


def needs_of(graph: Graph, runs: Sequence[Run], before: list[list[int]]) -> dict[SegmentCall, dict[SegmentCall, None]]:
    """The calls that each call needs, at once or through nodes of no segment; neither what it is part of nor its own parts."""
    calls = list(dict.fromkeys(call for call, _, _ in runs if call))
    bit = {call: 1 << number for number, call in enumerate(calls)}
    reach = [0] * len(graph.nodes)  # of what is read from outside: the calls that made it
    needed = dict.fromkeys(calls, 0)
    for call, start, end in runs:
        for position in range(start, end):
            mask = 0
            for other in before[position]:
                maker = graph.nodes[other].segment
                mask |= bit[maker] if maker else reach[other]
            reach[position] = mask
            if call:
                needed[call] |= mask & ~bit[call]
    found: dict[SegmentCall, dict[SegmentCall, None]] = {}
    for call, mask in needed.items():
        for number, other in enumerate(calls):
            if mask >> number & 1:
                mine, theirs = list(call.chain()), list(other.chain())
                for one in mine:
                    found.setdefault(one, {}).update((two, None) for two in theirs if two not in mine and one not in theirs)
    return found
