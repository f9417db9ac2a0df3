"""Lowers group norm with its gradient. Imports torch, `ir_nodes` and codegen's leaf modules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Iterator, Sequence

import torch

from codegen import forms, moments
from codegen.expressions import Unsupported
from codegen.instructions import KEPT, Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import compute_dtype
from codegen.reductions import by_columns, mean_of, operand_of, reduction, spread_of, write_kept
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

MANY = 1 << 21
"""Elements from which on several kernels take less time than one whose operands lie in pieces."""

WITHIN = (2, 3)
"""A group's dimensions among (samples, groups, channels of a group, places)."""


def lower_group_norm(node: Node, scratch: int) -> list[Part]:
    """native_group_norm: each group of channels of each sample on its own."""
    args = arguments(node)
    source = _grouped(args["input"], args["group"])
    if _channels_last(source.layout):
        return [*_by_channels(node, args, source, scratch)]
    if moments.is_long(source.layout, WITHIN):
        sums, *numbers = moments.rows(node, source, WITHIN, args["eps"], scratch)
        return [sums, _apart(node, args, source, numbers)]
    lowering, dims = reduction(node, source, WITHIN)
    mean, centred, squares = spread_of(lowering, lowering.load(source))
    eps = lowering.read(args["eps"], mean.dtype)
    scale = lowering.expr("tl.rsqrt({0} + {1})", mean_of(lowering, squares), eps, dtype=mean.dtype)
    _write_scaled(lowering, args, centred, scale)
    write_kept(lowering, 1, mean, dims)
    write_kept(lowering, 2, scale, dims)
    return [lowering.part]


def _channels_last(layout: Layout) -> bool:
    """Do so many pixels have the channels of several groups side by side that sums for each channel, which read whole rows of
    them, are better than a group's rows, which lie in pieces? On an H200, 15 norms of ResNet-50 behind sums took 8.8 ms in
    pieces, whose bytes take 1.6."""
    several = layout.size[1] > 1 and math.prod(layout.size) >= MANY
    return several and by_columns(layout, (3,)) and settings.enabled("long_norms")


def _by_channels(node: Node, args: dict[str, Any], source: Operand, scratch: int) -> Iterator[Part]:
    """Each channel's mean and its elements' squared differences from that; those of each group, to which the former add what
    channels' means differ by (Chan, Golub, LeVeque, see `codegen.moments`); what is done to each element."""
    lowering, dims = reduction(node, source, (3,))
    lowering.part.apart = True
    means, within = (moments.keep(lowering, scratch + index, number)
                     for index, number in enumerate(moments.moments(lowering, source, dims)))
    yield lowering.part
    lowering, dims = reduction(node, means, (2,))
    mean, _, between = spread_of(lowering, lowering.load(means))
    total = lowering.reduce("add", lowering.load(within))
    places, channels = (lowering.size(source.layout.size[dim], mean.dtype) for dim in (3, 2))
    variance = lowering.expr("({0} + {1} * {2}) / ({2} * {3})", total, between, places, channels, dtype=mean.dtype)
    scale = lowering.expr("tl.rsqrt({0} + {1})", variance, lowering.read(args["eps"], mean.dtype), dtype=mean.dtype)
    numbers = moments.written(lowering, scratch + 2, (1, 2), (mean, scale), dims)
    yield lowering.part
    yield _apart(node, args, source, [moments.spread(number, WITHIN, 4) for number in numbers])


def _apart(node: Node, args: dict[str, Any], source: Operand, numbers: Sequence[Operand]) -> Part:
    """The norm's first result, from the ``numbers`` of each group: means and reciprocal deviations."""
    lowering = Lowering(node, source.layout.size)
    value = lowering.load(source)
    mean, scale = (lowering.cast(lowering.load(number), value.dtype) for number in numbers)
    _write_scaled(lowering, args, lowering.expr("{0} - {1}", value, mean, dtype=value.dtype), scale)
    return lowering.part


def _write_scaled(lowering: Lowering, args: dict[str, Any], centred: Instr, scale: Instr) -> None:
    """The norm's first result, of the input less its groups' means and the reciprocal deviations."""
    result = moments.scaled(lowering, args, centred, scale, lambda arg: _per_channel(lowering, arg, centred.dtype))
    _write(lowering, 0, result, args["group"])


def lower_group_norm_backward(node: Node, scratch: int) -> list[Part]:
    """native_group_norm_backward: two sums over the places of each sample's channels, from them the gradients of weight and bias,
    which add up samples, and two numbers of each group, by which the gradient of each element is made."""
    args = arguments(node)
    grad_input, *affine = node.returns
    if len(affine) != 2:
        raise Unsupported(f"no kernel for {node.target}")
    sums, plain, skewed = _channel_sums(node, args, scratch)
    parts = [sums]
    for place, operand in zip(affine, (skewed, plain)):
        if place is not None:
            parts.append(_over_samples(node, place, operand))
    if grad_input is not None:
        parts += _grad_input(node, args, grad_input, (plain, skewed), scratch + 2)
    return parts


def _normalised(lowering: Lowering, args: dict[str, Any]) -> tuple[Instr, Instr, Instr]:
    """(gradient, normalised input, reciprocal deviation)."""
    value = lowering.load(_grouped(args["input"], args["group"]))
    grad = lowering.cast(lowering.load(_grouped(args["grad_out"], args["group"])), value.dtype)
    mean, scale = (lowering.cast(lowering.load(moments.spread(operand_of(args[name]), WITHIN, 4)), value.dtype)
                   for name in ("mean", "rstd"))
    return grad, lowering.expr("({0} - {1}) * {2}", value, mean, scale, dtype=value.dtype), scale


def _channel_sums(node: Node, args: dict[str, Any], scratch: int) -> tuple[Part, Operand, Operand]:
    """For each channel of each sample the sum of the gradient, and of its product with the normalised input."""
    lowering, _ = reduction(node, _grouped(args["input"], args["group"]), (3,))
    grad, normal, _ = _normalised(lowering, args)
    plain = lowering.reduce("add", grad)
    skewed = lowering.reduce("add", lowering.expr("{0} * {1}", grad, normal, dtype=grad.dtype))
    return lowering.part, moments.keep(lowering, scratch, plain), moments.keep(lowering, scratch + 1, skewed)


def _over_samples(node: Node, place: int, sums: Operand) -> Part:
    """The gradient of weight or bias: one of the sums, over samples."""
    lowering, _ = reduction(node, sums, (0,))
    write = node.writes[place]
    _, groups, channels = sums.layout.size
    step = write.layout.stride[0]
    layout = replace(write.layout, size=(groups, channels), stride=(channels * step, step))
    lowering.store(write.value, layout, lowering.reduce("add", lowering.load(sums)), KEPT)
    return lowering.part


def _grad_input(node: Node, args: dict[str, Any], place: int, sums: tuple[Operand, Operand], scratch: int) -> list[Part]:
    source = _grouped(args["input"], args["group"])
    lowering, _ = reduction(node, sums[0], (2,))
    parts, numbers = [lowering.part], []
    count = lowering.size(source.layout.size[2] * source.layout.size[3], torch.float32)
    for index, operand in enumerate(sums):
        value = lowering.load(operand)
        if args.get("weight") is not None:
            value = lowering.expr("{0} * {1}", value, _per_channel(lowering, args["weight"], value.dtype), dtype=value.dtype)
        share = lowering.expr("{0} / {1}", lowering.reduce("add", value), lowering.cast(count, value.dtype), dtype=value.dtype)
        numbers.append(moments.spread(moments.keep(lowering, scratch + index, share), WITHIN, 4))
    lowering = Lowering(node, source.layout.size)
    grad, normal, scale = _normalised(lowering, args)
    if args.get("weight") is not None:
        grad = lowering.expr("{0} * {1}", grad, _per_channel(lowering, args["weight"], grad.dtype), dtype=grad.dtype)
    plain, skewed = (lowering.load(number) for number in numbers)
    result = lowering.expr("({0} - {1} - {2} * {3}) * {4}", grad, plain, normal, skewed, scale, dtype=grad.dtype)
    _write(lowering, place, result, args["group"])
    return [*parts, lowering.part]


def _write(lowering: Lowering, place: int, result: Instr, groups: int) -> None:
    write = lowering.part.node.writes[place]
    lowering.store(write.value, _layout(write.layout, groups), result)


def _grouped(arg: Any, groups: int) -> Operand:
    operand = operand_of(arg)
    return Operand(operand.value, _layout(operand.layout, groups))


def _layout(layout: Layout, groups: int) -> Layout:
    """A batch of channels seen as (samples, groups, channels of a group, places)."""
    samples, channels, *places = layout.size
    flat = forms.collapse(tuple(places), layout.stride[2:])
    if len(flat) > 1:
        raise Unsupported("places that do not merge")
    extent, step = flat[0] if flat else (1, 0)
    first, along = layout.stride[:2]
    size = (samples, groups, channels // groups, extent)
    return replace(layout, size=size, stride=(first, along * (channels // groups), along, step))


def _per_channel(lowering: Lowering, arg: Any, dtype: torch.dtype) -> Instr:
    """A number of each channel over (samples, groups, channels of a group) and, where they are there, places."""
    operand = operand_of(arg)
    _, groups, channels, *places = lowering.shape
    step = operand.layout.stride[0]
    layout = replace(operand.layout, size=(1, groups, channels, *(1 for _ in places)),
                     stride=(0, step * channels, step, *(0 for _ in places)))
    return lowering.cast(lowering.load(Operand(operand.value, layout)), compute_dtype(dtype))
