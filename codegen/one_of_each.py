"""Lowers gathers of one element of each row, and gradients of those, as losses of chosen tokens have them, and one-hot rows.
Imports torch, `ir_nodes` and codegen's lowering modules.

A row's kernel picks the element of what it computes, and the gradient is a row with one element that is not zero, which need not
be written as such.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from codegen.indexing import lower_gather
from codegen.instructions import KEPT, Part
from codegen.lowering import Lowering, arguments, fill_of
from codegen.onehot import ONE_HOT
from codegen.reductions import kept_layout, operand_of, reduction, write_kept
from codegen.scattering import lower_scatter
from ir_nodes import settings
from ir_nodes.node import Node, Operand

EXTREMES = frozenset(("min", "max", "argmin", "argmax"))
"""Ops whose indices lie in what they looked at."""


def lower_one_gathered(node: Node) -> list[Part]:
    """gather, where it takes one element along a dimension of all that another op has made: by the rows' index."""
    args = arguments(node)
    source, index = operand_of(args["self"]), operand_of(args["index"])
    dim = args["dim"]
    if source.value.producer is None or not source.layout.dtype.is_floating_point or not _one_of_each(index, source, dim):
        return lower_gather(node)
    dim %= len(source.layout.size)
    lowering, dims = reduction(node, source, dim)
    at = lowering.load(Operand(index.value, kept_layout(index.layout, dims)), KEPT)
    at = lowering.check(at, source.layout.size[dim])
    write_kept(lowering, 0, lowering.gather(source, dim, at), dims)
    return [lowering.part]


def lower_one_scattered(node: Node, scratch: int) -> list[Part]:
    """scatter and scatter_add, where one number of each row goes into zeros: an elementwise choice."""
    args, write = arguments(node), node.writes[0]
    zeros, index = operand_of(args["self"]), operand_of(args["index"])
    src = args.get("src")
    whole = write.layout == zeros.layout and write.layout.covers(write.value.buffer.nbytes)
    plain = "reduce" not in args and fill_of(zeros) == 0 and len(node.writes) == 1
    if not plain or not whole or not _one_of_each(index, zeros, args["dim"]):
        return lower_scatter(node, scratch)
    if "value" in args:
        return _marked(node, index, args["dim"] % len(write.layout.size), args["value"])
    if not write.layout.dtype.is_floating_point or not _lies_within(node, index, args["dim"]):
        return lower_scatter(node, scratch)
    lowering = Lowering(node, write.layout.size)
    fits = "tl.where(({0} >= 0) & ({0} <= 2147483647), {0}, -1).to(tl.int32)"
    at = lowering.expr(fits, lowering.load(index), dtype=torch.int32)
    number = lowering.load(Operand(src.value, replace(src.layout, size=index.layout.size)))
    less = lowering.expr("-{0}", lowering.cast(number, write.layout.dtype), dtype=number.dtype)
    lowering.write(0, lowering.expr(ONE_HOT, lowering.coord(args["dim"] % len(write.layout.size)), at, less, dtype=less.dtype))
    return [lowering.part]


def _marked(node: Node, index: Operand, dim: int, number: Any) -> list[Part]:
    """``number`` where each row's index says."""
    layout = node.writes[0].layout
    lowering = Lowering(node, layout.size)
    at = lowering.check(lowering.load(index), layout.size[dim])
    value, zero = (lowering.read(one, layout.dtype) for one in (number, 0))
    text = "tl.where({0} == {1}, {2}, {3})"
    lowering.write(0, lowering.expr(text, lowering.coord(dim), at, value, zero, dtype=value.dtype))
    return [lowering.part]


def _one_of_each(index: Operand, whole: Operand, dim: int) -> bool:
    """Does it name one element along ``dim`` at every place along the others?"""
    size, rank = whole.layout.size, len(whole.layout.size)
    if index.layout.dtype not in (torch.int64, torch.int32) or len(index.layout.size) != rank or not rank:
        return False
    alone = (*size[: dim % rank], 1, *size[dim % rank + 1 :])
    return index.layout.size == alone and size[dim % rank] > 1 and whole.layout.numel > 0


def _lies_within(node: Node, index: Operand, dim: int) -> bool:
    """Has another kernel looked whether the index is in range, or made it so?"""
    if not settings.current().check_indices:
        return True
    count = node.writes[0].layout.size[dim % len(node.writes[0].layout.size)]
    maker = index.value.producer
    if maker is not None and maker.name in EXTREMES:
        looked, along = maker.reads[0].layout.size, arguments(maker).get("dim")
        return isinstance(along, int) and bool(looked) and looked[along] <= count
    return any(_looked(user, index, count) for user in index.value.users if user.index < node.index)


def _looked(user: Node, index: Operand, count: int) -> bool:
    """Did a gather before read at most ``count`` elements by that index?"""
    if user.name != "gather":
        return False
    args = arguments(user)
    source = operand_of(args["self"]).layout.size
    return args["index"] == index and bool(source) and source[args["dim"]] <= count
