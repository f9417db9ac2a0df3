"""Where a tensor lies once it is a part of a larger one, and who reads it there. Imports `ir_nodes` only."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Sequence

from ir_nodes import BufferKind, Graph, Layout, Node, Operand, Value, Write
from ir_nodes.node import Arg, Target
from ir_nodes.rewrite import let_go, new_value, node_beside, reread

Place = Callable[[Layout], "Layout | None"]
"""How a layout of a tensor sees it as a part; None: no strides see it so."""


def behind(start: int) -> Place:
    """A tensor of which ``start`` elements lie in front of it."""
    return lambda layout: replace(layout, offset=layout.offset + start)


def in_columns(width: int, whole: int, start: int) -> Place:
    """Rows of ``width`` elements that have become the columns from ``start`` on of rows of ``whole`` elements."""
    def place(layout: Layout) -> Layout | None:
        strides, last = [], layout.offset % width
        for extent, stride in zip(layout.size, layout.stride):
            if stride % width and extent > 1:  # a step inside a row
                last += stride * (extent - 1)
                strides.append(stride)
            else:
                strides.append(stride // width * whole)
        if last >= width or min(layout.stride, default=0) < 0:
            return None
        return replace(layout, stride=tuple(strides), offset=layout.offset // width * whole + layout.offset % width + start)

    return place


def places_of(widths: Sequence[int]) -> list[Place]:
    """Where tensors with rows of ``widths`` elements lie as columns of one, in order."""
    return [in_columns(width, sum(widths), sum(widths[:number])) for number, width in enumerate(widths)]


def lie_beside(operands: Sequence[Operand]) -> bool:
    """Does each begin where the one before it ends, in one tensor?"""
    ends = [operand.layout.offset + operand.layout.numel for operand in operands]
    return len({operand.value for operand in operands}) < 2 and ends[:-1] == [one.layout.offset for one in operands[1:]]


def together(operands: Sequence[Operand]) -> Operand:
    """Operands that lie beside one another, each contiguous, as one along their first dimension."""
    first = operands[0]
    size = (sum(one.layout.size[0] for one in operands), *first.layout.size[1:])
    return Operand(first.value, replace(first.layout, size=size))


def why_not_moved(graph: Graph, write: Write, place: Place) -> str:
    """Why what ``write`` makes can't be a part of another tensor; "": it can."""
    buffer = write.value.buffer
    if buffer.kind is not BufferKind.FRESH or buffer.live or write.base is not None:
        return "a result is held, or goes into memory that was there before"
    if graph.values[buffer.index][1:] != [write.value] or not write.layout.covers(buffer.nbytes):
        return "something else is written where a result lies"
    seen = [read.layout for user in write.value.users for read in user.reads if read.value is write.value]
    if any(layout.itemsize != write.layout.itemsize or place(layout) is None for layout in seen):
        return "somebody sees a result's elements in an order in which they would not lie any more"
    return ""


def move(value: Value, whole: Value, place: Place, but: Node | None = None) -> None:
    """Let everybody who reads ``value``, ``but`` one, read it as a part of ``whole``."""
    def moved(operand: Operand) -> Operand:
        layout = place(operand.layout) if operand.value is value else None
        return operand if layout is None else Operand(whole, layout)

    for user in list(value.users):
        if user is not but:
            reread(user, moved)
            user.relaid = True


def new_node(graph: Graph, beside: Node, target: str, args: tuple[Arg, ...], layout: Layout) -> Node:
    """An op of ``args`` and, last, an ``out`` of its own. It belongs to what ``beside`` belongs to, and is not yet one of the
    graph's nodes."""
    return node_beside(beside, target, (*args, Target(0)), Write(new_value(graph, layout.nbytes), layout, None, False))


def forget(graph: Graph, node: Node) -> None:
    """Let ``node``, whose results nobody reads, read and make nothing. It stays in the graph's list."""
    let_go(node)
    for write in node.all_writes():
        graph.values[write.value.buffer.index].remove(write.value)
