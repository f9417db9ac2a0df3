"""Cheap values are computed again where a far kernel needs them, instead of being written and read. Imports `ir_nodes` and
`barriers` parts only.

What Chen et al. (2016) do for memory and the min-cut partitioner of functorch (He, 2022) does between forward and backward, here
between any two kernels of one graph: for each kernel the cheapest cut through the cheap ops that its operands come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

from barriers.min_cut import NEVER, min_cut
from barriers.passes.cheap import ROWS, is_cheap, reduces_rows, sees_all, walks
from barriers.passes.dead import drop, eliminate_dead, reachable
from ir_nodes import BufferKind, Graph, Node, Value
from ir_nodes.kernels import Kernels, Partition, homes, is_window, traffic, with_pulled
from ir_nodes.ops import info
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import clone, move_apart, redirect

LEAST = 4096
"""Bytes that must be saved."""
SMALL = 1 / 32
"""Of what is let go earlier, what may be kept for longer besides: a bias that all layers add."""
MOVES_MORE = "with such copies the kernels would move more bytes in all"
JOINS_NOTHING = "the copy would not join the kernel that it is for"
WIDEST, MUCH = 40, 1 / 8
"""Ops that are looked at for one kernel, and of all bytes that move those that must be made of copies for a second look."""


def recompute_cheap(graph: Graph, partition: Partition, remarks: Remarks | None = None) -> Graph:
    """Give kernels copies of the cheap ops behind their operands, where reading those ops' operands moves fewer bytes than
    writing and reading their results. Numbers stay bit for bit, for the same ops run on the same values.

    A result that no longer leaves its kernel is not written at all. Copies that would not join the kernel that they are for are
    taken back. No value is kept longer than before unless a larger one goes, or one of nearly its size. What kernels compute for
    parts of what they make, as gradients of halves for a concatenation, gets copies after all that. Returns ``graph``.
    """
    remarks = remarks or Remarks()
    kernels, behind = _copy_cheap(graph, partition, partition(graph), remarks)
    if behind:  # what was made of other kernels' copies can be made of copies of these, now that they are nodes like others
        kernels, _ = _copy_cheap(graph, partition, kernels or partition(graph), remarks)
    if any(map(is_window, graph.nodes)):
        pulled = with_pulled(graph, kernels or partition(graph))
        if any(kernel.pulled for kernel in pulled):
            _copy_cheap(graph, lambda graph: with_pulled(graph, partition(graph)), pulled, remarks)
    return graph


def _copy_cheap(graph: Graph, partition: Partition, before: Kernels, remarks: Remarks) -> tuple[Kernels | None, bool]:
    """What ``partition``, which gave ``before``, gives now, where that is known, and whether much lies behind copies."""
    moved = traffic(graph, before)
    recomputer = _Recomputer(graph, before, remarks)
    copied = recomputer.run()
    behind = recomputer.behind > MUCH * moved
    if not copied:
        return before, False
    after = partition(graph)
    home = homes(after)
    told = {one: JOINS_NOTHING for one in copied
            if len({home[node] for node in (*one.nodes, *one.users) if node in home}) > 1}
    grows = traffic(graph, after) >= moved
    for one in told:
        one.take_back()
    if grows and told:  # perhaps for the sake of these; what the others stand for may be needed again, and stays
        drop(graph, [node for one in told for node in one.nodes])
        grows = traffic(graph, partition(graph), reachable(graph)) >= moved
    for one in copied:
        if grows and one not in told:
            one.take_back()
            told[one] = MOVES_MORE
        for node in one.nodes:
            if one in told:
                remarks.refused("recompute", node.name, told[one])
            else:
                remarks.did("recompute", node.name, "it is computed again instead of being written and read")
    eliminate_dead(graph)
    if told:
        return None, behind
    alive = set(graph.nodes)
    return [kernel._replace(nodes=tuple(node for node in kernel.nodes if node in alive)) for kernel in after], behind


@dataclass(slots=True, eq=False)
class Copied:
    """What one kernel got: copies of nodes, the nodes that use them, and which value stands for which."""

    nodes: list[Node]
    users: list[Node]
    instead: dict[Value, Value]

    def take_back(self) -> None:
        back = {new: old for old, new in self.instead.items()}
        for user in self.users:
            redirect(user, back)


@dataclass(slots=True, eq=False)
class Network:
    """The cheap ops behind a kernel's operands, as values: what to keep one for costs, where it leads, where it begins."""

    capacity: dict[Value, int] = field(default_factory=dict)
    after: dict[Value, list[Value]] = field(default_factory=dict)
    sources: list[Value] = field(default_factory=list)


class _Recomputer:
    def __init__(self, graph: Graph, kernels: Kernels, remarks: Remarks) -> None:
        self.graph, self.kernels, self.remarks = graph, kernels, remarks
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.home = homes(kernels)
        self.newer = {old: new for values in graph.values for old, new in zip(values, values[1:])}
        self.kept_until: dict[Value, int] = {}
        self.inserted: dict[int, list[Node]] = {}
        self.behind = 0  # bytes of operands that are made of other kernels' copies

    def run(self) -> list[Copied]:
        pulls = any(kernel.pulled for kernel in self.kernels)  # then the others have what they need
        order = sorted((number for number, kernel in enumerate(self.kernels) if kernel.fused and (kernel.pulled or not pulls)),
                       key=lambda number: self.place[self.kernels[number].nodes[0]])
        made = [one for one in map(self._kernel, order) if one is not None]
        nodes: list[Node] = []
        for position, node in enumerate(self.graph.nodes):
            nodes += self.inserted.get(position, ())
            nodes.append(node)
        self.graph.nodes = nodes
        return made

    def _kernel(self, number: int) -> Copied | None:
        nodes = self.kernels[number].nodes
        sinks, fixed = self._operands(nodes, number)
        if not sinks:
            return None
        end = max(self.place[node] for node in nodes)
        network = self._network(sinks, fixed, Space.of(nodes, self.kernels[number].pulled), end)
        if any(self._copied(value) for value in network.capacity):
            self.behind += sum(value.buffer.nbytes for value in sinks)
        cut = min_cut(network.capacity, network.after, network.sources, sinks)
        if cut is None or sum(network.capacity[one] for one in sinks) - sum(network.capacity[one] for one in cut) < LEAST:
            return None
        gone = {one: None for one in sinks if one not in cut}
        users = sorted((node for node in nodes if any(read.value in gone for read in node.reads)), key=self.place.__getitem__)
        needed = self._needed(users, gone, cut)
        last = {read.value: place for maker, place in sorted(needed.items(), key=lambda item: item[1]) for read in maker.reads
                if read.value in cut}
        if not users or any(self._overwritten(value) < last.get(value, -1) for value in cut):
            return None
        if not self._fits(last, gone, number, self.place[users[0]]):
            for one in gone:
                assert one.producer is not None
                self.remarks.refused("recompute", one.producer.name, "what it is computed from would have to be kept for longer")
            return None
        for value in cut:
            self.kept_until[value] = max(self._kept_until(value), end)
            if (newer := self.newer.get(value)) is not None and self._apart(newer):
                move_apart(self.graph, self.newer.pop(value))
        return self._copy(users, gone, cut, needed)

    def _operands(self, nodes: Sequence[Node], number: int) -> tuple[list[Value], set[Value]]:
        """What other kernels write for this one: values that copies might stand for, and all the rest that it reads."""
        sinks: dict[Value, None] = {}
        fixed: set[Value] = set()
        for node in nodes:
            for read in node.reads:
                maker = read.value.producer
                if maker is None or self.home.get(maker) != number:
                    plain = maker is not None and is_cheap(maker) and self._fused(maker) and sees_all(read, maker)
                    if plain and self.home[node] == number:  # not lists of tensors or scattered sums, in several kernels at once
                        sinks[read.value] = None
                    else:
                        fixed.add(read.value)
            fixed.update(write.base for write in node.writes if write.base is not None)
        return [value for value in sinks if value not in fixed], fixed

    def _network(self, sinks: Sequence[Value], fixed: set[Value], space: Space, end: int) -> Network:
        found = Network()
        waiting = list(sinks)  # nearest first, so that no operand's history uses up what may be looked at
        for value in waiting:
            if value in found.capacity:
                continue
            found.capacity[value] = self._cost(value, value in fixed, value in sinks, end)
            maker = value.producer
            cheap = maker is not None and self._fused(maker) and is_cheap(maker) and space.holds(maker)
            if maker is None or not cheap or len(found.capacity) > WIDEST:
                found.sources.append(value)
                continue
            for read in maker.reads:
                found.after.setdefault(read.value, []).append(value)
                waiting.append(read.value)
                if read.value.producer is not None and not sees_all(read, read.value.producer):
                    found.sources.append(read.value)
        return found

    def _cost(self, value: Value, fixed: bool, sink: bool, end: int) -> int:
        """Bytes that move if the kernel reads ``value``, beyond what moves if nobody does for this kernel."""
        if fixed:
            return 0
        if not sink and self._overwritten(value) <= end or self._copied(value):
            return NEVER  # overwritten by then, or not written at all
        size = value.buffer.nbytes
        outside = self._readers(value)
        if sink:
            shared = value.buffer.live or any(other < 0 or not self.kernels[other].fused for other in outside)
            return size if shared else size + size // max(len(outside), 1)
        return size if outside or value.buffer.live or value.producer is None or not self._fused(value.producer) else 2 * size

    def _copied(self, value: Value) -> bool:
        """Is it another kernel's copy, which nobody writes?"""
        return value.producer is not None and value.producer not in self.place

    def _overwritten(self, value: Value) -> int:
        """Where the next value of its buffer is made, which cannot have memory of its own."""
        newer = self.newer.get(value)
        if newer is None or newer.producer is None or self._apart(newer):
            return len(self.place)
        return self.place[newer.producer]

    def _apart(self, newer: Value) -> bool:
        """Could ``newer``, which an op in place has made, as well lie in memory of its own?"""
        maker, buffer = newer.producer, newer.buffer
        return (maker is not None and self._fused(maker) and is_cheap(maker) and not buffer.live
                and buffer.kind is BufferKind.FRESH)

    def _readers(self, value: Value) -> set[int]:
        """The kernels that read ``value``, but the one that makes it."""
        own = self.home.get(value.producer, -2) if value.producer is not None else -2
        return {self.home.get(user, -1) for user in value.users} - {own}

    def _fused(self, node: Node) -> bool:
        home = self.home.get(node, -1)
        return home >= 0 and self.kernels[home].fused

    def _needed(self, users: Sequence[Node], gone: dict[Value, None], cut: set[Value]) -> dict[Node, int]:
        """What has to run again so that ``users``, in graph order, find copies of ``gone``, and where: each right before the
        first of them that needs it. Further up, another kernel between two of them may not have made what it reads."""
        found: dict[Node, int] = {}
        for user in users:
            waiting = [read.value for read in user.reads if read.value in gone]
            while waiting:
                maker = waiting.pop().producer
                assert maker is not None
                if maker not in found:
                    found[maker] = self.place[user]
                    waiting += [read.value for read in maker.reads if read.value not in cut]
        return found

    def _fits(self, last: dict[Value, int], gone: dict[Value, None], number: int, begin: int) -> bool:
        """Are no more bytes kept for longer, until copies have read them at ``last``, than are let go earlier?"""
        longer = sum(one.buffer.nbytes for one, place in last.items()
                     if not one.buffer.live and self._kept_until(one) < place)
        others = [one for one in gone if not one.buffer.live and self.kept_until.get(one, -1) < begin and all(
            self.place.get(user, -1) < begin or self.home.get(user) == self.home.get(one.producer)  # a kernel before this
            for user in one.users if self.home.get(user) != number)]  # copies: `kept_until`
        return longer <= (1 + SMALL) * sum(one.buffer.nbytes for one in others)

    def _kept_until(self, value: Value) -> int:
        own = max((self.place[user] for user in value.users if user in self.place), default=-1)
        return max(own, self.kept_until.get(value, -1))

    def _copy(self, users: list[Node], gone: dict[Value, None], cut: set[Value], needed: dict[Node, int]) -> Copied:
        instead: dict[Value, Value] = {}
        copies: list[Node] = []
        for maker in sorted(needed, key=self.place.__getitem__):
            copies.append(clone(self.graph, maker, {old: new for old, new in instead.items() if old not in cut}, users[0]))
            instead.update(zip((write.value for write in maker.writes), (write.value for write in copies[-1].writes)))
            self.inserted.setdefault(needed[maker], []).append(copies[-1])
        mine = {old: instead[old] for old in gone}
        for user in users:
            redirect(user, mine)
        return Copied(copies, users, mine)


@dataclass(frozen=True, slots=True)
class Space:
    """How many elements a kernel runs over, how many results its reductions have, how many what it computes for parts of others,
    and whether it reduces."""

    numel: int
    kept: frozenset[int]
    within: frozenset[int]
    reduces: bool

    @staticmethod
    def of(nodes: Sequence[Node], pulled: Sequence[Node]) -> Space:
        rows = [node for node in nodes if info(node.target).kind in (*ROWS, "loss")]
        # Sums of columns, for the gradients of weights, are as large as these, but what is made of weights shares no walk.
        along = [node for node in rows if info(node.target).kind == "loss" or reduces_rows(node)] or rows
        # A table that rows are picked from or added to is not walked.
        walked = [node for node in nodes if info(node.target).kind not in ("gather", "scatter")] or nodes
        sizes = [part.layout.numel for node in walked for part in walks(node)]
        kept, within = (frozenset(write.layout.numel for node in some for write in node.writes) for some in (along, pulled))
        return Space(max(sizes), kept, within, bool(rows))

    def holds(self, node: Node) -> bool:
        """May a copy of ``node`` share the kernel?"""
        largest = max(part.layout.numel for part in (*node.reads, *node.writes))
        if info(node.target).kind in ROWS:
            return self.reduces and largest == self.numel
        return node.writes[0].layout.numel in (self.numel, *self.kept, *self.within)
