"""Values are computed again where memory would not do otherwise: a budget in bytes. Imports `ir_nodes` and `barriers` parts only.

Checkpointing that nobody had to write: the graph holds forward and backward, so it is plain which values wait for how long.
Greedy, as XLA's rematerialisation is: at the step that holds the most, those values go first that free the most bytes for a
second of work, until the peak fits the budget or nothing helps any more.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple

from barriers.model import last_uses, memory
from barriers.passes.dead import eliminate_dead
from barriers.refusals import at, describe
from ir_nodes import BufferKind, Graph, Node, Value
from ir_nodes.estimate import CPU, CUDA, cost
from ir_nodes.kernels import Kernels, Partition, unstored
from ir_nodes.ops import info, split
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import clone, redirect

_REPEATABLE = frozenset(("pointwise", "fill", "copy", "gather", "softmax", "normalization", "reduction", "scan", "loss", "pool",
                         "matmul", "convolution", "attention"))  # fmt: skip
WIDEST = 40
"""Nodes that are copied together."""
IDLE = 3
"""Rounds that may pass without a smaller peak."""


def fit_budget(graph: Graph, budget: int, partition: Partition | None = None, remarks: Remarks | None = None) -> Graph:
    """Give late users of values copies of the ops that made them, until ``graph`` holds at most ``budget`` bytes at any time.

    Numbers stay, for the same ops run on the same values; ops that draw, talk to other ranks or overwrite run once. A copy that
    would join a kernel of before the peak is taken back (``partition``: the kernels). Where the budget is too small, a warning
    says what the peak is and who holds it. Returns ``graph``.
    """
    if partition is not None:
        kernels = partition(graph)
        spread(graph, kernels, unstored(graph, kernels))
    fitter = _Fitter(graph, partition)
    best, idle = fitter.peak()[1], 0
    while best > budget and idle < IDLE:
        if not fitter.round(budget):
            break
        peak = fitter.peak()[1]
        best, idle = min(best, peak), 0 if peak < best else idle + 1
    fitter.take_back_hoisted()
    for node in graph.nodes:
        if remarks is not None and node in fitter.behind:
            remarks.did("recompute", node.name, "it is computed again, for LAZYSCHED_MEMORY_BUDGET allows no more memory")
    position, peak = fitter.peak()
    if peak > budget:
        node = graph.nodes[position]
        warnings.warn(
            f"lazysched: LAZYSCHED_MEMORY_BUDGET asks for {budget:,} bytes, but with all that can be computed again {peak:,} are "
            f"held while {describe(0, node)}{at(node.frame)} runs: smaller batches or a larger budget help",
            RuntimeWarning,
            stacklevel=2,
        )
    return graph


@dataclass(slots=True)
class Price:
    """What a copy at some place needs: bytes held for longer; nodes copied with it, whose results only a kernel ever sees; copies
    that have to come earlier."""

    there: float
    longer: int = 0
    along: dict[Node, None] = field(default_factory=dict)
    earlier: dict[Node, None] = field(default_factory=dict)


class Found(NamedTuple):
    """A copy that could be made: of which node, for whom, before which of them, bytes that it frees, and what it needs."""

    maker: Node
    late: list[Node]
    anchor: Node
    saved: int
    price: Price


class _Fitter:
    def __init__(self, graph: Graph, partition: Partition | None) -> None:
        self.graph, self.partition = graph, partition
        self.rates = CUDA if partition is not None else CPU
        self.copies: dict[Node, Node] = {}  # of each node that has one
        self.behind: dict[Node, Node] = {}  # for each copy the node at whose peak it was made
        self._look(anew=True)

    def peak(self) -> tuple[int, int]:
        """Where the most bytes are held, and how many."""
        held = memory(self.graph, self.graph.nodes, self.unseen)
        position = max(range(len(held)), key=held.__getitem__, default=0)
        return position, held[position] if held else 0

    def round(self, budget: int) -> bool:
        """Copies for the values at the peak, best first, until it would fit. False where there was nothing to do."""
        here, held = self.peak()
        found = [one for maker in self.graph.nodes[:here] if (one := self._consider(maker, here)) is not None]
        found.sort(key=lambda one: one.saved / cost(one.maker, self.rates).seconds, reverse=True)
        done = False
        for one in found:
            if held <= budget:
                break
            now = self._consider(one.maker, here)  # others may have changed what its operands cost
            if now is not None and 2 * now.saved > one.saved:
                self._copy(now, self.graph.nodes[here])
                held -= now.saved
                done = True
        self._look()
        return done

    def take_back_hoisted(self) -> None:
        """Copies that would share a kernel with what runs before the peak would free nothing."""
        if self.partition is None or not self.copies:
            return
        kernel = {node: one.nodes for one in self.partition(self.graph) for node in one.nodes}
        for old, new in self.copies.items():
            if min(self.place[node] for node in kernel.get(new, (new,))) <= self.place[self.behind[new]]:
                instead = {b.value: a.value for a, b in zip(old.writes, new.writes)}
                for user in dict.fromkeys(user for value in instead for user in value.users):
                    redirect(user, instead)
        eliminate_dead(self.graph)
        self._look(anew=True)

    def _look(self, anew: bool = False) -> None:
        """Notes where everything is in the graph as it is now, and ``anew`` which buffers take no memory."""
        self.place: dict[Node, float] = {node: position for position, node in enumerate(self.graph.nodes)}
        self.last: dict[int, float] = dict(last_uses(self.graph.nodes))
        if anew:
            self.unseen = unstored(self.graph, self.partition(self.graph)) if self.partition is not None else set()

    def _size(self, value: Value) -> int:
        return 0 if value.buffer.index in self.unseen else value.buffer.nbytes

    def _consider(self, maker: Node, here: int) -> Found | None:
        """What a copy of ``maker`` behind the peak would bring; None where there can't be one or it brings nothing."""
        if maker in self.copies or maker in self.behind or not repeatable(maker):
            return None
        values = [write.value for write in maker.writes if write.value.users]
        if any(value.buffer.live or value is not self.graph.values[value.buffer.index][-1] for value in values):
            return None
        late = [user for user in dict.fromkeys(user for value in values for user in value.users) if self.place[user] > here]
        if not late:
            return None
        anchor = min(late, key=self.place.__getitem__)
        ends = [max(map(self.place.__getitem__, value.users)) for value in values]
        used = [any(self.place[user] == here for user in value.users) for value in values]
        saved = sum(self._size(value) for value, end, now in zip(values, ends, used) if end > here and not now)
        price = Price(self.place[anchor])
        if saved <= 0 or not all(self._reach(read.value, here, price) for read in maker.reads) or saved <= price.longer:
            return None
        return Found(maker, late, anchor, saved - price.longer, price)

    def _reach(self, value: Value, here: int, price: Price) -> bool:
        """Can ``value`` be read where the copy is to be? Adds what that takes to ``price``."""
        newer = (one.producer for one in self.graph.values[value.buffer.index] if one.version > value.version)
        if any(node is not None and self.place[node] <= price.there for node in newer):
            return False  # overwritten by then
        maker = value.producer
        if maker is None:
            price.longer += 0 if self._stays(value, here) else self._size(value)
            return value.buffer.kind is BufferKind.INPUT
        if self.place[maker] >= price.there:
            return self._with(maker, price.earlier, here, price)
        again = self.copies.get(maker)
        if value.buffer.index in self.unseen and repeatable(maker) and len(price.along) < WIDEST:
            return self._with(maker, price.along, here, price)
        if self._stays(value, here) and value.buffer.index not in self.unseen:
            return True
        if again is None or self.place[again] <= here:
            price.longer += value.buffer.nbytes
            return True
        return self.place[again] < price.there or self._with(again, price.earlier, here, price)

    def _stays(self, value: Value, here: int) -> bool:
        return value.buffer.live or self.last.get(value.buffer.index, -1) >= here

    def _with(self, node: Node, others: dict[Node, None], here: int, price: Price) -> bool:
        """The same for all that ``node`` reads, which comes along."""
        if node in others:
            return True
        if not all(self._reach(read.value, here, price) for read in node.reads):
            return False
        others[node] = None
        return True

    def _copy(self, found: Found, peak: Node) -> None:
        maker, anchor, price = found.maker, found.anchor, found.price
        earlier, new = list(price.earlier), []
        instead: dict[Value, Value] = {}
        for node in (*price.along, maker):
            for read in node.reads:
                twin = self._twin(read.value, found, peak)
                if twin is not None and read.value not in instead:
                    instead[read.value] = twin
            new.append(clone(self.graph, node, instead, anchor))
            instead.update((old.value, one.value) for old, one in zip(node.writes, new[-1].writes))
        for user in found.late:
            redirect(user, {write.value: instead[write.value] for write in maker.writes})
        for node in earlier:
            self.graph.nodes.remove(node)
        position = self.graph.nodes.index(anchor)
        self.graph.nodes[position:position] = [*earlier, *new]
        self.copies[maker] = new[-1]
        self.behind.update(dict.fromkeys(new, peak))
        self.place.update(dict.fromkeys((*earlier, *new), self.place[anchor] - 0.5))
        self.unseen.update(write.value.buffer.index for node in new[:-1] for write in node.writes)
        self._touch((maker, *price.along, *earlier, *new))

    def _twin(self, value: Value, found: Found, peak: Node) -> Value | None:
        """The copy of ``value`` that is there anyway, where the original is gone by the peak."""
        again = self.copies.get(value.producer) if value.producer is not None else None
        if again is None or value.buffer.live or self.last.get(value.buffer.index, -1) >= self.place[peak]:
            return None
        if again not in found.price.earlier and not self.place[peak] < self.place[again] < self.place[found.anchor]:
            return None
        assert value.producer is not None
        return next(b.value for a, b in zip(value.producer.writes, again.writes) if a.value is value)

    def _touch(self, nodes: Iterable[Node]) -> None:
        """Notes anew how long what ``nodes`` use is used."""
        values = [value for node in nodes for value in (*node.inputs(), *(write.value for write in node.writes))]
        for value in dict.fromkeys(values):
            every = self.graph.values[value.buffer.index]
            users = [*(user for one in every for user in one.users), *(one.producer for one in every if one.producer is not None)]
            self.last[value.buffer.index] = max(map(self.place.__getitem__, users), default=-1)


def spread(graph: Graph, kernels: Kernels, unseen: set[int]) -> None:
    """Give each kernel a copy of its own of the casts that all their readers do for themselves, so that the graph shows how long
    what is cast is needed."""
    place = {node: position for position, node in enumerate(graph.nodes)}
    home = {node: number for number, kernel in enumerate(kernels) if kernel.fused for node in kernel.nodes}
    before: dict[Node, list[Node]] = {}
    for node in list(graph.nodes):
        if info(node.target).kind != "copy" or not repeatable(node) or node.writes[0].value.buffer.index not in unseen:
            continue
        value = node.writes[0].value
        readers: dict[int, list[Node]] = {}
        for user in value.users:
            readers.setdefault(home.get(user, -1), []).append(user)
        for number, users in readers.items():
            if number in (-1, home.get(node, -1)):
                continue
            first = min(users, key=place.__getitem__)
            new = clone(graph, node, {}, first)
            before.setdefault(first, []).append(new)
            for user in users:
                redirect(user, {value: new.writes[0].value})
    graph.nodes = [one for node in graph.nodes for one in (*before.get(node, ()), node)]


def repeatable(node: Node) -> bool:
    """Does ``node`` give the same again, into new memory, and nothing else?"""
    row = info(node.target)
    if node.effects or not node.writes or row.random or row.hidden_writes or row.kind not in _REPEATABLE:
        return False
    return split(node.target)[0] == "aten" and all(
        write.base is None and write.layout.covers(write.value.buffer.nbytes) for write in node.writes)
