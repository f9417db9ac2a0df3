"""What batch norm's kernels say of channels: numbers for each, and elements normalised by these. Imports torch, `ir_nodes` and
codegen's leaf modules."""

from __future__ import annotations

from typing import Any

import torch

from codegen.instructions import KEPT, Instr
from codegen.lowering import Lowering
from codegen.reductions import operand_of
from ir_nodes.layout import Layout
from ir_nodes.node import Operand


def other_dims(layout: Layout) -> tuple[int, ...]:
    """All but the channels'."""
    return tuple(dim for dim in range(len(layout.size)) if dim != 1)


def per_element(operand: Operand, rank: int) -> Operand:
    """A number for each channel, laid along the channels of a tensor of ``rank`` dimensions."""
    layout = operand.layout
    spread = Layout(layout.dtype, (*layout.size, *(1,) * (rank - 2)), (*layout.stride, *(0,) * (rank - 2)), layout.offset)
    return Operand(operand.value, spread)


def channelwise(lowering: Lowering, operand: Any, dtype: torch.dtype, level: int) -> Instr:
    """A number of each channel, as ``dtype``, over the channels (KEPT) or over all elements."""
    found = operand_of(operand)
    return lowering.cast(lowering.load(found if level == KEPT else per_element(found, len(lowering.shape)), level), dtype)


def inverse(lowering: Lowering, variance: Instr, eps: Any) -> Instr:
    """The reciprocal of the standard deviation."""
    return lowering.expr("tl.rsqrt({0} + {1})", variance, lowering.read(eps, variance.dtype), dtype=variance.dtype)


def normalised(lowering: Lowering, args: dict[str, Any], value: Instr, mean: Instr, scale: Instr, level: int) -> Instr:
    """Elements less their channel's mean, times the reciprocal deviation, with weight and bias, which are read at ``level``."""
    result = lowering.expr("{0} - {1}", value, mean, dtype=value.dtype)
    if args.get("weight") is not None:
        result = lowering.expr("{0} * {1}", result, channelwise(lowering, args["weight"], value.dtype, level), dtype=value.dtype)
    result = lowering.expr("{0} * {1}", result, scale, dtype=value.dtype)
    if args.get("bias") is not None:
        result = lowering.expr("{0} + {1}", result, channelwise(lowering, args["bias"], value.dtype, level), dtype=value.dtype)
    return result
