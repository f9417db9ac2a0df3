"""Gives rows of matrices a length that tensor cores like. Imports `ir_nodes` only.

A matrix product whose operand or result has rows of 50,257 bfloat16s runs on slow kernels: its rows do not start on 16-byte
boundaries, so they can't be loaded in whole vectors. Such a matrix, where the graph makes it and nobody outside sees it, gets
longer rows; what lies behind a row's end means nothing, `codegen.pad_products` says who may read it. Nothing is copied: everyone
just walks it with another stride. Products of such matrices are four to seven times as fast on Hopper
(`python -m benchmarks.train --models gpt2`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from ir_nodes import BufferKind, Graph, Layout, Node, ops
from ir_nodes.node import Buffer

VECTOR = 16
"""Bytes that a thread loads at once."""
FOLLOWING = ("copy", "copy_", "_to_copy", "_log_softmax", "_log_softmax_backward_data")
NO_USE = "another matrix of its product has rows of odd length, and is seen outside"
WORTH = 1 << 20
"""Bytes of a matrix below which a slow product costs nothing."""


def pad_rows(graph: Graph, done: dict[Buffer, tuple[int, int]]) -> dict[Buffer, str]:
    """Lengthen rows where that serves a product; ``done`` takes the elements that they had and have. Returns what was left as it
    is, with the reason."""
    users = users_of(graph)
    refused: dict[Buffer, str] = {}
    for buffer, (row, serves) in odd_matrices(graph).items():
        reason = lengthen(buffer, row, rounded(*row), users[buffer]) if serves or seen(buffer) else NO_USE
        if reason:
            refused[buffer] = reason
        else:
            done[buffer] = (row[0], rounded(*row))
    follow(done, users)
    return refused


def follow(done: dict[Buffer, tuple[int, int]], users: dict[Buffer, list[Node]]) -> None:
    """Lengthen the rows of what is computed element by element from those: kernels that read one for the other need both alike
    (`codegen.inline`)."""
    todo = list(done)
    while todo:
        buffer = todo.pop()
        for node in users[buffer]:
            if node.name not in FOLLOWING:
                continue
            for value, layout in node.places():
                shape = (done[buffer][0], layout.itemsize)
                alike = layout.size and layout.size[-1] == shape[0] and value.buffer not in done
                if alike and not lengthen(value.buffer, shape, done[buffer][1], users[value.buffer]):
                    done[value.buffer] = done[buffer]
                    todo.append(value.buffer)


def odd_matrices(graph: Graph) -> dict[Buffer, tuple[tuple[int, int], bool]]:
    """Buffers that matrix products read or write in rows of odd length: (elements of a row, bytes of an element), and whether
    longer ones serve any: whether what else a product reads has rows of even length, or may get them."""
    found: dict[Buffer, tuple[tuple[int, int], bool]] = {}
    for node in graph.nodes:
        if ops.info(node.target).kind != "matmul":
            continue
        serves = not any(off(read.layout) and seen(read.value.buffer) for read in node.reads)
        for value, layout in node.places():
            if off(layout) and value.buffer.nbytes >= WORTH:
                row, before = found.get(value.buffer, ((leading(layout), layout.itemsize), False))
                found[value.buffer] = row, before or serves
    return found


def off(layout: Layout) -> bool:
    """Is it a matrix whose rows do not all start on 16-byte boundaries?"""
    row = leading(layout)
    return row > 1 and row * layout.itemsize % VECTOR > 0


def seen(buffer: Buffer) -> bool:
    """Does somebody outside of the graph know how it lies?"""
    return buffer.live or buffer.kind is not BufferKind.FRESH


def leading(layout: Layout) -> int:
    """How many elements lie between two rows (or columns) of a matrix, 0 where it is none."""
    strides = [stride for size, stride in zip(layout.size[-2:], layout.stride[-2:]) if size > 1]
    return max(strides) if len(strides) == 2 and min(strides) == 1 else 0


def users_of(graph: Graph) -> dict[Buffer, list[Node]]:
    users: dict[Buffer, dict[Node, None]] = {}
    for node in graph.nodes:
        for value, _ in node.places():
            users.setdefault(value.buffer, {})[node] = None
    return {buffer: list(nodes) for buffer, nodes in users.items()}


def lengthen(buffer: Buffer, shape: tuple[int, int], padded: int, users: list[Node]) -> str:
    """Give every layout of ``buffer`` rows of ``padded`` elements; "" where that is done, else the reason why not."""
    row, itemsize = shape
    if seen(buffer):
        return "its memory is seen outside"
    if buffer.nbytes % (row * itemsize):
        return "it is more than rows"
    chosen: dict[Layout, Layout] = {}
    for node in users:
        for value, layout in node.places():
            if value.buffer is not buffer:
                continue
            longer = with_rows(layout, row, padded, itemsize)
            if longer is None:
                return f"{node.target} sees it as {layout}, which is not made of rows"
            chosen[layout] = longer
        if any(write.value.buffer is buffer for write in node.writes) and not writes_anywhere(node):
            return f"{node.target} makes its result where it likes"
    for node in users:
        node.relay(lambda place: chosen[place.layout] if place.value.buffer is buffer else place.layout)
        node.relaid = True
    buffer.nbytes = buffer.nbytes // row * padded
    return ""


def rounded(row: int, itemsize: int) -> int:
    """Elements of the shortest row that ends on a boundary."""
    return math.ceil(row * itemsize / VECTOR) * VECTOR // itemsize


def writes_anywhere(node: Node) -> bool:
    """Does the op write into memory that it is given? An op that allocates its result would be copied from there."""
    returned = {index for index in node.returns if index is not None}
    return ops.info(node.target).kind != "matmul" or not returned


def with_rows(layout: Layout, row: int, padded: int, itemsize: int) -> Layout | None:
    """``layout`` of a matrix in rows of ``row`` elements, seen in rows of ``padded``; None where a dimension crosses rows."""
    if layout.itemsize != itemsize:
        return None
    above, inside = divmod(layout.offset, row)
    strides = []
    for size, stride in zip(layout.size, layout.stride):
        if size > 1 and stride % row:
            inside += (size - 1) * stride
            strides.append(stride)
        else:
            strides.append(stride // row * padded if stride % row == 0 else stride)
    if inside >= row:
        return None
    return replace(layout, stride=tuple(strides), offset=above * padded + layout.offset % row)
