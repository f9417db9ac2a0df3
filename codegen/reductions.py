"""Lowers plain reductions; holds what every reducing op needs. Imports torch, `ir_nodes` and codegen's leaf modules.

Each op becomes the primitives of `Lowering`: elementwise steps and sums, maxima or minima over the reduced dimensions. Sums
of floats accumulate in float32 (float64 for float64), of integers in int64, as ATen's CUDA kernels do.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

import torch

from codegen import forms
from codegen.expressions import Unsupported, function
from codegen.instructions import KEPT, Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import compute_dtype
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand, ScalarInput

Lowered = Callable[[Node, int], list[Part]]
"""From a node and the number of scratch values made so far to the node's parts."""


def reduction(node: Node, source: Operand, dims: Sequence[int] | int | None) -> tuple[Lowering, tuple[int, ...]]:
    """A lowering over ``source``'s shape that reduces ``dims`` (None or empty: all), and those dims."""
    size = source.layout.size
    chosen = dims_of(size, dims)
    kept = tuple(extent for dim, extent in enumerate(size) if dim not in chosen)
    lowering = Lowering(node, size, forms.intervals(size, chosen), kept)
    lowering.part.column = by_columns(source.layout, chosen)
    return lowering, chosen


def dims_of(size: Sequence[int], dims: Sequence[int] | int | None) -> tuple[int, ...]:
    """The dimensions that an op's argument ``dims`` means, in ascending order."""
    chosen = tuple(range(len(size))) if dims is None or dims == () else (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(sorted(dim % len(size) for dim in chosen)) if size else ()


def by_columns(layout: Layout, dims: Sequence[int]) -> bool:
    """Do neighbours in memory differ in another dimension than ``dims``, which are reduced?"""
    steps = [(stride, dim) for dim, (extent, stride) in enumerate(zip(layout.size, layout.stride)) if extent > 1 and stride > 0]
    return bool(steps) and min(steps)[1] not in dims


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What a sum over ``dtype`` elements is accumulated in."""
    return compute_dtype(dtype) if dtype.is_floating_point else torch.int64


def kept_layout(layout: Layout, dims: Sequence[int]) -> Layout:
    """``layout`` with the reduced dimensions taken out, where they are still there with size 1."""
    size = tuple(n for d, n in enumerate(layout.size) if d not in dims)
    stride = tuple(s for d, s in enumerate(layout.stride) if d not in dims)
    return Layout(layout.dtype, size, stride, layout.offset)


def write_kept(lowering: Lowering, index: int, value: Instr, dims: Sequence[int]) -> None:
    """Write one result per kept element, whether or not the op keeps the reduced dimensions."""
    write = lowering.part.node.writes[index]
    layout = write.layout
    if len(layout.size) == len(lowering.shape) and dims:
        layout = kept_layout(layout, dims)
    if layout.size != lowering.kept_shape:
        raise Unsupported(f"a result of shape {list(write.layout.size)} reduced from {list(lowering.shape)}")
    lowering.store(write.value, layout, value, KEPT)


def operand_of(arg: Any) -> Operand:
    if not isinstance(arg, Operand):
        raise Unsupported(f"argument {arg!r}")
    return arg


def _single(node: Node) -> tuple[dict[str, Any], Operand]:
    args = arguments(node)
    if len(node.writes) != 1:
        raise Unsupported(f"no kernel for {node.target}")
    return args, operand_of(args["self"])


def lower_total(how: str, nans: bool = True) -> Lowered:
    """Sums ("add") or products ("mul"); without ``nans`` what is not a number counts as zero."""

    def lower(node: Node, scratch: int) -> list[Part]:
        args, source = _single(node)
        lowering, dims = reduction(node, source, args.get("dim"))
        out = node.writes[0].layout.dtype
        value = lowering.load(source)
        if out.is_floating_point and not value.dtype.is_floating_point:
            value = lowering.cast(value, out)
        held = accumulator(out if out.is_floating_point else value.dtype)
        if how == "add" and value.dtype is torch.bool and forms.reduced_extent(lowering.part.reduced or ()) < 1 << 31:
            held = torch.int32  # a count
        value = lowering.cast(value, held)
        if not nans and held.is_floating_point:
            value = lowering.expr("tl.where({0} == {0}, {0}, 0.0)", value, dtype=held)
        write_kept(lowering, 0, lowering.reduce(how, value), dims)
        return [lowering.part]

    return lower


def lower_mean(node: Node, scratch: int) -> list[Part]:
    args, source = _single(node)
    lowering, dims = reduction(node, source, args.get("dim"))
    held = compute_dtype(node.writes[0].layout.dtype)
    total = lowering.reduce("add", lowering.cast(lowering.load(source), held))
    write_kept(lowering, 0, mean_of(lowering, total), dims)
    return [lowering.part]


def mean_of(lowering: Lowering, total: Instr) -> Instr:
    """The sum times one over how many there are, a number that all results share, as ATen's CUDA kernels compute it."""
    count = lowering.size(forms.reduced_extent(lowering.part.reduced or ()), total.dtype)
    text = "tl.math.div_rn(1.0, {0})" if total.dtype is torch.float32 else "1.0 / {0}"
    return lowering.expr("{0} * {1}", total, lowering.expr(text, count, dtype=total.dtype), dtype=total.dtype)


def rounded_once(lowering: Lowering, total: Instr) -> Instr:
    """The sum over how many there are: the mean of equal numbers is that number more often than `mean_of` finds, which matters
    where it is taken off them and the rest is scaled up."""
    return divide(lowering, total, lowering.size(forms.reduced_extent(lowering.part.reduced or ()), total.dtype))


def spread_of(lowering: Lowering, value: Instr) -> tuple[Instr, Instr, Instr]:
    """(mean, difference from it, sum of squared differences), in two passes over what is held in registers."""
    mean = rounded_once(lowering, lowering.reduce("add", value))
    centred = lowering.expr("{0} - {1}", value, mean, dtype=value.dtype)
    return mean, centred, lowering.reduce("add", lowering.expr("{0} * {0}", centred, dtype=value.dtype))


def divide(lowering: Lowering, left: Instr, right: Instr) -> Instr:
    """IEEE division in the operands' dtype."""
    name = "tl.math.div_rn" if left.dtype is torch.float32 else "tl.fdiv"
    return lowering.expr(f"{name}({{0}}, {{1}})", left, right, dtype=left.dtype)


def lower_extreme(how: str) -> Lowered:
    def lower(node: Node, scratch: int) -> list[Part]:
        args, source = _single(node)
        lowering, dims = reduction(node, source, args.get("dim"))
        value = lowering.load(source)
        held = torch.int32 if value.dtype is torch.bool else value.dtype
        write_kept(lowering, 0, lowering.reduce(how, lowering.cast(value, held)), dims)
        return [lowering.part]

    return lower


def lower_truth(how: str) -> Lowered:
    def lower(node: Node, scratch: int) -> list[Part]:
        args, source = _single(node)
        lowering, dims = reduction(node, source, args.get("dim"))
        truth = lowering.cast(lowering.load(source), torch.bool)
        write_kept(lowering, 0, lowering.reduce(how, lowering.cast(truth, torch.int32)), dims)
        return [lowering.part]

    return lower


def lower_count(node: Node, scratch: int) -> list[Part]:
    """count_nonzero."""
    args, source = _single(node)
    lowering, dims = reduction(node, source, args.get("dim"))
    truth = lowering.cast(lowering.load(source), torch.bool)
    write_kept(lowering, 0, lowering.reduce("add", lowering.cast(truth, torch.int64)), dims)
    return [lowering.part]


_NORMS = {
    0: ("add", "tl.where({0} != 0, 1.0, 0.0)"), 1: ("add", "tl.abs({0})"), 2: ("add", "{0} * {0}"),
    math.inf: ("max", "tl.abs({0})"), -math.inf: ("min", "tl.abs({0})"),
}
"""For an order what is combined of each element, and how."""


def lower_norm(node: Node, scratch: int) -> list[Part]:
    """linalg_vector_norm, and norm, which older code calls."""
    args, source = _single(node)
    order = args.get("p" if node.name == "norm" else "ord", 2)
    return [lower_norm_of(node, source, 2 if order is None else order, args.get("dim"), 0)]


def lower_norm_of(node: Node, source: Operand, order: Any, dim: Sequence[int] | int | None, index: int) -> Part:
    """``node.writes[index]`` as the norm of ``source`` over ``dim`` (None: all)."""
    if isinstance(order, ScalarInput):
        raise Unsupported("norm of an order that may be another next time")
    lowering, dims = reduction(node, source, dim)
    held = compute_dtype(node.writes[index].layout.dtype)
    value = lowering.cast(lowering.load(source), held)
    if not held.is_floating_point:
        raise Unsupported(f"norm of {held}")
    if order in _NORMS:
        how, text = _NORMS[order]
        total = lowering.reduce(how, lowering.expr(text, value, dtype=held))
        if order == 2:
            total = lowering.expr("tl.sqrt_rn({0})" if held is torch.float32 else "tl.sqrt({0})", total, dtype=held)
    else:
        total = _rooted(lowering, value, lowering.read(order, held))
    write_kept(lowering, index, total, dims)
    return lowering.part


def _rooted(lowering: Lowering, value: Instr, order: Instr) -> Instr:
    """The norm of any other order."""
    power = f"{function('pow', value.dtype, False)}({{0}}, {{1}})"
    size = lowering.expr("tl.abs({0})", value, dtype=value.dtype)
    total = lowering.reduce("add", lowering.expr(power, size, order, dtype=value.dtype))
    return lowering.expr(power, total, divide(lowering, lowering.read(1.0, value.dtype), order), dtype=value.dtype)
