"""What large kernels read over and over lies in the order in which they walk. Imports `ir_nodes` and `barriers` parts only.

A bias by positions that is looked up in a table of heads lies head by head within each pair of positions, and is added to the
scores of all sequences of a batch, whose rows then pick every eighth number of it. Nobody outside sees that memory, so it is
written once in the order of its readers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from barriers.passes.cheap import is_elementwise
from ir_nodes import BufferKind, Graph, Layout, Node, Operand, Value, Write
from ir_nodes.ops import info
from ir_nodes.remarks import Remarks

WALKERS = ("pointwise", "reduction", "copy")
"""Kinds of op that give the same however their operands lie."""
OFTEN = 8
"""Times that one op has to read each element."""


def lay_for_readers(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Write what is read often, with rows that lie apart, in rows of its readers. Returns ``graph``. Linear in nodes."""
    for values in graph.values:
        if len(values) == 2 and not values[0].users and (order := _wanted(values[1])) is not None:
            _relay(values[1], order)
            if remarks is not None:
                remarks.did("reader_order", values[1].producer.name, "its result lies as the ops that read it often walk it")
    return graph


def _wanted(value: Value) -> dict[int, int] | None:
    """New strides for those of ``value``, where its readers would gain by them."""
    maker, buffer = value.producer, value.buffer
    if maker is None or buffer.live or buffer.kind is not BufferKind.FRESH or not is_elementwise(maker):
        return None
    written = maker.writes[0].layout
    seen = [(user, read.layout) for user in value.users for read in user.reads if read.value is value]
    dims = _dims(written)
    if not dims or written.numel * OFTEN > max((_elements(user) for user, _ in seen), default=0):
        return None
    if not seen or written.flipped or math.prod(size for size, _ in dims) != written.numel:
        return None
    alike = all(info(user.target).kind in WALKERS and not layout.flipped and layout.dtype is written.dtype
                and layout.offset == written.offset and Counter(_dims(layout)) == Counter(dims) for user, layout in seen)
    _, widest = max(seen, key=lambda one: _elements(one[0]))
    if not alike or _dims(widest)[-1][1] == 1 or len({stride for _, stride in dims}) != len(dims):
        return None
    found, step = {}, 1
    for size, stride in reversed(_dims(widest)):
        found[stride] = step
        step *= size
    return found


def _dims(layout: Layout) -> list[tuple[int, int]]:
    """Extent and stride of what a layout walks; broadcast dimensions are not."""
    return [(size, stride) for size, stride in zip(layout.size, layout.stride) if size > 1 and stride]


def _elements(node: Node) -> int:
    return max((write.layout.numel for write in node.writes), default=0)


def _relay(value: Value, order: dict[int, int]) -> None:
    def layout_of(place: Operand | Write) -> Layout:
        old = place.layout
        if place.value is not value:
            return old
        return replace(old, stride=tuple(order.get(stride, 0) if size > 1 else 1 for size, stride in zip(old.size, old.stride)))

    assert value.producer is not None
    for node in (value.producer, *value.users):
        node.relay(layout_of)
