"""Values that wait in memory while the most is held are made again by kernels that read what they come from. Imports `ir_nodes`
and `barriers` parts only.

A product's gradient reads the product's operand, such as an activation function's result; the kernel of that function's gradient
reads what the result came from, at about the same time. If that kernel runs first, it can write the result again for no more than
the write, and nothing has to wait since forward. What it costs is bounded by a small part of the step's estimated time.
Attention's probabilities, which grow with the square of a sequence, may cost what was won where their softmax is computed again
anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence

from barriers.dependencies import needs, older_values
from barriers.model import memory
from barriers.passes.cheap import sees_all
from barriers.passes.dead import eliminate_dead, reachable
from barriers.passes.recompute import Copied
from barriers.passes.remade import again, is_plain, result_of, squares, taken, twice, won
from ir_nodes import Graph, Node, Value
from ir_nodes.estimate import CUDA, cost
from ir_nodes.kernels import Kernels, Partition, homes, traffic, unstored
from ir_nodes.ops import COLLECTIVE, info
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import redirect

PART = 1 / 640
"""Of a step's estimated time, what all copies may take."""
ENOUGH = 1 << 28
"""Bytes: where less is held at most, nothing is done."""
LEAST = 1 << 20
"""Bytes of a value that is worth a copy."""
SMALL = 16
"""Operands that are smaller than the value by this factor may be read once more."""
WIDEST = 12
"""Ops that are copied for one value."""
NEAR = 64
"""Nodes between a value's late reader and the kernel that makes the value again."""


def hold_less(graph: Graph, partition: Partition, remarks: Remarks | None = None) -> Graph:
    """Lower the peak of memory by copies of cheap ops in kernels that read those ops' operands anyway. Numbers stay bit for bit,
    for the same ops run on the same values. Orders that a schedule or collectives have a say in stay. Returns ``graph``."""
    remarks = remarks or Remarks()
    if not graph.nodes or max(memory(graph, graph.nodes)) < ENOUGH:
        remarks.refused("hold_less", "", "hardly any memory is held")
        return graph
    if any(node.segment is not None or node.stage or info(node.target).kind in COLLECTIVE for node in graph.nodes):
        remarks.refused("hold_less", "", "a schedule or collectives have a say in the order")
        return graph
    holder = _Holder(graph, partition(graph))
    made = holder.run()
    if not made:
        return graph
    after = partition(graph)
    home = homes(after)
    for copied, joined in made:
        if len({home.get(node, -1) for node in (*copied.nodes, joined)}) > 1:
            copied.take_back()
            remarks.refused("hold_less", copied.nodes[-1].name, "the copy would not join the kernel that reads its operands")
        else:
            remarks.did("hold_less", copied.nodes[-1].name, "it is made again by a late kernel instead of being kept")
    alive = reachable(graph)  # nobody is dropped who may be needed again
    if max(memory(graph, [node for node in graph.nodes if node in alive], unstored(graph, after))) >= holder.peak:
        for copied, _ in made:
            copied.take_back()
        remarks.refused("hold_less", "", "no less memory would be held at most")
    return eliminate_dead(graph)


@dataclass(frozen=True, slots=True)
class Found:
    """What could be made again: by the node ``maker`` and ``along`` with it, for the nodes ``late``, in the kernel ``number``.
    ``grows``: with the square of a sequence."""

    maker: Node
    along: tuple[Node, ...]
    late: tuple[Node, ...]
    number: int
    grows: bool


class _Holder:
    def __init__(self, graph: Graph, kernels: Kernels) -> None:
        self.graph, self.kernels = graph, kernels
        self.home = homes(kernels)
        self.unseen = unstored(graph, kernels)
        self.older = older_values(graph)
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        held = memory(graph, graph.nodes, self.unseen)
        self.here = max(range(len(held)), key=held.__getitem__)
        self.peak = held[self.here]
        self.made_anyway: dict[int, dict[Value, Value]] = {}  # by late kernel, what stands for what it makes once more
        self.makers: dict[Value, list[int]] = {}  # the kernels that do, for each value
        for number, kernel in enumerate(kernels):
            if kernel.fused and (made := twice(kernel)):
                self.made_anyway[number] = made
                for value in made:
                    self.makers.setdefault(value, []).append(number)

    def run(self) -> list[tuple[Copied, Node]]:
        """The copies that were made, each with a node of the kernel that it is to join."""
        found = [one for node in self.graph.nodes[: self.here] if (one := self._consider(node)) is not None]
        found.sort(key=lambda one: (len(one.along), -self.place[one.late[0]]))  # what is simple, and of that what waits longest
        left = PART * seconds(self.graph, self.kernels) if found else 0.0
        earned = {number: won(self.kernels[number], self.unseen) for number in {one.number for one in found}}
        made = []
        for one in found:
            size = self._size(result_of(one.maker))
            free = one.grows and size <= earned[one.number]
            if (free or size / CUDA.memory <= left) and (copied := self._copy(one)) is not None:
                made.append(copied)
                earned[one.number] -= size if free else 0
                left -= 0 if free else size / CUDA.memory
        return made

    def _size(self, value: Value) -> int:
        return 0 if value.buffer.index in self.unseen else value.buffer.nbytes

    def _fused(self, node: Node) -> bool:
        number = self.home.get(node, -1)
        return number >= 0 and self.kernels[number].fused

    def _consider(self, maker: Node) -> Found | None:
        """How the result of ``maker`` could be made again after the peak; None where that can't be or brings nothing."""
        if not self._fused(maker) or not is_plain(maker):
            return None
        value = result_of(maker)
        if self._size(value) < LEAST or value.buffer.live or value is not self.graph.values[value.buffer.index][-1]:
            return None
        late = sorted((user for user in value.users if self.place[user] > self.here), key=self.place.__getitem__)
        if not late or any(self.place[user] == self.here for user in value.users):
            return None
        grows = squares(value, late)
        for number, along, leaves in self._ways(maker, grows):
            if all(self._lasts(leaf) for leaf in leaves) and self._may_join(number, large(leaves, value), late):
                return Found(maker, tuple(along), tuple(late), number, grows)
        return None

    def _ways(self, maker: Node, grows: bool) -> Iterator[tuple[int, list[Node], list[Value]]]:
        """Kernels that might make the result of ``maker`` again, the nodes that are to be copied along, and what these read that
        is in memory. Only for what ``grows`` with a sequence's square are those asked that make its operand again anyway: of
        others, such as norms, there is much that could be made again and little to win."""
        for number in self._kernels_with(maker) if grows else ():
            if (behind := self._behind(maker, self.made_anyway[number])) is not None:
                yield number, *behind
        behind = self._behind(maker, {})
        if behind is not None and (found := large(behind[1], result_of(maker))):
            first = max(found, key=lambda leaf: leaf.buffer.nbytes)
            for number in dict.fromkeys(self.home.get(user, -1) for user in first.users if self.place[user] > self.here):
                yield number, *behind

    def _kernels_with(self, maker: Node) -> list[int]:
        """The kernels that make once more what ``maker`` reads, or what cheap ops before it do."""
        found: dict[int, None] = {}
        waiting = [maker]
        for node in waiting:
            for read in taken(node):
                found.update(dict.fromkeys(self.makers.get(read.value, ())))
                source = read.value.producer
                if source is not None and read.value not in self.makers and is_plain(source) and len(waiting) <= WIDEST:
                    waiting.append(source)
        return list(found)

    def _behind(self, maker: Node, made: Mapping[Value, Value]) -> tuple[list[Node], list[Value]] | None:
        """The nodes that make what ``maker`` needs and never reaches memory, in order, and what does that they need; without
        what is ``made`` anyway."""
        along: dict[Node, None] = {}
        leaves: dict[Value, None] = {}
        waiting = [maker]
        while waiting:
            for read in taken(waiting.pop()):
                source = read.value.producer
                if read.value in made:
                    continue
                if source is None or self._size(read.value):
                    leaves[read.value] = None
                elif not is_plain(source) or not sees_all(read, source) or len(along) >= WIDEST:
                    return None
                elif source not in along:
                    along[source] = None
                    waiting.append(source)
        return sorted(along, key=self.place.__getitem__), list(leaves)

    def _lasts(self, value: Value) -> bool:
        """Is ``value`` in memory after the peak, whatever happens here?"""
        newer = (one.producer for one in self.graph.values[value.buffer.index] if one.version > value.version)
        there = value.buffer.live or any(self.place[user] > self.here for user in value.users)
        return there and all(node is None or self.place[node] > self.here for node in newer)

    def _may_join(self, number: int, leaves: Sequence[Value], late: Sequence[Node]) -> bool:
        """Does the kernel ``number`` read all of ``leaves``, near the first of ``late`` and none of them a part of it?"""
        if number < 0 or not self.kernels[number].fused:
            return False
        nodes = self.kernels[number].nodes
        places = [self.place[node] for node in nodes]
        reads = {read.value for node in nodes for read in node.reads}
        near = max(places) - self.place[late[0]] <= NEAR and min(places) > self.here
        return near and all(leaf in reads for leaf in leaves) and not any(user in nodes for user in late)

    def _copy(self, found: Found) -> tuple[Copied, Node] | None:
        kernel, first = self.kernels[found.number].nodes, self.place[found.late[0]]
        instead = dict(self.made_anyway.get(found.number, {}))
        needed = {instead.get(read.value, read.value) for node in (*found.along, found.maker) for read in taken(node)}
        there = max((self.place[value.producer] for value in needed if value.producer in kernel), default=-1)
        readers = [node for node in kernel if self.place[node] > there and any(read.value in needed for read in node.reads)]
        if not readers or not self._put_off(found.late, first, max(self.place[node] for node in kernel), set(kernel)):
            return None
        joined = min(readers, key=self.place.__getitem__)
        begin = self.place[joined]
        if any(one.version > leaf.version and one.producer is not None and self.place[one.producer] < begin
               for leaf in needed for one in self.graph.values[leaf.buffer.index]):
            return None  # overwritten by then
        copies: list[Node] = []
        for node in (*found.along, found.maker):
            copies.append(again(self.graph, node, instead, joined))
            instead[result_of(node)] = result_of(copies[-1])
        mine = {result_of(found.maker): result_of(copies[-1])}
        for user in found.late:
            redirect(user, mine)
        self.graph.nodes[begin:begin] = copies
        self.place = {node: position for position, node in enumerate(self.graph.nodes)}
        return Copied(copies, list(found.late), mine), joined

    def _put_off(self, late: Sequence[Node], first: int, last: int, kernel: set[Node]) -> bool:
        """Let the nodes ``late`` and what needs them run after the kernel, whose last node is at ``last``. False where it needs
        them."""
        if first > last:
            return True
        window = self.graph.nodes[first : last + 1]
        waits = dict.fromkeys(node for node in late if self.place[node] <= last)
        for node in window:
            if any(other in waits for other, _, _ in needs(node, self.older)):
                waits[node] = None
        if any(node in kernel for node in waits):
            return False
        self.graph.nodes = [*self.graph.nodes[:first], *(node for node in window if node not in waits),
                            *(node for node in window if node in waits), *self.graph.nodes[last + 1 :]]
        self.place = {node: position for position, node in enumerate(self.graph.nodes)}
        return True


def large(leaves: Sequence[Value], value: Value) -> list[Value]:
    """Those of ``leaves`` that are not small beside ``value``."""
    return [leaf for leaf in leaves if SMALL * leaf.buffer.nbytes > value.buffer.nbytes]


def seconds(graph: Graph, kernels: Kernels) -> float:
    """What a GPU may take for all kernels."""
    fused = [kernel for kernel in kernels if kernel.fused]
    called = sum(cost(node, CUDA).seconds for kernel in kernels if not kernel.fused for node in kernel.nodes)
    return called + len(fused) * CUDA.launch + traffic(graph, fused) / CUDA.memory
