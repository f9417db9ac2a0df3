"""Lowers variances, log-sum-exp and places of extremes. Imports torch, `ir_nodes` and codegen's leaf modules."""

from __future__ import annotations

import math

import torch

from codegen import forms, moments
from codegen.expressions import Unsupported
from codegen.instructions import KEPT, Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.reductions import Lowered, divide, operand_of, reduction, spread_of, write_kept
from codegen.softmax import exp, highest_of
from ir_nodes import settings
from ir_nodes.node import Node, Operand

MOST_PLACES = 1 << 31
KEYED = 1024
"""Elements; shorter rows are held in registers, where numbers of 64 bits take longer than a second reduction."""


def lower_variance(root: bool, with_mean: bool) -> Lowered:
    """var, std, var_mean and std_mean."""

    def lower(node: Node, scratch: int) -> list[Part]:
        args = arguments(node)
        if "correction" not in args or len(node.writes) != 1 + with_mean:
            raise Unsupported(f"no kernel for {node.target}")
        source = operand_of(args["self"])
        lowering, dims = reduction(node, source, args.get("dim"))
        value = lowering.load(source)
        if not value.dtype.is_floating_point:
            raise Unsupported(f"variance of {value.dtype}")
        if moments.is_long(source.layout, dims) or moments.is_tall(source.layout, dims):
            mean, squares = moments.moments(lowering, source, dims)
        else:
            mean, _, squares = spread_of(lowering, value)
        count = lowering.size(forms.reduced_extent(lowering.part.reduced or ()), value.dtype)
        taken = lowering.read(1 if args["correction"] is None else args["correction"], value.dtype)
        left = lowering.expr("tl.maximum({0} - {1}, 0.0)", count, taken, dtype=value.dtype)
        result = divide(lowering, squares, left)
        if root:
            name = "tl.sqrt_rn" if value.dtype is torch.float32 else "tl.sqrt"
            result = lowering.expr(f"{name}({{0}})", result, dtype=value.dtype)
        write_kept(lowering, 0, result, dims)
        if with_mean:
            write_kept(lowering, 1, mean, dims)
        return [lowering.part]

    return lower


def lower_log_sum_exp(node: Node, scratch: int) -> list[Part]:
    """logsumexp: relative to the maximum, so that nothing overflows."""
    args = arguments(node)
    source = operand_of(args["self"])
    lowering, dims = reduction(node, source, args["dim"])
    value = lowering.load(source)
    if not value.dtype.is_floating_point:
        raise Unsupported(f"logsumexp of {value.dtype}")
    parts = [lowering.part]
    if moments.few_and_long(source.layout, dims):
        lowering.part.apart = True
        first, kept = highest_of(node, source, dims, scratch)
        parts.insert(0, first)
        highest = lowering.load(kept, KEPT)
    else:
        highest = lowering.reduce("max", value)
    total = lowering.reduce("add", exp(lowering, lowering.expr("{0} - {1}", value, highest, dtype=value.dtype)))
    text = 'tl.where(tl.abs({0}) == float("inf"), {0}, libdevice.log({1}) + {0})'
    write_kept(lowering, 0, lowering.expr(text, highest, total, dtype=value.dtype), dims)
    return parts


def lower_place(how: str) -> Lowered:
    """argmax and argmin: the first of equals, the first NaN before all others."""

    def lower(node: Node, scratch: int) -> list[Part]:
        args = arguments(node)
        source = operand_of(args["self"])
        lowering, dims = reduction(node, source, args.get("dim"))
        _, place = _extreme(lowering, source, how, args.get("dim"))
        write_kept(lowering, 0, place, dims)
        return [lowering.part]

    return lower


def lower_extreme_along(how: str) -> Lowered:
    """max.dim and min.dim: the extreme and its place."""

    def lower(node: Node, scratch: int) -> list[Part]:
        args = arguments(node)
        source = operand_of(args["self"])
        if not isinstance(args.get("dim"), int) or len(node.writes) != 2:
            raise Unsupported(f"no kernel for {node.target}")
        lowering, dims = reduction(node, source, args["dim"])
        value, place = _extreme(lowering, source, how, args["dim"])
        write_kept(lowering, 0, value, dims)
        write_kept(lowering, 1, place, dims)
        return [lowering.part]

    return lower


def _extreme(lowering: Lowering, source: Operand, how: str, dim: int | None) -> tuple[Instr, Instr]:
    """The extreme, and where it first is: along ``dim``, or in the whole tensor."""
    size = source.layout.size
    if not size or lowering.part.numel >= MOST_PLACES:
        raise Unsupported("a place among one element" if not size else "a place among 2^31 elements")
    value = lowering.load(source)
    if value.dtype is torch.bool:
        value = lowering.cast(value, torch.int32)
    best = lowering.reduce(how, value)
    index = lowering.place(forms.collapse((math.prod(size),), (1,))) if dim is None else lowering.coord(dim % len(size))
    if value.dtype in _KEYS and lowering.part.numel > KEYED * lowering.part.kept and settings.enabled("keyed_places"):
        return best, _keyed_place(lowering, value, index, how)
    found = "({0} == {1})" + (" | ({0} != {0})" if value.dtype.is_floating_point else "")
    place = lowering.expr(f"tl.where({found}, {{2}}.to(tl.int32), {MOST_PLACES - 1})", value, best, index, dtype=torch.int32)
    return best, lowering.reduce("min", place)


_BITS = "({0} + 0.0).to(tl.int32, bitcast=True)"
_KEYS = {torch.float32: f"tl.where({{0}} != {{0}}, {{1}}, {_BITS} ^ (({_BITS} >> 31) & 0x7fffffff))",
         **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), "{0}.to(tl.int32)")}
"""Integers in the order of the values, for those of 32 bits or fewer; zeros are equal. NaN is {1}: before or behind all."""


def _keyed_place(lowering: Lowering, value: Instr, index: Instr, how: str) -> Instr:
    """Where the extreme is first, from one reduction of 64 bits that hold value and place: nothing waits for the extreme, so that
    programs may share a row, and rows are walked once."""
    nan = lowering.expr("0x7fffffff" if how == "max" else "-0x80000000", dtype=torch.int32)
    order = lowering.expr(_KEYS[value.dtype], value, nan, dtype=torch.int32)
    behind = "{1}.to(tl.int64)" if how == "min" else f"({MOST_PLACES - 1} - {{1}}).to(tl.int64)"
    key = lowering.reduce(how, lowering.expr(f"({{0}}.to(tl.int64) << 31) | {behind}", order, index, dtype=torch.int64))
    last = f"({{0}} & {MOST_PLACES - 1}).to(tl.int32)"
    return lowering.expr(last if how == "min" else f"{MOST_PLACES - 1} - {last}", key, dtype=torch.int32)
