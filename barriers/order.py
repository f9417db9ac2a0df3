"""Orders a recording as its schedule wishes, as far as data flow allows. Imports `ir_nodes` and `barriers` parts only.

List scheduling: of the nodes that are ready, the one with the smallest key runs next. Keys are recorded positions, except
that a wish may give a segment the place beside another. Time grows linearly with nodes, edges and wishes (but for the heap).
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Iterator, Sequence

from barriers.accumulation import release_sums
from barriers.dependencies import needs, older_values, predecessors
from barriers.wishes import Moves, Wish, pairs
from ir_nodes import BufferKind, Frame, Graph, Node, SegmentCall

Key = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A wish that data flow forbids, or grants only in part; ``reason`` is a sentence for the user."""

    earlier: SegmentCall
    later: SegmentCall
    reason: str
    partly: bool = False

    def __str__(self) -> str:
        return f"wanted {self.earlier} before {self.later}, but {self.reason}"


@dataclass(slots=True)
class Ordered:
    """What became of the wishes for one recording. Orders list each call of a segment once, by its first node."""

    recorded: list[SegmentCall] = field(default_factory=list)
    scheduled: list[SegmentCall] = field(default_factory=list)
    honoured: list[tuple[SegmentCall, SegmentCall]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


@dataclass(slots=True)
class Member:
    """A call that some wish is about: its bit in the masks, its nodes' positions, and what it must wait for as a bit mask."""

    call: SegmentCall
    bit: int
    nodes: list[int] = field(default_factory=list)
    waits: int = 0


def order_segments(graph: Graph, wishes: Sequence[Wish]) -> Ordered:
    """Reorder ``graph.nodes`` and set their stages. Without a wish about two segments that ran, the graph stays as it is."""
    release_sums(graph)
    calls = calls_of(graph)
    report = Ordered(recorded=first_come(graph))
    wanted = [(wish, a, b) for wish in wishes for a, b in pairs(wish, calls)]
    if not wanted:
        report.scheduled = report.recorded
        return report
    members = members_of(graph, wanted)
    before = predecessors(graph)
    flow = masks(graph, members, before)
    granted = [entry for entry in wanted if grant(entry, members, flow, before, graph, report)]
    order = list_schedule(before, keys(granted, members, before), [(members[a].nodes, members[b].nodes) for _, a, b in granted])
    old = graph.nodes
    graph.nodes = [old[position] for position in order]
    set_stages(graph, members)
    report.scheduled = first_come(graph)
    note_distance(granted, graph, report)
    return report


def runs_of(graph: Graph) -> Iterator[tuple[SegmentCall, int, int]]:
    """Each stretch of nodes of one segment: the segment, its first position, the position behind its last."""
    start = 0
    for segment, nodes in itertools.groupby(graph.nodes, lambda node: node.segment):
        end = start + sum(1 for _ in nodes)
        if segment is not None:
            yield segment, start, end
        start = end


def calls_of(graph: Graph) -> dict[str, list[SegmentCall]]:
    """The calls of each segment by name, in the order in which they ran."""
    found: dict[str, dict[SegmentCall, None]] = {}
    for segment, _, _ in runs_of(graph):
        for call in segment.chain():
            found.setdefault(call.name, {})[call] = None
    return {name: sorted(calls, key=lambda call: call.call) for name, calls in found.items()}


def first_come(graph: Graph) -> list[SegmentCall]:
    """Every call by its first node; a segment stands before those inside it."""
    seen: dict[SegmentCall, None] = {}
    for segment, _, _ in runs_of(graph):
        for call in reversed(list(segment.chain())):
            seen[call] = None
    return list(seen)


def members_of(graph: Graph, wanted: Sequence[tuple[Wish, SegmentCall, SegmentCall]]) -> dict[SegmentCall, Member]:
    members: dict[SegmentCall, Member] = {}
    for _, *both in wanted:
        for call in both:
            members.setdefault(call, Member(call, 1 << len(members)))
    for segment, start, end in runs_of(graph):
        for call in segment.chain():
            if call in members:
                members[call].nodes.extend(range(start, end))
    return members


def own_bits(graph: Graph, members: dict[SegmentCall, Member]) -> list[int]:
    """For each node the members that it belongs to."""
    bits = [0] * len(graph.nodes)
    for segment, start, end in runs_of(graph):
        bits[start:end] = [sum(members[call].bit for call in segment.chain() if call in members)] * (end - start)
    return bits


def masks(graph: Graph, members: dict[SegmentCall, Member], before: list[list[int]]) -> list[int]:
    """For each node the members that must have run, at least in part, before it. Fills `Member.waits`."""
    own = own_bits(graph, members)
    flow: list[int] = []
    for predecessors_ in before:
        mask = 0
        for other in predecessors_:
            mask |= flow[other] | own[other]
        flow.append(mask)
    for member in members.values():
        for position in member.nodes:
            member.waits |= flow[position]
    return flow


def grant(
    entry: tuple[Wish, SegmentCall, SegmentCall],
    members: dict[SegmentCall, Member],
    flow: list[int],
    before: list[list[int]],
    graph: Graph,
    report: Ordered,
) -> bool:
    """Accept the wish, or say in the report why it cannot be."""
    wish, a, b = entry
    earlier, later = members[a], members[b]
    if a in b.chain() or b in a.chain():
        report.refusals.append(Refusal(a, b, "one is a part of the other"))
        return False
    if waits_for(earlier, later, members):
        report.refusals.append(Refusal(a, b, explain(earlier, later, members, flow, before, graph)))
        return False
    later.waits |= earlier.bit
    report.honoured.append((a, b))
    return True


def waits_for(member: Member, other: Member, members: dict[SegmentCall, Member]) -> bool:
    """Must some of ``other`` run before some of ``member``, by data flow and the wishes granted so far?"""
    by_bit = {one.bit: one for one in members.values()}
    seen, pending = 0, member.waits & ~member.bit
    while pending:
        if pending & other.bit:
            return True
        bit = pending & -pending
        seen |= bit
        pending = (pending | by_bit[bit].waits) & ~seen & ~member.bit
    return False


def explain(
    earlier: Member, later: Member, members: dict[SegmentCall, Member], flow: list[int], before: list[list[int]], graph: Graph
) -> str:
    """Which tensor makes ``earlier`` wait for ``later``."""
    direct = [position for position in earlier.nodes if flow[position] & later.bit]
    if not direct:
        others = [str(one.call) for one in members.values() if one.bit & earlier.waits]
        return f"{earlier.call} has to wait for {', '.join(others)}, which another part of the schedule places after {later.call}"
    position = direct[0]
    own = set(later.nodes)
    while not own.intersection(before[position]):
        position = next(other for other in before[position] if flow[other] & later.bit)
    consumer = graph.nodes[position]
    older = older_values(graph)
    makers = {graph.nodes[other] for other in own}
    maker, value, how = next(found for found in needs(consumer, older) if found[0] in makers)
    if value.buffer.kind is BufferKind.GENERATOR:
        places = f"{at(maker.frame)} and{at(consumer.frame)}"
        return f"both draw random numbers from one generator{places}, and draws keep the program's order, so that numbers do too"
    tensor = describe(value.buffer.nbytes, maker)
    if how == "needs":
        reader = f"{consumer.name}{at(consumer.frame)}"
        return f"{earlier.call} needs {tensor} made{at(maker.frame)} by {later.call} ({reader} reads it)"
    return f"{earlier.call} overwrites{at(consumer.frame)} memory ({tensor}) that {later.call} uses{at(maker.frame)}"


def describe(nbytes: int, maker: Node) -> str:
    layout = maker.writes[0].layout if maker.writes else None
    shape = f"{str(layout.dtype).removeprefix('torch.')}{list(layout.size)}" if layout else f"{nbytes} bytes"
    return f"`{maker.name}` {shape}"


def at(frame: Frame | None) -> str:
    return f" at {frame}" if frame else ""


def keys(
    granted: Sequence[tuple[Wish, SegmentCall, SegmentCall]], members: dict[SegmentCall, Member], before: list[list[int]]
) -> list[Key]:
    """The place that each node would like; what a segment that moves forward needs moves forward with it."""
    key: list[Key] = [(float(position), 0) for position in range(len(before))]
    pull: list[Key | None] = [None] * len(before)
    for number, (wish, a, b) in enumerate(granted, 1):
        if wish.moves is Moves.NEITHER:
            continue
        mover, anchor = (members[a], members[b]) if wish.moves is Moves.EARLIER else (members[b], members[a])
        place = (anchor.nodes[0] - 0.5, number) if wish.moves is Moves.EARLIER else (anchor.nodes[-1] + 0.5, -number)
        for position in mover.nodes:
            key[position] = place
            if place[0] < position:
                pull[position] = place
    for position in range(len(before) - 1, -1, -1):
        wanted = pull[position]
        if wanted is None:
            continue
        key[position] = min(key[position], wanted)
        for other in before[position]:
            pull[other] = min(pull[other] or wanted, wanted)
    return key


def list_schedule(before: list[list[int]], key: list[Key], edges: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """Positions in their new order. Each of ``edges`` (all of these before all of those) becomes one node that does nothing."""
    count = len(before)
    waiting = [len(others) for others in before] + [len(first) for first, _ in edges]
    after: list[list[int]] = [[] for _ in range(count + len(edges))]
    for position, others in enumerate(before):
        for other in others:
            after[other].append(position)
    for number, (first, then) in enumerate(edges, count):
        for position in first:
            after[position].append(number)
        for position in then:
            waiting[position] += 1
        after[number] = list(then)
    nowhere = (-1.0, 0)
    ready = [(key[position], position) for position in range(count) if not waiting[position]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, position = heapq.heappop(ready)
        if position < count:
            order.append(position)
        for other in after[position]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (key[other] if other < count else nowhere, other))
    assert len(order) == count, "a wish was granted that makes a circle"
    return order


def set_stages(graph: Graph, members: dict[SegmentCall, Member]) -> None:
    """A new stage wherever the nodes begin to belong to other members."""
    stage, last = 0, None
    for node, bits in zip(graph.nodes, own_bits(graph, members)):
        if last is not None and bits != last:
            stage += 1
        node.stage, last = stage, bits


def note_distance(granted: Sequence[tuple[Wish, SegmentCall, SegmentCall]], graph: Graph, report: Ordered) -> None:
    """Say where a segment that was to run right beside another has something between them."""
    first: dict[SegmentCall, int] = {}
    last: dict[SegmentCall, int] = {}
    for segment, start, end in runs_of(graph):
        for call in segment.chain():
            first.setdefault(call, start)
            last[call] = end - 1
    for wish, a, b in granted:
        between = graph.nodes[last[a] + 1 : first[b]]
        if wish.moves is not Moves.NEITHER and between:
            reason = f"{len(between)} ops have to run between them, the first `{between[0].name}`{at(between[0].frame)}"
            report.refusals.append(Refusal(a, b, reason, partly=True))
