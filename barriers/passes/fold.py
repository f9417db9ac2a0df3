"""Drops copies that nobody needs: users read the source, or the copy is its source. Imports `ir_nodes` and `barriers` parts."""

from __future__ import annotations

import torch

from barriers.passes.cse import is_whole
from ir_nodes import BufferKind, Graph, Node, Operand, Value
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import Substitution

_COPIES = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::contiguous", "aten::clone.out", "aten::_to_copy.out")
LONGEST = 8
"""Casts in a row that are looked through."""
_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
_BITS = {torch.bool: 1, torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31, torch.int64: 63}


def forward_copies(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Drop copies into new memory that have their source's dtype and layout, chains of casts that lose nothing among them.

    Where the source keeps its bytes for as long as the copy is used, users of the copy read the source. Where nobody
    uses the source any more when the copy is first changed, the copy goes on in its source's memory. Returns ``graph``. Linear
    in nodes and operands.
    """
    return _Forwarder(graph, remarks or Remarks()).run()


class _Forwarder:
    def __init__(self, graph: Graph, remarks: Remarks) -> None:
        self.graph, self.remarks = graph, remarks
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.forwarded = Substitution()
        self.last: dict[Value, int] = {}
        self.newer = {old: new for values in graph.values if len(values) > 2 or values[0].users
                      for old, new in zip(values, values[1:])}

    def run(self) -> Graph:
        gone = [node for node in self.graph.nodes if self._drops(node)]
        if gone:
            self.forwarded.apply(self.graph, gone)
        return self.graph

    def _drops(self, node: Node) -> bool:
        source = self._source(node)
        if source is None:
            return False
        write = node.writes[0]
        value = self.forwarded.of(source.value)
        if value.producer is None and value.buffer.kind is not BufferKind.INPUT:
            return False  # nothing would make the buffer
        reason = self._forward(value, write.value)
        if reason and self._rehouse(value, write.value):
            reason = ""
        if reason:
            self.remarks.refused("fold", node.name, reason)
        else:
            self.remarks.did("fold", node.name, "it would have copied what is there already")
        return not reason

    def _source(self, node: Node) -> Operand | None:
        """What ``node`` copies as it is, through casts that lose nothing."""
        if not is_copy(node) or not is_whole(node.writes[0], self.graph):
            return None
        read, layout = node.reads[0], node.writes[0].layout
        through: list[torch.dtype] = []
        while read.layout != layout or not all(keeps(layout.dtype, dtype) for dtype in through):
            maker = self.forwarded.of(read.value).producer
            if maker is None or len(through) == LONGEST or not is_copy(maker) or maker.writes[0].layout != read.layout:
                return None
            through.append(read.layout.dtype)
            read = maker.reads[0]
            if self._changes_before(read.value, node):
                return None
        return read

    def _changes_before(self, value: Value, node: Node) -> bool:
        """Is the memory of ``value`` overwritten before ``node`` runs?"""
        following = self.newer.get(self.forwarded.of(value))
        return following is not None and self._made(following) <= self.place[node]

    def _forward(self, source: Value, copy: Value) -> str:
        """Users of ``copy`` read ``source``, if its memory keeps it for so long; else why not."""
        following = self.newer.get(source)
        end = self._last(copy)
        if copy.buffer.live:
            return "the copy is held at the end, and its source is another memory"
        if copy in self.newer:
            return "the copy is written to while its source is still needed"
        if following is not None and self._made(following) <= end:
            return "its source is overwritten while the copy is still read"
        if source.buffer.nbytes > copy.buffer.nbytes and not source.buffer.live and self._last(source) < end:
            return "a small part would keep the whole of its source in memory"
        self.last[source] = max(self._last(source), end)
        self.forwarded.replace(copy, source)
        return ""

    def _rehouse(self, source: Value, copy: Value) -> bool:
        """Both buffers become one, if nobody needs ``source`` once ``copy`` changes or the recording ends."""
        old, new = source.buffer, copy.buffer
        if old.live or source in self.newer or old.nbytes != new.nbytes or old is new:
            return False
        if old.kind is not BufferKind.FRESH and new.live:
            return False  # a result needs memory of its own
        following = self.newer.get(copy)
        if following is not None and self._last(source) >= self._made(following):
            return False
        self._join(source, copy)
        return True

    def _join(self, source: Value, copy: Value) -> None:
        old, new = source.buffer, copy.buffer
        before, after = self.graph.values[old.index], self.graph.values[new.index]
        stays = new if new.live else old
        joined = [*before, *(value for value in after[1:] if value is not copy)]
        if copy in self.newer:
            self.newer[source] = self.newer.pop(copy)
        self.last[source] = max(self._last(source), self._last(copy))
        self.forwarded.replace(copy, source)
        self.graph.values[(old if stays is new else new).index] = [Value(old if stays is new else new, 0)]
        self.graph.values[stays.index] = joined
        for version, value in enumerate(joined):
            value.buffer, value.version = stays, version

    def _made(self, value: Value) -> int:
        assert value.producer is not None
        return self.place[value.producer]

    def _last(self, value: Value) -> int:
        if value not in self.last:
            own = -1 if value.producer is None else self._made(value)
            self.last[value] = max((self.place[user] for user in value.users), default=own)
        return self.last[value]


def is_copy(node: Node) -> bool:
    """Does it copy all of one operand into all of another, perhaps to another dtype?"""
    if node.target not in _COPIES or len(node.reads) != 1 or len(node.writes) != 1 or node.effects:
        return False
    read, write = node.reads[0].layout, node.writes[0].layout
    return read.size == write.size and not read.flipped and not write.flipped and not node.writes[0].base


def keeps(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Does every number of ``narrow`` come back from ``wide`` as it was?"""
    if narrow in _DIGITS and wide in _DIGITS:
        return narrow is wide or _DIGITS[narrow] < _DIGITS[wide] and (narrow, wide) != (torch.bfloat16, torch.float16)
    if narrow in _BITS and wide in _DIGITS:
        return _BITS[narrow] <= _DIGITS[wide]
    if narrow in _BITS and wide in _BITS:
        return narrow is torch.bool or _BITS[narrow] <= _BITS[wide] and (narrow is not torch.int8 or wide is not torch.uint8)
    return narrow is wide


