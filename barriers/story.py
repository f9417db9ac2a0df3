"""What a report shows of one recording: its segments, what their order costs, and lanes over time. Imports `ir_nodes` and
`barriers` parts only."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Sequence

from barriers.calls import Measured, first_come, runs_of
from barriers.dependencies import predecessors
from barriers.model import lanes, last_uses, memory, overlap, touched
from barriers.recorded import describe_calls
from ir_nodes import BufferKind, Graph, Node, SegmentCall
from ir_nodes.estimate import Rates, cost


@dataclass(frozen=True, slots=True)
class Box:
    """A stretch of ops of one segment (None: of none) on a lane, in seconds from the start."""

    call: SegmentCall | None
    collective: bool
    start: float
    end: float
    ops: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one order of a recording is estimated to cost.

    ``seconds`` in all; ``computing`` and ``communicating`` on their lanes; ``exposed``: communication while nothing computes.
    """

    boxes: tuple[Box, ...]
    peak: int
    seconds: float
    computing: float
    communicating: float
    exposed: float


@dataclass(slots=True)
class Row:
    """One run of a segment. ``places``: in recorded order, and in the order in which it ran, from 1.

    ``held``: bytes that would have been free earlier, had the segment not been delayed; ``measured``: seconds on the device.
    """

    call: SegmentCall
    places: tuple[int, int]
    ops: int
    seconds: float
    communication: float
    made: int
    freed: int
    held: int
    needs: list[str] = field(default_factory=list)
    measured: float | None = None


@dataclass(slots=True)
class Story:
    """One recording: a row for each run of a segment in the order in which it ran, and both orders' outlook.

    ``measured``: seconds of each stretch in the order in which they ran, if they were measured.
    """

    rows: list[Row]
    recorded: Outlook
    scheduled: Outlook
    measured: list[Measured] = field(default_factory=list)


def tell(graph: Graph, rates: Rates) -> Story:
    """The story of an ordered graph; its nodes' indices say in which order they were recorded."""
    program = sorted(graph.nodes, key=lambda node: node.index)
    scheduled = graph.nodes
    told = describe_calls(graph, runs_of(scheduled), predecessors(graph), [cost(node, rates) for node in scheduled], None)
    places = {call: place for place, call in enumerate(first_come(runs_of(program)), 1)}
    held = held_by_delay(graph, program, scheduled)
    rows = [
        Row(call, (places[call], place), len(one.ops), one.seconds, one.communication, one.bytes_made, one.bytes_freed,
            held.get(call, 0), list(map(str, one.needs)))
        for place, (call, one) in enumerate(told.items(), 1)
    ]
    return Story(rows, outlook(graph, program, rates), outlook(graph, scheduled, rates))


def outlook(graph: Graph, nodes: Sequence[Node], rates: Rates) -> Outlook:
    """What the graph's nodes cost in this order."""
    spans = lanes(range(len(nodes)), predecessors(graph, nodes), [cost(node, rates) for node in nodes])
    boxes: list[Box] = []
    last: dict[bool, int] = {}  # of each lane
    for span in spans:
        call = nodes[span.position].segment
        one = boxes[last[span.collective]] if span.collective in last else None
        if one is not None and one.call is call and span.start - one.end < 1e-12:
            boxes[last[span.collective]] = Box(call, span.collective, one.start, span.end, one.ops + 1)
        else:
            last[span.collective] = len(boxes)
            boxes.append(Box(call, span.collective, span.start, span.end, 1))
    seconds = max((span.end for span in spans), default=0.0)
    return Outlook(tuple(boxes), max(memory(graph, nodes), default=0), seconds, *overlap(spans))


def held_by_delay(graph: Graph, program: Sequence[Node], scheduled: Sequence[Node]) -> dict[SegmentCall, int]:
    """Bytes of what only waits for a delayed segment: made before it, or given, and used by nobody after it."""
    delayed = delayed_calls(first_come(runs_of(program)), first_come(runs_of(scheduled)))
    first: dict[int, int] = {}
    for position, node in enumerate(scheduled):
        for index in touched(node):
            first.setdefault(index, position)
    held: dict[SegmentCall, int] = {}
    for index, position in last_uses(scheduled).items():
        buffer, call = graph.buffers[index], scheduled[position].segment
        born = scheduled[first[index]].segment
        if call is None or call not in delayed or buffer.live or buffer.kind is BufferKind.GENERATOR:
            continue
        if born is not call or buffer.kind is BufferKind.INPUT:
            held[call] = held.get(call, 0) + buffer.nbytes
    return held


def delayed_calls(recorded: Sequence[SegmentCall], scheduled: Sequence[SegmentCall]) -> set[SegmentCall]:
    """The calls that run later than recorded, the others' order taken as it is: as few as possible count as moved.

    Who stays is the longest increasing subsequence of places (Schensted 1961), of several the one that runs first.
    """
    place = {call: number for number, call in enumerate(recorded)}
    ends: list[int] = []  # the best last place of a subsequence of each length, from the end backwards and negated
    chosen: list[SegmentCall] = []
    before: dict[SegmentCall, SegmentCall | None] = {}
    for call in reversed(scheduled):
        number = bisect.bisect_left(ends, -place[call])
        before[call] = chosen[number - 1] if number else None
        ends[number:], chosen[number:] = [-place[call], *ends[number + 1 :]], [call, *chosen[number + 1 :]]
    stays: set[SegmentCall] = set()
    last = chosen[-1] if chosen else None
    while last is not None:
        stays.add(last)
        last = before[last]
    run = {call: number for number, call in enumerate(scheduled)}
    return {call for call in scheduled if call not in stays and any(run[other] < run[call] and place[other] > place[call]
                                                                   for other in stays)}
