"""Orders a recording as its schedule wishes, as far as data flow allows. Imports `ir_nodes` and `barriers` parts only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable, Sequence

from barriers.accumulation import release_sums
from barriers.calls import Measured, Run, calls_of, first_come, positions_of, runs_of
from barriers.collectives import sink_waits
from barriers.dependencies import predecessors
from barriers.draws import release_draws
from barriers.hooks import Asked, Entry, ScheduleHook, consult
from barriers.model import lanes, memory
from barriers.placing import START, beside, keys, list_schedule
from barriers.recorded import Constraint, Recorded, RecordedSegment, describe_calls
from barriers.refusals import Refusal, at, data_flow
from barriers.wishes import Moves, Wish, pairs
from ir_nodes import BufferKind, Graph, SegmentCall
from ir_nodes.estimate import CPU, Cost, Rates, cost


@dataclass(slots=True)
class Ordered:
    """What became of the wishes for one recording. Orders list each call of a segment once, by its first node.

    ``problems``: what was wrong with schedule hooks, as sentences. ``checked``: how often debug_mode compared this order with the
    program's; ``difference``: the first that it found. ``graph``: what was ordered, as long as reports may need it; ``measured``:
    how long each stretch of a segment took on the device, if that is measured.
    """

    recorded: list[SegmentCall] = field(default_factory=list)
    scheduled: list[SegmentCall] = field(default_factory=list)
    honoured: list[tuple[SegmentCall, SegmentCall]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    early: list[SegmentCall] = field(default_factory=list)  # held back, but somebody looked at what they make
    waiting: list[SegmentCall] = field(default_factory=list)  # held back still: a later recording runs them
    checked: int = 0
    difference: str = ""
    graph: Graph | None = None
    measured: Callable[[], list[Measured]] | None = None


@dataclass(slots=True)
class Member:
    """A call that some wish is about: its bit in the masks, its nodes' positions, and what it must wait for as a bit mask."""

    call: SegmentCall
    bit: int
    nodes: list[int]
    waits: int = 0


@dataclass(slots=True)
class Attempt:
    """An order, as positions in the recorded one, and what it grants."""

    order: Sequence[int]
    members: dict[SegmentCall, Member]
    granted: list[Entry]
    refusals: list[Refusal]


def order_segments(graph: Graph, wishes: Sequence[Wish], hooks: Sequence[ScheduleHook] = (), rates: Rates = CPU) -> Ordered:
    """Reorder ``graph.nodes`` and set their stages. Where nothing is asked about what ran, the graph stays as it is.

    ``rates``: what hooks' estimates of time go by.
    """
    release_sums(graph)
    runs = runs_of(graph.nodes)
    report = Ordered(recorded=first_come(runs))
    calls = calls_of(runs)
    asked = Asked([(wish, a, b) for wish in wishes for a, b in pairs(wish, calls)])
    if release_draws(graph, [(a, b) for _, a, b in asked.wishes]):
        runs = runs_of(graph.nodes)
    if not asked and not hooks:
        report.scheduled = report.recorded
        return report
    sorter = Sorter(graph, runs, rates)
    for hook in hooks:
        told, recorded = sorter.tell(asked, hook.owner)
        asked = asked + consult(hook, recorded, told, report.problems)
    if not asked:
        report.scheduled = report.recorded
        return report
    found = sorter.attempt(asked)
    old = graph.nodes
    graph.nodes = [old[position] for position in found.order]
    sink_waits(graph)
    runs = runs_of(graph.nodes)
    set_stages(graph, runs, found.members)
    report.scheduled = first_come(runs)
    report.honoured = [(a, b) for _, a, b in found.granted]
    report.refusals = [*found.refusals, *distances(found.granted, graph, runs)]
    return report


class Sorter:
    """Finds orders of one graph; what they all need is found once."""

    def __init__(self, graph: Graph, runs: Sequence[Run], rates: Rates) -> None:
        self.graph, self.runs, self.rates = graph, runs, rates
        self.before = predecessors(graph)
        self.positions = positions_of(runs)
        self._costs: list[Cost] | None = None

    @property
    def costs(self) -> list[Cost]:
        if self._costs is None:
            self._costs = [cost(node, self.rates) for node in self.graph.nodes]
        return self._costs

    def attempt(self, asked: Asked, more: Iterable[SegmentCall] = ()) -> Attempt:
        """The order under what is ``asked``. ``more``: further calls to make members of."""
        members = {call: Member(call, 1 << number, self.positions[call])
                   for number, call in enumerate(dict.fromkeys([*asked.calls(), *more]))}
        flow = masks(self.runs, members, self.before)
        found = Attempt(range(len(self.before)), members, [], [])
        for entry in asked.wishes:
            refusal = self.refuse(entry, members, flow)
            if refusal is None:
                found.granted.append(entry)
                members[entry[2]].waits |= members[entry[1]].bit
            else:
                found.refusals.append(refusal)
        if found.granted or asked.early or asked.late or asked.overlap:
            places = [*places_of(asked, members), *self.pulled(asked)]
            key = keys(places, [members[call].nodes for call in asked.late], self.before)
            edges = [(members[a].nodes, members[b].nodes) for _, a, b in found.granted]
            found.order = list_schedule(self.before, key, edges, self.costs if asked.overlap else None)
        return found

    def refuse(self, entry: Entry, members: dict[SegmentCall, Member], flow: Sequence[int]) -> Refusal | None:
        """Why the wish cannot be, or None."""
        _, a, b = entry
        earlier, later = members[a], members[b]
        if a in b.chain() or b in a.chain():
            return Refusal(a, b, "one is a part of the other")
        if not waits_for(earlier, later, list(members.values())):
            return None
        start = next((position for position in earlier.nodes if flow[position] & later.bit), None)
        if start is None:
            others = ", ".join(str(one.call) for one in members.values() if one.bit & earlier.waits & ~earlier.bit)
            return Refusal(a, b, f"{a} has to wait for {others}, which another part of the schedule places after {b}")
        own = set(later.nodes)
        return Refusal(a, b, data_flow(self.graph, self.before, a, b, start, own, lambda other: bool(flow[other] & later.bit)))

    def pulled(self, asked: Asked) -> list[tuple[list[int], float]]:
        if asked.overlap is None or not asked.overlap.pull:
            return []
        return [([position for position, one in enumerate(self.costs) if one.collective], START)]

    def tell(self, asked: Asked, owner: int | None) -> tuple[dict[SegmentCall, RecordedSegment], Recorded]:
        """What a hook of ``owner`` is told, after ``asked``."""
        told = describe_calls(self.graph, self.runs, self.before, self.costs, owner)
        call_of = {segment: call for call, segment in told.items()}
        every = self.attempt(asked, told)
        members = list(every.members.values())

        def with_(constraints: Sequence[Constraint]) -> Sequence[int]:
            return self.attempt(asked + Asked.of(constraints, told)).order

        def allows(earlier: RecordedSegment, later: RecordedSegment) -> bool:
            a, b = call_of[earlier], call_of[later]
            apart = a not in b.chain() and b not in a.chain()
            return apart and not waits_for(every.members[a], every.members[b], members)

        def peak(constraints: Sequence[Constraint]) -> int:
            return max(memory(self.graph, [self.graph.nodes[position] for position in with_(constraints)]), default=0)

        def seconds(constraints: Sequence[Constraint]) -> float:
            return max((span.end for span in lanes(with_(constraints), self.before, self.costs)), default=0.0)

        buffers = [(one.nbytes, one.live, one.kind is not BufferKind.FRESH) for one in self.graph.buffers]
        talking = any(one.collective for one in self.costs)
        return told, Recorded(list(told.values()), buffers, talking, peak, seconds, allows)


def places_of(asked: Asked, members: dict[SegmentCall, Member]) -> list[tuple[list[int], float]]:
    """Where segments that leave their recorded place would like to be."""
    places: list[tuple[list[int], float]] = [(members[call].nodes, START) for call in asked.early]
    for number, (wish, a, b) in enumerate(asked.wishes, 1):
        earlier, later = members[a].nodes, members[b].nodes
        if wish.moves is Moves.EARLIER:
            places.append((earlier, beside(later[0], number, behind=False)))
        elif wish.moves is Moves.LATER:
            places.append((later, beside(earlier[-1], number, behind=True)))
    return places


def own_bits(runs: Sequence[Run], members: dict[SegmentCall, Member]) -> list[int]:
    """For each run the members that it belongs to."""
    return [sum(members[one].bit for one in call.chain() if one in members) if call else 0 for call, _, _ in runs]


def masks(runs: Sequence[Run], members: dict[SegmentCall, Member], before: list[list[int]]) -> list[int]:
    """For each node the members that must have run, at least in part, before it. Fills `Member.waits`."""
    flow: list[int] = []
    seen: list[int] = []  # with the node's own members
    for (call, start, end), own in zip(runs, own_bits(runs, members)):
        waits = 0
        for position in range(start, end):
            mask = 0
            for other in before[position]:
                mask |= seen[other]
            flow.append(mask)
            seen.append(mask | own)
            waits |= mask
        for one in call.chain() if call and own else ():
            if one in members:
                members[one].waits |= waits
    return flow


def waits_for(member: Member, other: Member, members: Sequence[Member]) -> bool:
    """Must some of ``other`` run before some of ``member``, by data flow and the wishes granted so far?"""
    seen, pending = 0, member.waits & ~member.bit
    while pending:
        if pending & other.bit:
            return True
        bit = pending & -pending
        seen |= bit
        pending = (pending | members[bit.bit_length() - 1].waits) & ~seen & ~member.bit
    return False


def set_stages(graph: Graph, runs: Sequence[Run], members: dict[SegmentCall, Member]) -> None:
    """A new stage wherever the nodes begin to belong to other members."""
    stage, last = 0, None
    for (_, start, end), bits in zip(runs, own_bits(runs, members)):
        stage += last is not None and bits != last
        last = bits
        for node in graph.nodes[start:end]:
            node.stage = stage


def distances(granted: Sequence[Entry], graph: Graph, runs: Sequence[Run]) -> list[Refusal]:
    """Where a segment that was to run right beside another has something between them."""
    found: list[Refusal] = []
    moved = [entry for entry in granted if entry[0].moves is not Moves.NEITHER]
    positions = positions_of(runs) if moved else {}
    for _, a, b in moved:
        between = graph.nodes[positions[a][-1] + 1 : positions[b][0]]
        if between:
            reason = f"{len(between)} ops have to run between them, the first `{between[0].name}`{at(between[0].frame)}"
            found.append(Refusal(a, b, reason, partly=True))
    return found
