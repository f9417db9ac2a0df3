"""How long a node may take, before it has ever run. Imports torch, `ir_nodes.call`, `ir_nodes.node` and `ir_nodes.ops` only.

The roofline of Williams, Waterman and Patterson (2009): the larger of arithmetic and memory traffic, each over what the machine
does at best, and a launch. Arithmetic is counted by torch's own formulas (`torch.utils.flop_counter`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch

from ir_nodes import call, ops
from ir_nodes.node import Node

_COUNTED = ("matmul", "convolution", "attention")
_SPARSE = ("gather", "scatter")


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second: floating-point operations of 32 (or more) bits and of 16, bytes of memory, bytes between
    ranks; and the seconds that a launch and the start of a collective take."""

    flops: float
    half_flops: float
    memory: float
    link: float
    launch: float
    start: float


CPU = Rates(5e10, 5e10, 1e10, 2e9, 2e-6, 5e-5)
"""A few cores, gloo."""
CUDA = Rates(5e13, 5e14, 3e12, 2e11, 3e-6, 2e-5)
"""A data-centre GPU of 2023, NVLink."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations, bytes moved, and seconds.

    ``collective``: on the link between ranks, beside the computation. ``waits``: ends when that ends, holds up only its readers.
    """

    flops: int
    nbytes: int
    seconds: float
    collective: bool = False
    waits: bool = False


def cost(node: Node, rates: Rates) -> Cost:
    """What ``node`` takes on a machine of these rates."""
    moved = traffic(node)
    if ops.info(node.target).kind == "collective":
        return Cost(0, moved, rates.start + moved / rates.link, True)
    if ops.info(node.target).kind == "wait":
        return Cost(0, 0, 0.0, waits=True)
    flops = operations(node)
    layout = node.writes[0].layout if node.writes else None
    peak = rates.half_flops if layout is not None and layout.itemsize == 2 else rates.flops
    return Cost(flops, moved, rates.launch + max(flops / peak, moved / rates.memory))


def traffic(node: Node) -> int:
    """Bytes read and written. An op that picks rows reads as many as it writes."""
    written = sum(write.layout.nbytes for write in node.writes)
    if ops.info(node.target).kind in _SPARSE:
        return 2 * written
    return written + sum(min(read.layout.nbytes, read.value.buffer.nbytes) for read in node.reads)


def operations(node: Node) -> int:
    """Floating-point operations of a matmul, convolution or attention; other ops move more than they compute: 0."""
    formula = _formula(node.target) if ops.info(node.target).kind in _COUNTED else None
    if formula is None:
        return 0
    fill = call.Fill(
        operand=lambda operand: torch.Size(operand.layout.size),
        target=lambda write: torch.Size(write.layout.size),
        scalar=lambda number: 1.0,
        device=None,
    )
    positional, keyword = call.arguments(node, fill)
    outs = [torch.Size(node.writes[index].layout.size) if index is not None else None for index in node.returns]
    outs = outs or [torch.Size(write.layout.size) for write in node.writes]
    try:
        return int(formula(*positional, out_val=outs[0] if len(outs) == 1 else outs, **keyword))
    except (AssertionError, TypeError, ValueError, IndexError):  # shapes that torch's formula was not written for
        return 2 * math.prod(outs[0] or (1,)) * max((read.layout.size[-1] for read in node.reads if read.layout.size), default=1)


def _convolution_gradients(made: Sequence[int], given: Sequence[int], weight: Sequence[int], *rest: Any, out_val: Any) -> int:
    """A forward's operations for each gradient that is asked for; torch's formula forgets that channels of one group do not meet
    those of another in the weight's."""
    *_, transposed, _, _, wanted = rest
    return sum(wanted[:2]) * 2 * math.prod(given if transposed else made) * math.prod(weight[1:])


@functools.cache
def _formula(target: str) -> Callable[..., Any] | None:
    """Torch's formula for the op; an overload, an op in place, the CPU's attention and `linear` count like the op that they stand
    for."""
    from torch.utils.flop_counter import flop_registry  # here, because it loads Triton

    space, name, _ = ops.split(target)
    if space not in ("aten", ops.OWN):
        return None
    if name == "linear":
        return lambda x, weight, *rest, **more: 2 * math.prod(x) * weight[0]
    if name in ("cudnn_convolution_relu", "cudnn_convolution_add_relu"):
        return lambda x, weight, *rest, out_val: 2 * math.prod(out_val) * math.prod(weight[1:])
    name = ops.first_of(name).replace("_for_cpu", "").replace("_backward_overrideable", "_backward")
    if name == "convolution_backward":
        return _convolution_gradients
    name = name.replace("_addmm_activation", "addmm").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    return flop_registry.get(packet) if packet is not None else None
