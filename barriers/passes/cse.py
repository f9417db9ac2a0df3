"""One node where two compute the same value. Imports `ir_nodes` and `barriers` parts only."""

from __future__ import annotations

from typing import Hashable

from barriers.footprint import SHORT, Footprint
from ir_nodes import BufferKind, Graph, Node, Operand, Value, Write
from ir_nodes.node import Arg
from ir_nodes.ops import info, split
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import Substitution

_IMPURE = ("random", "data_dependent", "value_access", "extern", "collective", "wait")


def merge_common(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Drop each node that computes what an earlier one has computed, bit for bit; its users use that. Returns ``graph``.

    Two nodes do so where op, operands with their layouts, constants and number inputs are the same, and both make new memory.
    Never merged are draws, collectives, ops with effects, ops of unknown libraries, and results that are both held when the
    recording ends, for they are two memories. A value that would have to be kept longer for it stays apart where that would raise
    the peak of memory: computing it again may be what the program asked for (checkpointing). Linear, but for a logarithm
    for each merge.
    """
    return _Merger(graph, remarks or Remarks()).run()


class _Merger:
    def __init__(self, graph: Graph, remarks: Remarks) -> None:
        self.graph, self.remarks = graph, remarks
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.merged = Substitution()
        self.last: dict[Value, int] = {}  # where a value that others were merged into is used last
        self.known: dict[Hashable, list[tuple[Node, Hashable]]] = {}
        self._footprint: Footprint | None = None

    def run(self) -> Graph:
        gone = [node for node in self.graph.nodes if makes_new_memory(node, self.graph) and self._known_twin(node)]
        if gone:
            self.merged.apply(self.graph, gone)
        return self.graph

    def _known_twin(self, node: Node) -> bool:
        """Was ``node`` merged into an earlier one?"""
        others = self.known.setdefault((node.target, *(self.merged.of(read.value) for read in node.reads)), [])
        if not others:
            others.append((node, None))
            return False
        others[0] = (others[0][0], others[0][1] or self._key(others[0][0]))  # most nodes have no twin: not asked for before
        mine = self._key(node)
        twin = next((other for other, key in others if key == mine), None)
        if twin is None:
            others.append((node, mine))
        return twin is not None and self._merge(twin, node)

    def _key(self, node: Node) -> Hashable:
        args = tuple(self._arg(arg) for arg in node.args)
        return args, node.returns, tuple((write.layout, write.value.buffer.nbytes) for write in node.writes)

    def _arg(self, arg: Arg) -> Hashable:
        if isinstance(arg, tuple):
            return tuple(map(self._arg, arg))
        if isinstance(arg, Operand):
            return self.merged.of(arg.value), arg.layout
        return type(arg), repr(arg) if isinstance(arg, (float, complex)) else arg  # 1 == True, 0.0 == -0.0

    def _merge(self, twin: Node, node: Node) -> bool:
        pairs = [(one.value, other.value) for one, other in zip(twin.writes, node.writes)]
        for one, other in pairs:
            reason = self._why_not(one, other, self.place[node])
            if reason:
                self.remarks.refused("cse", node.name, reason)
                return False
        self.remarks.did("cse", node.name, "an earlier op has computed the same")
        for index, (one, other) in enumerate(pairs):
            self.last[one] = self.last[other] = max(self._last(one), self._last(other))
            if other.buffer.live:
                hand_over(twin, index, other)
                one, other = other, one
            self.merged.replace(other, one)
        node.writes = tuple(write for write in node.writes if write.value.producer is node)
        return True

    def _why_not(self, one: Value, other: Value, here: int) -> str:
        """Why ``one``, an earlier result, may not serve for ``other``, made ``here``; "" where it may."""
        if one.buffer.live and other.buffer.live:
            return "both results are held at the end, and are two memories"
        if len(self.graph.values[other.buffer.index]) > 2:
            return "its result is written to later"
        following = self.graph.values[one.buffer.index][2:3]
        if following and (other.buffer.live or self._place_of(following[0]) <= self._last(other)):
            return "the earlier result is overwritten while this one is still read"
        fits = one.buffer.live or self._fits(self._last(one), here, one.buffer.nbytes)
        return "" if fits else "keeping the earlier result for so long would raise the peak of memory"

    def _fits(self, end: int, start: int, nbytes: int) -> bool:
        if start - end < SHORT or not nbytes:
            return True
        self._footprint = self._footprint or Footprint(self.graph)
        if self._footprint.highest(end + 1, start - 1) + nbytes > self._footprint.peak:
            return False
        self._footprint.hold(end + 1, start - 1, nbytes)
        return True

    def _last(self, value: Value) -> int:
        if value not in self.last:
            self.last[value] = max((self.place[user] for user in value.users), default=self._place_of(value))
        return self.last[value]

    def _place_of(self, value: Value) -> int:
        assert value.producer is not None
        return self.place[value.producer]


def hand_over(twin: Node, index: int, value: Value) -> None:
    """``twin`` makes ``value``, which is held at the end, instead of its own."""
    old = twin.writes[index]
    twin.writes = (*twin.writes[:index], Write(value, old.layout, None, False), *twin.writes[index + 1 :])
    value.producer, old.value.producer = twin, None


def makes_new_memory(node: Node, graph: Graph) -> bool:
    """Does the same op on the same operands give the same bits again, in memory that nothing wrote before?"""
    if node.effects or not node.writes or split(node.target)[0] != "aten":
        return False
    row = info(node.target)
    if row.kind in _IMPURE or row.random or row.hidden_writes or row.name.startswith(("empty", "new_empty")):
        return False
    return all(is_whole(write, graph) for write in node.writes)


def is_whole(write: Write, graph: Graph) -> bool:
    """Is it the first write to its memory, and does it fill that?"""
    buffer = write.value.buffer
    first = graph.values[buffer.index][1] is write.value and not graph.values[buffer.index][0].users
    return write.base is None and buffer.kind is BufferKind.FRESH and first and write.layout.covers(buffer.nbytes)
