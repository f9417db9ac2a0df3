"""Lowers layer norm and its gradients. Imports `ir_nodes` and codegen's leaf modules."""

from __future__ import annotations

from typing import Any

from codegen import moments
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, Unsupported, arguments
from codegen.reductions import mean_of, operand_of, reduction, rounded_once, write_kept
from ir_nodes.node import Node, Operand


def lower_layer_norm(node: Node, scratch: int) -> list[Part]:
    """native_layer_norm: mean and variance in two passes, as accurate as Welford's; of long rows in one (`moments.py`)."""
    args = arguments(node)
    source = operand_of(args["input"])
    rank = len(args["normalized_shape"])
    within = tuple(range(len(source.layout.size) - rank, len(source.layout.size)))
    if moments.is_long(source.layout, within):
        sums, mean_operand, scale_operand = moments.rows(node, source, within, args["eps"], scratch)
        return [sums, normalised_by(node, mean_operand, scale_operand)]
    lowering, dims = reduction(node, source, within)
    value = lowering.load(source)
    mean = rounded_once(lowering, lowering.reduce("add", value))
    centred = lowering.expr("{0} - {1}", value, mean, dtype=value.dtype)
    variance = mean_of(lowering, lowering.reduce("add", lowering.expr("{0} * {0}", centred, dtype=value.dtype)))
    eps = lowering.read(args["eps"], value.dtype)
    scale = lowering.expr("tl.rsqrt({0} + {1})", variance, eps, dtype=value.dtype)
    _write_scaled(lowering, args, centred, scale)
    write_kept(lowering, 1, mean, dims)
    write_kept(lowering, 2, scale, dims)
    return [lowering.part]


def _write_scaled(lowering: Lowering, args: dict[str, Any], centred: Instr, scale: Instr) -> None:
    """The norm's first result, of the input less its rows' means and the reciprocal deviations."""
    result = moments.scaled(lowering, args, centred, scale, lambda arg: lowering.read(arg, centred.dtype))
    lowering.write(0, result)


def normalised_by(node: Node, mean: Operand, scale: Operand) -> Part:
    """native_layer_norm's first result where its rows' means and reciprocal deviations are known."""
    args = arguments(node)
    source = operand_of(args["input"])
    lowering = Lowering(node, source.layout.size)
    value = lowering.load(source)
    centred = lowering.expr("{0} - {1}", value, lowering.load(mean), dtype=value.dtype)
    _write_scaled(lowering, args, centred, lowering.load(scale))
    return lowering.part


def lower_layer_norm_backward(node: Node, scratch: int) -> list[Part]:
    """native_layer_norm_backward: grad_input reduces rows, grad_weight and grad_bias reduce columns of the same inputs."""
    args = arguments(node)
    rank = len(operand_of(args["input"]).layout.size) - len(args["normalized_shape"])
    returned = list(node.returns)
    parts = []
    if returned[0] is not None:
        parts += _layer_norm_grad_input(node, args, rank, returned[0], scratch)
    if any(index is not None for index in returned[1:3]):
        parts.append(_layer_norm_grad_affine(node, args, rank, returned[1], returned[2]))
    return parts


def _normalised(lowering: Lowering, args: dict[str, Any]) -> tuple[Instr, Instr, Instr]:
    """(gradient, normalised input, reciprocal deviation)."""
    value = lowering.load(operand_of(args["input"]))
    grad = lowering.cast(lowering.load(operand_of(args["grad_out"])), value.dtype)
    mean = lowering.cast(lowering.load(operand_of(args["mean"])), value.dtype)
    scale = lowering.cast(lowering.load(operand_of(args["rstd"])), value.dtype)
    return grad, lowering.expr("({0} - {1}) * {2}", value, mean, scale, dtype=value.dtype), scale


def _layer_norm_grad_input(node: Node, args: dict[str, Any], rank: int, index: int, scratch: int) -> list[Part]:
    source = operand_of(args["input"])
    within = tuple(range(rank, len(source.layout.size)))
    lowering, dims = reduction(node, source, within)
    parts, found = [lowering.part], _weighted(lowering, args)
    grad, normal, _ = found
    plain = mean_of(lowering, lowering.reduce("add", grad))
    skewed = mean_of(lowering, lowering.reduce("add", lowering.expr("{0} * {1}", grad, normal, dtype=grad.dtype)))
    if moments.is_long(source.layout, within):
        numbers = moments.handed_on(lowering, scratch, (plain, skewed), dims)
        lowering = Lowering(node, source.layout.size)
        parts, found = [*parts, lowering.part], _weighted(lowering, args)
        plain, skewed = (lowering.load(number) for number in numbers)
    grad, normal, scale = found
    text = "({0} - {1} - {2} * {3}) * {4}"
    lowering.write(index, lowering.expr(text, grad, plain, normal, skewed, scale, dtype=grad.dtype))
    return parts


def _weighted(lowering: Lowering, args: dict[str, Any]) -> tuple[Instr, Instr, Instr]:
    """(gradient times weight, normalised input, reciprocal deviation)."""
    grad, normal, scale = _normalised(lowering, args)
    if args.get("weight") is not None:
        grad = lowering.expr("{0} * {1}", grad, lowering.read(args["weight"], grad.dtype), dtype=grad.dtype)
    return grad, normal, scale


def _layer_norm_grad_affine(node: Node, args: dict[str, Any], rank: int, weight: int | None, bias: int | None) -> Part:
    if rank == 0:
        raise Unsupported("a layer norm over every dimension, whose weight gradient reduces nothing")
    lowering, dims = reduction(node, operand_of(args["input"]), tuple(range(rank)))
    lowering.part.column = True
    if weight is not None:
        grad, normal, _ = _normalised(lowering, args)
        product = lowering.expr("{0} * {1}", grad, normal, dtype=grad.dtype)
        write_kept(lowering, weight, lowering.reduce("add", product), dims)
    if bias is not None:
        grad = lowering.load(operand_of(args["grad_out"]))
        write_kept(lowering, bias, lowering.reduce("add", grad), dims)
    return lowering.part
