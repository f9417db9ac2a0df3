"""Lowers scans: running sums, products, extremes and log-sum-exps. Imports torch, `ir_nodes` and codegen's leaf modules.

A scan's result has as many elements as its input, so it stays in registers between elementwise producers and readers; what makes
it like a reduction is that a program has to see whole rows, in order. 16-bit floats accumulate in float32, as ATen's CPU kernels
do (its CUDA kernels round after every step), integers in int64.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.pulled import Known
from codegen.reductions import Lowered, accumulator, operand_of, reduction
from codegen.statistics import MOST_PLACES
from ir_nodes import settings
from ir_nodes.node import Node, Operand

FEW_ROWS, LONG_ROW = 16, 1 << 15
"""Fewer rows than that, and longer ones, are left to ATen, which scans a vector with the whole machine."""

CUMULATIVE = {
    **dict.fromkeys(("cumsum", "cumsum_"), "add"),
    **dict.fromkeys(("cumprod", "cumprod_"), "mul"),
    **dict.fromkeys(("logcumsumexp", "_logcumsumexp"), "logaddexp"),
}
"""Ops with one result to what they combine with."""


def scanned(node: Node, source: Operand, dim: int) -> tuple[Lowering, bool]:
    """A lowering over ``source``'s shape with rows along ``dim``, and whether these have more than one element."""
    if not settings.enabled("scans"):
        raise Unsupported("scans is switched off")
    size = source.layout.size
    extent = size[dim] if size else 1
    if extent == 1:
        return Lowering(node, size), False
    lowering, _ = reduction(node, source, dim)
    if lowering.part.kept < FEW_ROWS and extent > LONG_ROW:
        raise Unsupported("few long rows, which ATen scans with all of the machine")
    return lowering, True


def scan(lowering: Lowering, how: str, value: Instr, backwards: bool = False) -> Instr:
    """What ``how`` makes of each element's row up to that element, or from it on."""
    return lowering.scan(how, value, backwards) if lowering.part.reduced is not None else value


def lower_cumulative(node: Node, scratch: int) -> list[Part]:
    """cumsum, cumprod and logcumsumexp."""
    args = arguments(node)
    return [_cumulative(node, node, operand_of(args["self"]), args["dim"])]


def _cumulative(node: Node, op: Node, source: Operand, dim: int, backwards: bool = False) -> Part:
    """What ``op`` makes of ``source``, written as ``node`` writes. Sums and products are computed in the result's dtype, to
    which the input is converted first."""
    out = op.writes[0].layout.dtype
    if len(op.writes) != 1 or out is torch.bool:
        raise Unsupported(f"no kernel for {op.target}" + " of bool" * (out is torch.bool))
    lowering, _ = scanned(node, source, dim)
    value = lowering.cast(lowering.cast(lowering.load(source), out), accumulator(out))
    how = CUMULATIVE[op.name]
    if how == "logaddexp" and not out.is_floating_point:
        raise Unsupported(f"logcumsumexp of {out}")
    lowering.write(0, scan(lowering, how, value, backwards))
    return lowering.part


def lower_flip(node: Node, known: Known) -> list[Part]:
    """flip. Behind a scan that itself follows a flip, as in the gradients of scans, the three are one scan backwards."""
    args = arguments(node)
    source = operand_of(args["self"])
    size = source.layout.size
    dims = sorted(dict.fromkeys(dim % len(size) for dim in args["dims"]))
    op = source.value.producer
    first = _reversed_of(source, op, dims, known) if op is not None and op.name in CUMULATIVE else None
    if op is not None and first is not None:
        return [_cumulative(node, op, first, dims[0], backwards=True)]
    lowering = Lowering(node, size)
    rest = replace(source.layout, stride=tuple(0 if dim in dims else stride for dim, stride in enumerate(source.layout.stride)))
    places = [_from_the_end(lowering, dim) for dim in dims]
    indices = [(place, source.layout.stride[dim], size[dim]) for place, dim in zip(places, dims)]
    lowering.write(0, lowering.take(source, rest, indices) if dims else lowering.load(source))
    return [lowering.part]


def _from_the_end(lowering: Lowering, dim: int) -> Instr:
    last = lowering.size(lowering.shape[dim] - 1, torch.int32)
    return lowering.expr("({1} - {0})", lowering.coord(dim), last, dtype=torch.int32)


def _reversed_of(scan_result: Operand, op: Node, dims: list[int], known: Known) -> Operand | None:
    """What a flip turned round for the scan ``op`` along the one dimension of ``dims``, if nobody else reads the scan's result
    and what was turned is still there."""
    args = arguments(op)
    middle = args["self"]
    flip = middle.value.producer if isinstance(middle, Operand) else None
    if flip is None or flip.name != "flip" or len(scan_result.value.users) != 1 or scan_result.value.buffer.live:
        return None
    if flip.writes[0].layout != middle.layout or op.writes[0].layout != scan_result.layout:
        return None
    turned = arguments(flip)
    source, rank = operand_of(turned["self"]), len(middle.layout.size)
    same = [dim % rank for dim in turned["dims"]] == [args["dim"] % rank] == dims
    newest = known.newest.get(source.value.buffer, source.value)
    return source if same and newest is source.value else None


def lower_extreme_so_far(how: str) -> Lowered:
    """cummax and cummin: the extreme up to each element, and where it is: the last of equals, the last NaN before all others."""

    def lower(node: Node, scratch: int) -> list[Part]:
        args = arguments(node)
        source = operand_of(args["self"])
        if len(node.writes) != 2:
            raise Unsupported(f"no kernel for {node.target}")
        if source.layout.numel >= MOST_PLACES:
            raise Unsupported("a place among 2^31 elements")
        lowering, long = scanned(node, source, args["dim"])
        value = lowering.load(source)
        if value.dtype is torch.bool:
            value = lowering.cast(value, torch.int32)
        best = scan(lowering, how, value)
        lowering.write(0, best)
        lowering.write(1, _last_place(lowering, value, best, args["dim"]) if long else lowering.read(0, torch.int64))
        return [lowering.part]

    return lower


def _last_place(lowering: Lowering, value: Instr, best: Instr, dim: int) -> Instr:
    """The index of the last element so far that was the extreme when it came: none after it equals what is best now."""
    index = lowering.coord(dim % len(lowering.shape))
    found = "({0} == {1})" + (" | ({0} != {0})" if value.dtype.is_floating_point else "")
    place = lowering.expr(f"tl.where({found}, {{2}}.to(tl.int32), -1)", value, best, index, dtype=torch.int32)
    return scan(lowering, "max", place)


SCANS: dict[str, Lowered] = {
    **dict.fromkeys(CUMULATIVE, lower_cumulative),
    **dict.fromkeys(("cummax", "_cummax_helper"), lower_extreme_so_far("max")),
    **dict.fromkeys(("cummin", "_cummin_helper"), lower_extreme_so_far("min")),
}
"""Keyed by `ir_nodes.node.Node.name`."""
