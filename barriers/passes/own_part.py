"""A rank's own part of an exchange is read where it was sent from, so that nobody need copy it. Imports `ir_nodes` and `barriers`
parts.

In an `all_to_all_single` each rank sends one part to itself: among few ranks much of what the exchange moves through memory.
Where all who read that part of what arrives can read it in what was sent, the exchange leaves it out. A copy of several ranks'
parts becomes a concatenation of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterator, Sequence

from barriers.footprint import SHORT, Footprint
from barriers.passes.fold import is_copy
from ir_nodes import Graph, Layout, Node, Operand, Value
from ir_nodes.node import Target
from ir_nodes.ops import COLLECTIVE, info
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import reread
from ir_nodes.verify import reach

EXCHANGE, WITHOUT_OWN = "lazysched::all_to_all_single", "lazysched::all_to_all_others"
"""The same exchange without each rank's own part. Ranks may differ in which one they start."""


def read_own_part(graph: Graph, remarks: Remarks | None = None, kernels: bool = True) -> Graph:
    """Let readers of a rank's own part of what an exchange brings read what was sent, where its memory still holds that, and
    leave the part out of the exchange. ``kernels``: concatenations become kernels, so that one is as good as a copy. Returns
    ``graph``. Linear in operands, but for a logarithm for each exchange."""
    starts = [node for node in graph.nodes if node.target == EXCHANGE]
    return _Reader(graph, remarks or Remarks(), kernels).run(starts) if starts else graph


@dataclass(frozen=True, slots=True)
class Window:
    """A rank's own part: its first byte and one past its last in what arrives, and how many bytes further on it was sent from."""

    first: int
    end: int
    shift: int


class _Reader:
    def __init__(self, graph: Graph, remarks: Remarks, kernels: bool) -> None:
        self.graph, self.remarks, self.kernels = graph, remarks, kernels
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self._footprint: Footprint | None = None

    def run(self, starts: Sequence[Node]) -> Graph:
        for start in starts:
            own = own_window(start)
            if own is None:
                continue
            name, reason = start.name, self._leave_out(start, own)
            if reason:
                self.remarks.refused("own_part", name, reason)
            else:
                self.remarks.did("own_part", name, "a rank's own part is read where it was sent from, and not copied")
        return self.graph

    def _leave_out(self, start: Node, own: Window) -> str:
        """Leave the own part out of ``start``; else why not."""
        begun, (sent,) = start.writes[0].value, start.reads
        arrived = arrived_value(begun)
        if arrived is None:
            return "it is waited for in another recording, or what it fills is used meanwhile"
        if arrived.buffer.live:
            return "what arrives is held at the end"
        if self.graph.last(arrived.buffer) is not arrived:
            return "what arrives is written to later"
        readers: list[Node] = []
        for reader in arrived.users:
            reason = self._why_not(reader, arrived, own)
            if reason:
                return reason
            if not all(apart(operand.layout, own) for operand in operands(reader, arrived)):
                readers.append(reader)
        reason = self._keeps(sent.value, readers)
        if not reason:
            for reader in readers:
                if is_copy(reader) and not inside(reader.reads[0].layout, own):
                    concatenate(reader, sent.value, own)
                else:
                    read_instead(reader, arrived, sent.value, own)
            start.target, start.changed = WITHOUT_OWN, True
        return reason

    def _why_not(self, reader: Node, arrived: Value, own: Window) -> str:
        """Why the own part can't be kept from ``reader``; "" where it can."""
        for operand in operands(reader, arrived):
            if apart(operand.layout, own):
                continue
            if not inside(operand.layout, own) and not (self.kernels and can_concatenate(reader, own)):
                return f"{reader.name} reads this rank's part together with others'"
            if info(reader.target).kind in COLLECTIVE:
                return f"{reader.name} sends this rank's part on"
            if own.shift % operand.layout.itemsize:
                return f"{reader.name} reads it as a type that does not fit where it was sent from"
            if own.shift and any(layout.flipped for layout in layouts(reader)):
                return f"{reader.name} reads a conjugate or negative view, which can't be read elsewhere"
        return ""

    def _keeps(self, sent: Value, readers: Sequence[Node]) -> str:
        """Why the memory of ``sent`` does not hold it until the last of ``readers``; "" where it does."""
        if not readers:
            return ""
        last = max(self.place[reader] for reader in readers)
        values = self.graph.values[sent.buffer.index]
        later = values[values.index(sent) + 1 :]
        if later:
            writer = later[0].producer
            written = writer is None or self.place[writer] <= last
            return "what was sent is overwritten while it would be read" if written else ""
        if sent.buffer.live:
            return ""
        end = max(self.place[user] for user in sent.users)
        fits = self._fits(end, last, sent.buffer.nbytes)
        return "" if fits else "keeping what was sent for so long would raise the peak of memory"

    def _fits(self, end: int, last: int, nbytes: int) -> bool:
        """May what is now held until ``end`` be held until ``last``?"""
        if last - end < SHORT:
            return True
        self._footprint = self._footprint or Footprint(self.graph)
        if self._footprint.highest(end + 1, last) + nbytes > self._footprint.peak:
            return False
        self._footprint.hold(end + 1, last, nbytes)
        return True


def arrived_value(begun: Value) -> Value | None:
    """What the only node that touches ``begun`` leaves, which waits for it."""
    (user,) = begun.users if len(begun.users) == 1 else (None,)
    if user is None or info(user.target).kind != "wait" or len(user.writes) != 1 or user.writes[0].base is not begun:
        return None
    return user.writes[0].value


def own_window(start: Node) -> Window | None:
    """The part that this rank sends to itself; None where it sends none, or is the only rank."""
    rank, ranks, count, *splits = start.args[2]
    outs, ins = start.writes[0].layout, start.reads[0].layout
    plain = all(one.is_contiguous and one.size and one.numel and not one.flipped for one in (outs, ins))
    if ranks < 2 or not plain or outs.dtype != ins.dtype:
        return None
    (first, size), (sent, sent_size) = (part_of(layout, rank, ranks, given) for layout, given in
                                        ((outs, splits[:count]), (ins, splits[count:])))
    return Window(first, first + size, sent - first) if size == sent_size and size else None


def part_of(layout: Layout, rank: int, ranks: int, splits: Sequence[int]) -> tuple[int, int]:
    """The first byte and the size of a rank's part of a tensor; ``splits``: rows of each part, or none if all are alike."""
    row = layout.nbytes // layout.size[0]
    before, rows = (sum(splits[:rank]), splits[rank]) if splits else (layout.size[0] // ranks * rank, layout.size[0] // ranks)
    return layout.offset * layout.itemsize + before * row, rows * row


def operands(reader: Node, value: Value) -> Iterator[Operand]:
    return (operand for operand in reader.reads if operand.value is value)


def layouts(node: Node) -> Iterator[Layout]:
    return (place.layout for place in (*node.reads, *node.writes))


def inside(layout: Layout, own: Window) -> bool:
    first, end = reach(layout)
    return own.first <= first < end <= own.end


def apart(layout: Layout, own: Window) -> bool:
    first, end = reach(layout)
    return end <= own.first or own.end <= first


def along(layout: Layout, own: Window) -> tuple[int, int, int] | None:
    """The dimension that leads ``layout`` through several ranks' parts, and the indices between which it is in the own one."""
    dim = max(range(len(layout.size)), key=lambda one: layout.stride[one] * (layout.size[one] > 1))
    step, begin = layout.stride[dim] * layout.itemsize, layout.offset * layout.itemsize
    beside = layout.itemsize * (1 + sum((n - 1) * s for at, (n, s) in enumerate(zip(layout.size, layout.stride)) if at != dim))
    if beside > step:
        return None
    first = max(-((begin - own.first) // step), 0)
    end = min((own.end - begin) // step + ((own.end - begin) % step >= beside), layout.size[dim])
    cut_before = first > 0 and begin + (first - 1) * step + beside > own.first
    cut_behind = end < layout.size[dim] and begin + end * step < own.end
    return None if first >= end or cut_before or cut_behind else (dim, first, end)


def can_concatenate(reader: Node, own: Window) -> bool:
    """Does it only copy what it reads, part after part?"""
    if not is_copy(reader):
        return False
    read, write = reader.reads[0].layout, reader.writes[0].layout
    alike = read.dtype is write.dtype or read.dtype.is_floating_point and write.dtype.is_floating_point
    return alike and along(read, own) is not None


def concatenate(reader: Node, sent: Value, own: Window) -> None:
    """Make ``reader``, a copy, one of the parts before this rank's, of its own in ``sent``, and of those behind it."""
    arrived, layout = reader.reads[0].value, reader.reads[0].layout
    found = along(layout, own)
    assert found is not None, reader
    dim, *bounds = found
    parts: list[Operand] = []
    for first, end in zip((0, *bounds), (*bounds, layout.size[dim])):
        size = tuple(end - first if at == dim else n for at, n in enumerate(layout.size))
        part = replace(layout, size=size, offset=layout.offset + first * layout.stride[dim])
        parts += [Operand(sent, shifted(part, own)) if inside(part, own) else Operand(arrived, part)] if first < end else []
    reader.target, reader.changed, reader.returns = "aten::cat.out", True, ()
    reader.args, reader.reads = (tuple(parts), dim, Target(0)), tuple(parts)
    sent.users[reader] = None


def shifted(layout: Layout, own: Window) -> Layout:
    return replace(layout, offset=layout.offset + own.shift // layout.itemsize)


def read_instead(reader: Node, arrived: Value, sent: Value, own: Window) -> None:
    """Let ``reader`` read its own part of ``arrived`` in ``sent``."""

    def of(operand: Operand) -> Operand:
        if operand.value is not arrived or not inside(operand.layout, own):
            return operand
        return Operand(sent, shifted(operand.layout, own))

    reread(reader, of)
    reader.relaid = reader.relaid or own.shift != 0
