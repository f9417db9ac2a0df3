"""Lowers variances, log-sum-exp, places of extremes and group norm. Imports torch, `ir_nodes` and codegen's leaf modules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from codegen import forms
from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.normalisation import exp
from codegen.promotion import compute_dtype
from codegen.reductions import Lowered, divide, mean_of, operand_of, reduction, rounded_once, write_kept
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

MOST_PLACES = 1 << 31


def _spread(lowering: Lowering, value: Instr) -> tuple[Instr, Instr, Instr]:
    """(mean, difference from it, sum of squared differences), in two passes over what is held in registers."""
    mean = rounded_once(lowering, lowering.reduce("add", value))
    centred = lowering.expr("{0} - {1}", value, mean, dtype=value.dtype)
    return mean, centred, lowering.reduce("add", lowering.expr("{0} * {0}", centred, dtype=value.dtype))


def lower_variance(root: bool, with_mean: bool) -> Lowered:
    """var, std, var_mean and std_mean."""

    def lower(node: Node, scratch: int) -> list[Part]:
        args = arguments(node)
        if "correction" not in args or len(node.writes) != 1 + with_mean:
            raise Unsupported(f"no kernel for {node.target}")
        lowering, dims = reduction(node, operand_of(args["self"]), args.get("dim"))
        value = lowering.load(operand_of(args["self"]))
        if not value.dtype.is_floating_point:
            raise Unsupported(f"variance of {value.dtype}")
        mean, _, squares = _spread(lowering, value)
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
    lowering, dims = reduction(node, operand_of(args["self"]), args["dim"])
    value = lowering.load(operand_of(args["self"]))
    if not value.dtype.is_floating_point:
        raise Unsupported(f"logsumexp of {value.dtype}")
    highest = lowering.reduce("max", value)
    total = lowering.reduce("add", exp(lowering, lowering.expr("{0} - {1}", value, highest, dtype=value.dtype)))
    text = 'tl.where(tl.abs({0}) == float("inf"), {0}, libdevice.log({1}) + {0})'
    write_kept(lowering, 0, lowering.expr(text, highest, total, dtype=value.dtype), dims)
    return [lowering.part]


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
    found = "({0} == {1})" + (" | ({0} != {0})" if value.dtype.is_floating_point else "")
    place = lowering.expr(f"tl.where({found}, {{2}}.to(tl.int32), {MOST_PLACES - 1})", value, best, index, dtype=torch.int32)
    return best, lowering.reduce("min", place)


def lower_group_norm(node: Node, scratch: int) -> list[Part]:
    """native_group_norm: each group of channels of each sample on its own."""
    args = arguments(node)
    source, groups = operand_of(args["input"]), args["group"]
    grouped = _grouped(source.layout, groups)
    out = _grouped(node.writes[0].layout, groups)
    lowering, dims = reduction(node, Operand(source.value, grouped), (2, 3))
    value = lowering.load(Operand(source.value, grouped))
    mean, centred, squares = _spread(lowering, value)
    eps = lowering.read(args["eps"], value.dtype)
    scale = lowering.expr("tl.rsqrt({0} + {1})", mean_of(lowering, squares), eps, dtype=value.dtype)
    result = lowering.expr("{0} * {1}", centred, scale, dtype=value.dtype)
    for name, text in (("weight", "{0} * {1}"), ("bias", "{0} + {1}")):
        if args.get(name) is not None:
            result = lowering.expr(text, result, _per_channel(lowering, args[name], grouped, value.dtype), dtype=value.dtype)
    lowering.store(node.writes[0].value, out, result)
    write_kept(lowering, 1, mean, dims)
    write_kept(lowering, 2, scale, dims)
    return [lowering.part]


def _grouped(layout: Layout, groups: int) -> Layout:
    """A batch of channels seen as (samples, groups, channels of a group, places)."""
    samples, channels, *places = layout.size
    flat = forms.collapse(tuple(places), layout.stride[2:])
    if len(flat) > 1:
        raise Unsupported("places that do not merge")
    extent, step = flat[0] if flat else (1, 0)
    first, along = layout.stride[:2]
    size = (samples, groups, channels // groups, extent)
    return replace(layout, size=size, stride=(first, along * (channels // groups), along, step))


def _per_channel(lowering: Lowering, arg: Any, grouped: Layout, dtype: torch.dtype) -> Instr:
    operand = operand_of(arg)
    step = operand.layout.stride[0]
    layout = replace(operand.layout, size=(1, *grouped.size[1:3], 1), stride=(0, step * grouped.size[2], step, 0))
    return lowering.cast(lowering.load(Operand(operand.value, layout)), compute_dtype(dtype))
