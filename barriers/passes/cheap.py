"""Which ops cost next to nothing to run again. Imports `ir_nodes` only."""

from __future__ import annotations

from typing import Sequence

from ir_nodes import Layout, Node, Operand
from ir_nodes.node import Write
from ir_nodes.ops import info, split

ROWS = ("softmax", "normalization", "reduction")
REDUCED = ("mean", "sum", "amax", "amin", "all", "any")
_ELEMENTWISE = ("pointwise", "fill")
_COPIES = ("copy_", "clone", "_to_copy", "contiguous")


def is_cheap(node: Node) -> bool:
    """Elementwise ops, casts, fills and reductions of rows, which give the same bits again and fill new memory."""
    row = info(node.target)
    if node.effects or not node.writes or row.random or row.hidden_writes or split(node.target)[0] != "aten":
        return False
    if not all(write.base is None and write.layout.covers(write.value.buffer.nbytes) for write in node.writes):
        return False
    if row.kind in ROWS:
        return node.reads[0].layout.is_contiguous and reduces_rows(node)
    return row.kind in _ELEMENTWISE or row.name in _COPIES


def walks(node: Node) -> Sequence[Operand | Write]:
    """What tells how much a kernel walks for ``node``: parts that are joined are stored by the kernel that makes them."""
    return node.reads if node.name in ("cat", "stack") else (*node.reads, *node.writes)


def is_elementwise(node: Node) -> bool:
    """Is it a cheap op that takes each element by itself?"""
    return is_cheap(node) and len(node.writes) == 1 and info(node.target).kind not in ROWS


def reduces_rows(node: Node) -> bool:
    """Does each result depend on neighbouring elements only, and are there several?"""
    full, outs = node.reads[0].layout, [write.layout for write in node.writes]
    dims = {"softmax": node.args[1:2], "normalization": ()}.get(info(node.target).kind)
    if dims is not None:
        last = not dims or dims[0] in (-1, len(full.size) - 1)
        return last and info(node.target).name in ("_softmax", "_log_softmax", "native_layer_norm")
    kept = outs[0].size[:-1] == full.size[:-1] and len(full.size) > 1 and outs[0].numel * full.size[-1] == full.numel
    return len(outs) == 1 and kept and outs[0].numel > 1 and info(node.target).name in REDUCED


def sees_all(read: Operand, maker: Node) -> bool:
    """Does ``read`` see what ``maker`` wrote, element after element?"""
    written = next(write.layout for write in maker.all_writes() if write.value is read.value)
    return _same_elements(read.layout, written)


def _same_elements(one: Layout, other: Layout) -> bool:
    plain = one.is_contiguous and other.is_contiguous and one.numel == other.numel
    return one == other or (plain and one.dtype is other.dtype and one.offset == other.offset and not one.flipped)
