"""Lowers group norm with its gradient. Imports torch, `ir_nodes` and codegen's leaf modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from codegen import moments
from codegen.behind_norms import Behind, behind, widened
from codegen.expressions import Unsupported
from codegen.grouped_channels import (
    WITHIN,
    along,
    beside,
    by_channels,
    factors,
    gradient_by_channels,
    grouped,
    layout_of,
    per_channel,
    write_grouped,
)
from codegen.instructions import KEPT, Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.pulled import Known
from codegen.reductions import mean_of, operand_of, reduction, spread_of, write_kept
from ir_nodes.node import Node, Operand


def lower_group_norm(node: Node, scratch: int, known: Known) -> list[Part]:
    """native_group_norm: each group of channels of each sample on its own."""
    args = arguments(node)
    source = grouped(widened(operand_of(args["input"]), known), args["group"])
    if beside(source.layout):
        return [*by_channels(node, source, scratch, known)]
    if moments.is_long(source.layout, WITHIN):
        sums, *numbers = moments.rows(node, source, WITHIN, args["eps"], scratch)
        lowering = Lowering(node, source.layout.size)
        value = lowering.load(source)
        mean, scale = (lowering.cast(lowering.load(number), value.dtype) for number in numbers)
        _write_scaled(lowering, args, lowering.expr("{0} - {1}", value, mean, dtype=value.dtype), scale)
        return [sums, lowering.part]
    lowering, dims = reduction(node, source, WITHIN)
    mean, centred, squares = spread_of(lowering, lowering.load(source))
    eps = lowering.read(args["eps"], mean.dtype)
    scale = lowering.expr("tl.rsqrt({0} + {1})", mean_of(lowering, squares), eps, dtype=mean.dtype)
    _write_scaled(lowering, args, centred, scale)
    write_kept(lowering, 1, mean, dims)
    write_kept(lowering, 2, scale, dims)
    return [lowering.part]


def _write_scaled(lowering: Lowering, args: dict[str, Any], centred: Instr, scale: Instr) -> None:
    """The norm's first result, of the input less its groups' means and the reciprocal deviations."""
    result = moments.scaled(lowering, args, centred, scale, lambda arg: per_channel(lowering, arg, centred.dtype))
    write_grouped(lowering, 0, result, args["group"])


def lower_group_norm_backward(node: Node, scratch: int, known: Known) -> list[Part]:
    """native_group_norm_backward: two sums over the places of each sample's channels, from them the gradients of weight and bias,
    which add up samples, and two numbers of each group, by which the gradient of each element is made."""
    args = arguments(node)
    grad_input, *affine = node.returns
    if len(affine) != 2:
        raise Unsupported(f"no kernel for {node.target}")
    source = grouped(widened(operand_of(args["input"]), known), args["group"])
    given = behind(args, known, ("mean", "rstd"))
    sums, plain, skewed = _channel_sums(node, args, source, given, scratch)
    parts = [sums]
    for place, operand in zip(affine, (skewed, plain)):
        if place is not None:
            parts.append(_over_samples(node, place, operand))
    if grad_input is not None:
        parts += _grad_input(node, args, grad_input, source, given, (plain, skewed), scratch + 2)
    return parts


def _normalised(lowering: Lowering, args: dict[str, Any], source: Operand, given: Behind) -> tuple[Instr, Instr, Instr]:
    """(gradient, normalised input, reciprocal deviation)."""
    value = lowering.load(source)
    mean, scale = (lowering.cast(lowering.load(moments.spread(operand_of(args[name]), WITHIN, 4)), value.dtype)
                   for name in ("mean", "rstd"))
    centred = lowering.expr("{0} - {1}", value, mean, dtype=value.dtype)

    def normal() -> Instr:
        if beside(source.layout):
            return along(lowering, value, *factors(lowering, given.args, mean, scale))
        return moments.scaled(lowering, given.args, centred, scale, lambda arg: per_channel(lowering, arg, value.dtype))

    grad = lowering.cast(given.load(lowering, layout_of(given.grad.layout, args["group"]), normal), value.dtype)
    return grad, lowering.expr("{0} * {1}", centred, scale, dtype=value.dtype), scale


def _channel_sums(node: Node, args: dict[str, Any], source: Operand, given: Behind,
                  scratch: int) -> tuple[Part, Operand, Operand]:
    """For each channel of each sample the sum of the gradient, and of its product with the normalised input."""
    lowering, _ = reduction(node, source, (3,))
    grad, normal, _ = _normalised(lowering, args, source, given)
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


def _grad_input(node: Node, args: dict[str, Any], place: int, source: Operand, given: Behind, sums: tuple[Operand, Operand],
                scratch: int) -> list[Part]:
    lowering, _ = reduction(node, sums[0], (2,))
    parts, numbers = [lowering.part], []
    count = lowering.size(source.layout.size[2] * source.layout.size[3], torch.float32)
    for index, operand in enumerate(sums):
        value = lowering.load(operand)
        if args.get("weight") is not None:
            value = lowering.expr("{0} * {1}", value, per_channel(lowering, args["weight"], value.dtype), dtype=value.dtype)
        share = lowering.expr("{0} / {1}", lowering.reduce("add", value), lowering.cast(count, value.dtype), dtype=value.dtype)
        numbers.append(moments.spread(moments.keep(lowering, scratch + index, share), WITHIN, 4))
    if beside(source.layout):
        return [*parts, *gradient_by_channels(node, place, source, given, numbers, scratch + 2)]
    lowering = Lowering(node, source.layout.size)
    grad, normal, scale = _normalised(lowering, args, source, given)
    if args.get("weight") is not None:
        grad = lowering.expr("{0} * {1}", grad, per_channel(lowering, args["weight"], grad.dtype), dtype=grad.dtype)
    plain, skewed = (lowering.load(number) for number in numbers)
    result = lowering.expr("({0} - {1} - {2} * {3}) * {4}", grad, plain, normal, skewed, scale, dtype=grad.dtype)
    write_grouped(lowering, place, result, args["group"])
    return [*parts, lowering.part]
