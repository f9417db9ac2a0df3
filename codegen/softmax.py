"""Lowers softmax with its gradient. Imports torch, `ir_nodes` and codegen's leaf modules.

Few long rows would each be walked by one program while most of the machine is idle, as where the next word is drawn from a large
vocabulary. Their maxima and sums are parts of their own instead, which programs share; what is done to each element is another.
"""

from __future__ import annotations

from typing import Sequence

import torch

from codegen import forms, moments
from codegen.expressions import function
from codegen.inline import COPIES
from codegen.instructions import KEPT, Instr, MemAccess, Part, scratch_value
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF
from codegen.reductions import operand_of, reduction
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

ENOUGH = 64
"""Rows of a loss with its gradient that programs need not share: on an H200, 127 of 128,256 in float16 take 29 us by clusters and
38 shared, 64 take 19 and 20, 31 take 19 and 14, 4 of 50,257 12 and 10. A loss alone takes less time shared (127: 24 and 18)."""


def exp(lowering: Lowering, value: Instr, rough: bool = False) -> Instr:
    """Exponential, as accurate as the op's result can show; ``rough``: denormal results may be zero."""
    rounded = rough or _shown_in_16_bits(lowering.part.node)
    return lowering.expr(f"{function('grow' if rough else 'exp', value.dtype, rounded)}({{0}})", value, dtype=value.dtype)


def _shown_in_16_bits(node: Node) -> bool:
    """Has the result 16 bits, or has everything that is made of it, which are copies?"""
    write = node.writes[0]
    users = write.value.users
    copied = bool(users) and not write.value.buffer.live and all(
        user.name in COPIES and user.writes[0].layout.dtype in HALF for user in users)
    return write.layout.dtype in HALF or copied


def _narrow(source: Operand) -> bool:
    """True for 16-bit floats and for what they were widened to."""
    maker = source.value.producer
    widened = maker is not None and maker.name in COPIES and source.layout.dtype is torch.float32
    return any(operand.layout.dtype in HALF for operand in (source, *(maker.reads if maker is not None and widened else ())))


def lower_softmax(node: Node, scratch: int) -> list[Part]:
    """_softmax and _log_softmax."""
    args = arguments(node)
    source = operand_of(args["self"])
    lowering, dims = reduction(node, source, args["dim"])
    if _shared_by_programs(lowering, source.layout, dims):
        return _softmax_in_parts(node, source, dims, scratch)
    value = lowering.load(source)
    highest = lowering.reduce("max", value)
    shifted = lowering.expr("{0} - {1}", value, highest, dtype=value.dtype)
    # A sum of exponentials of numbers with 8 bits, of which the logarithm is taken: the fast function does.
    grown = exp(lowering, shifted, node.name == "_log_softmax" and _narrow(source))
    total = _total(lowering, grown)
    if node.name == "_log_softmax":
        _keep(lowering, scratch, (highest, total))
    lowering.write(0, _shared_out(lowering, shifted, total, grown))
    return [lowering.part]


def _total(lowering: Lowering, grown: Instr) -> Instr:
    """The row's sum of exponentials, or its logarithm, which log-softmax is less."""
    total = lowering.reduce("add", grown)
    if lowering.part.node.name == "_softmax":
        return total
    return lowering.expr("libdevice.log({0})", total, dtype=total.dtype)


def _shared_out(lowering: Lowering, shifted: Instr, total: Instr, grown: Instr) -> Instr:
    """The op's result from each element less its row's maximum, and from the row's `_total`."""
    node = lowering.part.node
    if node.name == "_softmax" and node.writes[0].layout.dtype in HALF:
        share = lowering.expr("1.0 / {0}", total, dtype=total.dtype)  # once per row; the result's rounding hides the difference
        return lowering.expr("{0} * {1}", grown, share, dtype=total.dtype)
    if node.name == "_softmax" and total.dtype is torch.float32:
        share = lowering.expr("tl.math.div_rn(1.0, {0})", total, dtype=total.dtype)
        return lowering.expr("_share({0}, {1}, {2})", grown, total, share, dtype=total.dtype)
    if node.name == "_softmax":
        return lowering.expr(f"{function('div', total.dtype, False)}({{0}}, {{1}})", grown, total, dtype=total.dtype)
    return lowering.expr("{0} - {1}", shifted, total, dtype=total.dtype)


def _shared_by_programs(lowering: Lowering, layout: Layout, dims: Sequence[int]) -> bool:
    """Do programs share rows? Not of a loss with its gradient, if a program each, or several that hold a row, are enough: they
    read it once."""
    part = lowering.part
    return moments.few_and_long(layout, dims) and not (part.kept >= ENOUGH and _in_a_loss(part.node))


def _in_a_loss(node: Node) -> bool:
    """Is it the gradient of a loss over classes, or something of which there is one?"""
    users, makers = node.writes[0].value.users, [read.value.producer for read in node.reads]
    losses = any(other is not None and other.name.startswith("nll_loss") for other in (*users, *makers))
    return losses and any(other.name == "_log_softmax_backward_data" for other in (node, *users))


def highest_of(node: Node, source: Operand, dims: Sequence[int], scratch: int) -> tuple[Part, Operand]:
    """The maximum of each row as a part that programs share, and where it is."""
    lowering, _ = reduction(node, source, tuple(dims))
    lowering.part.apart = True
    return lowering.part, moments.keep(lowering, scratch, lowering.reduce("max", lowering.load(source)))


def _softmax_in_parts(node: Node, source: Operand, dims: Sequence[int], scratch: int) -> list[Part]:
    rank, rough = len(source.layout.size), node.name == "_log_softmax" and _narrow(source)
    first, highest = highest_of(node, source, dims, scratch)
    sums, _ = reduction(node, source, tuple(dims))
    sums.part.apart = True
    value = sums.load(source)
    shifted = sums.expr("{0} - {1}", value, sums.load(highest, KEPT), dtype=value.dtype)
    total = moments.keep(sums, scratch + 1, _total(sums, exp(sums, shifted, rough)))
    last = Lowering(node, source.layout.size)
    value = last.load(source)
    most, sum_ = (last.load(moments.spread(number, dims, rank)) for number in (highest, total))
    shifted = last.expr("{0} - {1}", value, most, dtype=value.dtype)
    last.write(0, _shared_out(last, shifted, sum_, exp(last, shifted, rough)))
    return [first, sums.part, last.part]


def _keep(lowering: Lowering, scratch: int, numbers: tuple[Instr, ...]) -> None:
    """Leave numbers per row for `codegen.inline`; nothing is stored where nobody reads them."""
    layout = Layout.contiguous(numbers[0].dtype, (lowering.part.kept,))
    for index, number in enumerate(numbers):
        value = scratch_value(scratch + index, layout.nbytes, lowering.part.node)
        access = MemAccess(value, forms.collapse(layout.size, layout.stride), layout.dtype, 0, KEPT, 0, layout.nbytes)
        lowering.add(Instr("store", number.dtype, KEPT, (number,), access=access))


def lower_softmax_backward(node: Node, scratch: int) -> list[Part]:
    """_softmax_backward_data and _log_softmax_backward_data."""
    args = arguments(node)
    grad_operand, output_operand = operand_of(args["grad_output"]), operand_of(args["output"])
    lowering, dims = reduction(node, grad_operand, args["dim"])
    grad, output = lowering.load(grad_operand), lowering.load(output_operand)
    plain = node.name == "_log_softmax_backward_data"
    total = lowering.reduce("add", grad if plain else lowering.expr("{0} * {1}", grad, output, dtype=grad.dtype))
    parts = [lowering.part]
    if _shared_by_programs(lowering, grad_operand.layout, dims):
        (number,) = moments.handed_on(lowering, scratch, (total,), dims)
        lowering = Lowering(node, grad_operand.layout.size)
        parts.append(lowering.part)
        grad, output, total = lowering.load(grad_operand), lowering.load(output_operand), lowering.load(number)
    if not plain:
        result = lowering.expr("({0} - {2}) * {1}", grad, output, total, dtype=grad.dtype)
    else:
        # Probabilities that only denormal numbers can tell from zero are zero, where the result has 16 bits.
        probability = exp(lowering, output, _shown_in_16_bits(node))
        result = lowering.expr("{0} - {1} * {2}", grad, probability, total, dtype=grad.dtype)
    lowering.write(0, result)
    return parts
