"""Lowers the negative log likelihood loss and its gradient. Imports torch, `ir_nodes` and codegen's leaf modules."""

from __future__ import annotations

from typing import Any

import torch

from codegen.expressions import Unsupported
from codegen.instructions import KEPT, Instr, Part, scratch_value
from codegen.losses import MEAN, NONE
from codegen.lowering import Lowering, arguments
from codegen.onehot import ONE_HOT
from codegen.promotion import compute_dtype
from codegen.reductions import divide, operand_of, reduction, write_kept
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand


def lower_nll_forward(node: Node, scratch: int) -> list[Part]:
    """nll_loss_forward on (rows, classes), nll_loss2d_forward on images whose channels are classes: the sum of weights, losses of
    rows or pixels, their sum; or these losses, and 0 for weights.

    Weights follow from the targets alone, so whoever waits for their sum, as a mean's gradient does, need not wait for the
    losses, and may share the kernel that makes these.
    """
    args = arguments(node)
    source, target = operand_of(args["self"]), operand_of(args["target"])
    _check_batch(source)
    if args["reduction"] == NONE:
        lowering, dims = reduction(node, source, 1)
        write_kept(lowering, 0, _loss(lowering, args, source, target), dims)
        return [_no_weights(node), lowering.part]
    losses = _losses(node, args, source, target, scratch)
    return [_weights(node, args, target), *losses]


def _check_batch(source: Operand) -> None:
    if len(source.layout.size) not in (2, 4):
        raise Unsupported("nll_loss without a batch")


def _no_weights(node: Node) -> Part:
    """ATen's sum of weights where there is no sum."""
    lowering = Lowering(node, ())
    lowering.write(1, lowering.expr("0.0", dtype=compute_dtype(node.writes[1].layout.dtype)))
    return lowering.part


def _weights(node: Node, args: dict[str, Any], target: Operand) -> Part:
    """The sum of weights, node.writes[1]."""
    lowering, dims = reduction(node, target, None)
    write_kept(lowering, 1, _total_weight(lowering, args, target), dims)
    return lowering.part


def _total_weight(lowering: Lowering, args: dict[str, Any], target: Operand) -> Instr:
    held = compute_dtype(operand_of(args["self"]).layout.dtype)
    index = lowering.load(target)
    weight = lowering.expr("1.0", dtype=held)
    if args.get("weight") is not None:
        layout = operand_of(args["weight"]).layout
        rest = Layout(layout.dtype, (), (), layout.offset)
        taken = lowering.take(operand_of(args["weight"]), rest, [(index, layout.stride[0], layout.size[0])])
        weight = lowering.cast(taken, held)
    ignored = lowering.read(args["ignore_index"], index.dtype)
    return lowering.reduce("add", lowering.expr("tl.where({0} != {1}, {2}, 0.0)", index, ignored, weight, dtype=held))


def _losses(node: Node, args: dict[str, Any], source: Operand, target: Operand, scratch: int) -> list[Part]:
    """Per row or pixel, then their sum or mean, node.writes[0]."""
    lowering, _ = reduction(node, source, 1)
    loss = _loss(lowering, args, source, target)
    layout = Layout.contiguous(loss.dtype, source.layout.size[:1] + source.layout.size[2:])
    value = scratch_value(scratch, layout.nbytes, node)
    lowering.store(value, layout, loss, KEPT)
    total, dims = reduction(node, Operand(value, layout), None)
    summed = total.reduce("add", total.load(Operand(value, layout)))
    if args["reduction"] == MEAN:
        summed = divide(total, summed, _total_weight(total, args, target))
    write_kept(total, 0, summed, dims)
    total.part.later = 1
    return [lowering.part, total.part]


def _loss(lowering: Lowering, args: dict[str, Any], source: Operand, target: Operand) -> Instr:
    """A row's, or a pixel's."""
    index = lowering.load(target, KEPT)
    ignored = lowering.read(args["ignore_index"], index.dtype)
    index = lowering.check(index, source.layout.size[1], ignored)
    picked = lowering.gather(source, 1, index)
    weight: Instr = lowering.expr("1.0", dtype=picked.dtype)
    if args.get("weight") is not None:
        weight = _class_weight(lowering, operand_of(args["weight"]), index, picked.dtype)
    text = "tl.where({0} != {1}, -{2} * {3}, 0.0)"
    return lowering.expr(text, index, ignored, picked, weight, dtype=picked.dtype)


def _class_weight(lowering: Lowering, weight: Operand, index: Instr, dtype: torch.dtype) -> Instr:
    return lowering.cast(lowering.gather(_classes(weight, len(lowering.shape)), 1, index), dtype)


def _classes(weight: Operand, dims: int) -> Operand:
    """One number for each class, which all rows see, and all pixels."""
    layout, rest = weight.layout, (1,) * (dims - 2)
    size, stride = (1, *layout.size, *rest), (0, *layout.stride, *(0 for _ in rest))
    return Operand(weight.value, Layout(layout.dtype, size, stride, layout.offset))


def lower_nll_backward(node: Node, scratch: int) -> list[Part]:
    """nll_loss_backward and nll_loss2d_backward: one element of each row or pixel is not zero."""
    args = arguments(node)
    source, target = operand_of(args["self"]), operand_of(args["target"])
    _check_batch(source)
    lowering = Lowering(node, source.layout.size)
    index = _that_counts(lowering, lowering.load(_column(target)), args["ignore_index"])
    grad = args["grad_output"]
    grad = lowering.load(_column(operand_of(grad))) if args["reduction"] == NONE else lowering.read(grad)
    if args["reduction"] == MEAN:
        grad = divide(lowering, grad, lowering.read(args["total_weight"], grad.dtype))
    if args.get("weight") is not None:
        weight = lowering.read(_classes(operand_of(args["weight"]), len(lowering.shape)), grad.dtype)
        grad = lowering.expr("{0} * {1}", grad, weight, dtype=grad.dtype)
    lowering.write(0, lowering.expr(ONE_HOT, lowering.coord(1), index, grad, dtype=grad.dtype))
    return [lowering.part]


def _column(rows: Operand) -> Operand:
    """One number for each row or pixel, which all of its elements see."""
    layout = rows.layout
    size, stride = (layout.size[0], 1, *layout.size[1:]), (layout.stride[0], 0, *layout.stride[1:])
    return Operand(rows.value, Layout(layout.dtype, size, stride, layout.offset))


def _that_counts(lowering: Lowering, index: Instr, none: Any) -> Instr:
    """A row's class as an int32, -1 where it is ``none`` or too small: every element compares its own place with it, in one
    instruction."""
    counts = "({0} >= 0) & ({0} <= 2147483647) & ({0} != {1})"
    ignored = lowering.read(none, index.dtype)
    return lowering.expr(f"tl.where({counts}, {{0}}, -1).to(tl.int32)", index, ignored, dtype=torch.int32)
