"""Lowers batch norm with its gradient. Imports torch, `ir_nodes` and codegen's leaf modules.

Sums over the channels' elements are one part (`moments.py`), what is done to each element another: where the sums are split over
programs, the second is a kernel of its own that takes in what comes before and after (a sum with a shortcut, an activation).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from codegen.behind_norms import Behind, behind
from codegen.channels import channelwise, inverse, normalised, other_dims
from codegen.expressions import Unsupported
from codegen.instructions import FULL, KEPT, Instr, Part
from codegen.lowering import Lowering, argument_names, arguments
from codegen.moments import keep, moments, written
from codegen.promotion import compute_dtype
from codegen.pulled import Known
from codegen.reductions import by_columns, divide, mean_of, operand_of, reduction, write_kept
from ir_nodes.node import Node, Operand, Target


def lower_batch_norm(node: Node, scratch: int) -> list[Part]:
    """native_batch_norm and its functional relatives: results normalised by the batch's statistics, or by the running ones."""
    args = arguments(node)
    source = operand_of(args["input"])
    if len(source.layout.size) < 2 or len(node.returns) != 3 or node.returns[0] is None:
        raise Unsupported(f"no kernel for {node.target}")
    if not args.get("training", False):
        return [_normalise(node, args, _running(args))]
    statistics, numbers = _statistics(node, args, scratch)
    return [statistics, _normalise(node, args, numbers)]


def lower_batch_norm_backward(node: Node, scratch: int, known: Known) -> list[Part]:
    """native_batch_norm_backward: two sums per channel, then the gradient of each element."""
    args = arguments(node)
    given = behind(args, known, ("save_mean", "save_invstd"))
    if len(operand_of(args["input"]).layout.size) < 2 or len(node.returns) != 3:
        raise Unsupported(f"no kernel for {node.target}")
    grad_input, grad_weight, grad_bias = node.returns
    train = args["train"]
    parts, means = [], None
    if grad_weight is not None or grad_bias is not None or train:
        sums, means = _gradient_sums(node, args, given, scratch, (grad_weight, grad_bias))
        parts.append(sums)
    if grad_input is not None:
        parts.append(_grad_input(node, args, given, grad_input, means if train else None))
    return parts


# ---- numbers per channel -------------------------------------------------------------------------------------------------


# ---- forward -------------------------------------------------------------------------------------------------------------

Numbers = tuple[Operand, Operand, bool]
"""The channels' means and variances, or reciprocals of standard deviations where the last is True."""


def _running(args: dict[str, Any]) -> Numbers:
    return operand_of(args["running_mean"]), operand_of(args["running_var"]), False


def _statistics(node: Node, args: dict[str, Any], scratch: int) -> tuple[Part, Numbers]:
    source = operand_of(args["input"])
    lowering, dims = reduction(node, source, other_dims(source.layout))
    mean, squares = moments(lowering, source, dims)
    variance = mean_of(lowering, squares)
    scale = inverse(lowering, variance, args["eps"])
    _update(lowering, args, mean, variance)
    kept = written(lowering, scratch, node.returns[1:], (mean, scale), dims)
    return lowering.part, (kept[0], kept[1], True)


def _update(lowering: Lowering, args: dict[str, Any], mean: Instr, variance: Instr) -> None:
    """Move the running statistics towards the batch's, whose variance is that of a sample."""
    node = lowering.part.node
    given = dict(zip(argument_names(node.target), node.args))
    count = math.prod(lowering.shape) // lowering.shape[1]
    for name, number in (("running_mean", mean), ("running_var", variance)):
        target = given.get(name)
        if not isinstance(target, Target):
            continue
        if name == "running_var":
            sized = (lowering.size(count, number.dtype), lowering.size(count - 1, number.dtype))
            number = lowering.expr("{0} * {1}", number, divide(lowering, *sized), dtype=number.dtype)
        momentum = lowering.read(args["momentum"], number.dtype)
        old = channelwise(lowering, args[name], number.dtype, KEPT)
        new = lowering.expr("{1} * {2} + (1.0 - {2}) * {0}", old, number, momentum, dtype=number.dtype)
        lowering.write(target.index, new, KEPT)


def _normalise(node: Node, args: dict[str, Any], numbers: Numbers) -> Part:
    source = operand_of(args["input"])
    lowering = Lowering(node, source.layout.size)
    value = lowering.load(source)
    mean, scale = (channelwise(lowering, number, value.dtype, FULL) for number in numbers[:2])
    if not numbers[2]:
        scale = inverse(lowering, scale, args["eps"])
    result = normalised(lowering, args, value, mean, scale, FULL)
    out = node.returns[0]
    assert out is not None
    lowering.write(out, result)
    return lowering.part


# ---- backward ------------------------------------------------------------------------------------------------------------


def _used(lowering: Lowering, args: dict[str, Any], dtype: torch.dtype, level: int) -> tuple[Instr, Instr]:
    """The mean and the reciprocal deviation by which the forward normalised."""
    if args["train"]:
        mean, scale = (channelwise(lowering, args[name], dtype, level) for name in ("save_mean", "save_invstd"))
        return mean, scale
    mean, variance = (channelwise(lowering, args[name], dtype, level) for name in ("running_mean", "running_var"))
    return mean, inverse(lowering, variance, args["eps"])


def _gradient_sums(node: Node, args: dict[str, Any], given: Behind, scratch: int,
                   affine: tuple[int | None, int | None]) -> tuple[Part, tuple[Operand, Operand]]:
    """The gradients of weight and bias, and what the elements' gradients need of the same sums."""
    weight, bias = affine
    source = operand_of(args["input"])
    lowering, dims = reduction(node, source, other_dims(source.layout))
    value = lowering.load(source)
    mean, scale = _used(lowering, args, value.dtype, KEPT)
    lowering.part.column |= any(by_columns(layout, dims) for layout in given.layouts())  # squares, which are better shared
    normal = partial(normalised, lowering, given.args, value, mean, scale, KEPT)
    grad = lowering.cast(given.load(lowering, given.grad.layout, normal), value.dtype)
    plain = lowering.reduce("add", grad)
    product = lowering.expr("{0} * ({1} - {2})", grad, value, mean, dtype=value.dtype)
    skewed = lowering.expr("{0} * {1}", lowering.reduce("add", product), scale, dtype=value.dtype)
    if weight is not None:
        write_kept(lowering, weight, skewed, dims)
    if bias is not None:
        write_kept(lowering, bias, plain, dims)
    slope = lowering.expr("{0} * {1}", mean_of(lowering, skewed), scale, dtype=value.dtype)
    return lowering.part, (keep(lowering, scratch, mean_of(lowering, plain)), keep(lowering, scratch + 1, slope))


def _grad_input(node: Node, args: dict[str, Any], given: Behind, index: int, means: tuple[Operand, Operand] | None) -> Part:
    source = operand_of(args["input"])
    lowering = Lowering(node, source.layout.size)
    held = compute_dtype(source.layout.dtype)
    mean, factor = _used(lowering, args, held, FULL)
    value = lowering.load(source) if means is not None else None
    if value is not None:
        grad = given.load(lowering, given.grad.layout, partial(normalised, lowering, given.args, value, mean, factor, FULL))
    else:
        grad = lowering.load(operand_of(args["grad_out"]))
    if args.get("weight") is not None:
        factor = lowering.expr("{0} * {1}", factor, channelwise(lowering, args["weight"], grad.dtype, FULL), dtype=grad.dtype)
    if means is not None:
        plain, slope = (channelwise(lowering, number, grad.dtype, FULL) for number in means)
        assert value is not None
        centred = lowering.expr("{0} - {1}", value, mean, dtype=grad.dtype)
        grad = lowering.expr("{0} - {1} - {2} * {3}", grad, plain, centred, slope, dtype=grad.dtype)
    lowering.write(index, lowering.expr("{0} * {1}", grad, factor, dtype=grad.dtype))
    return lowering.part
