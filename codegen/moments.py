"""Means and variances from one pass, and norms of long rows in two parts. Imports `ir_nodes` and codegen's leaf modules.

Sums of differences from a shift give both (Chan, Golub, LeVeque: "Algorithms for computing the sample variance", 1983). The shift
is the median of three of the elements, so that one that lies far off does no harm: the variance's relative error is that of
float32's sums times 1 + (shift - mean)^2 / variance.

A row that registers do not hold would be walked three times by one program. Its sums are a part of their own instead, which
programs share; what is done to each element is another, together with what comes behind it, in blocks that need not ask for each
element's channel.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

from codegen.instructions import KEPT, Instr, Part, scratch_value
from codegen.lowering import Lowering
from codegen.reductions import kept_layout, mean_of, reduction, write_kept
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

LONG_ROW = 1 << 16
"""Elements; shorter rows are held in registers, or fit in caches while they are walked."""
FEW_ROWS = 128
"""Fewer leave multiprocessors idle: then rows are long that registers do not hold, half as many elements."""

TALL = 32
"""Rows; columns of more are not held in registers, and would be walked again."""
NARROW = 16
"""Columns that one program reduces, at least."""

_MEDIAN = "tl.maximum(tl.minimum({0}, {1}), tl.minimum(tl.maximum({0}, {1}), {2}))"


def moments(lowering: Lowering, source: Operand, dims: Sequence[int],
            sampled: Callable[[Operand], Instr] | None = None) -> tuple[Instr, Instr]:  # fmt: skip
    """(mean, sum of squared differences from it) of ``source`` over ``dims``, which ``lowering`` reduces. ``sampled``: gives a
    number of each result in another way than by loading it."""
    value, samples = lowering.load(source), [_sample(source, dims, quarter) for quarter in (1, 2, 3)]
    shift = lowering.expr(_MEDIAN, *(sampled(one) if sampled is not None else lowering.load(one, KEPT) for one in samples),
                          dtype=value.dtype)
    moved = lowering.expr("{0} - {1}", value, shift, dtype=value.dtype)
    total = lowering.reduce("add", moved)
    squares = lowering.reduce("add", lowering.expr("{0} * {0}", moved, dtype=value.dtype))
    offset = mean_of(lowering, total)
    mean = lowering.expr("{0} + {1}", shift, offset, dtype=value.dtype)
    spread = lowering.expr("{0} - {1} * {2}", squares, total, offset, dtype=value.dtype)
    return mean, lowering.expr("tl.where({0} < 0, 0.0, {0})", spread, dtype=value.dtype)


def scaled(lowering: Lowering, args: dict[str, Any], centred: Instr, scale: Instr, read: Callable[[Any], Instr]) -> Instr:
    """A norm's result, of the input less its rows' means and the reciprocal deviations; ``read`` loads weight and bias."""
    result = lowering.expr("{0} * {1}", centred, scale, dtype=centred.dtype)
    for name, text in (("weight", "{0} * {1}"), ("bias", "{0} + {1}")):
        if args.get(name) is not None:
            result = lowering.expr(text, result, read(args[name]), dtype=centred.dtype)
    return result


def _sample(source: Operand, dims: Sequence[int], quarter: int) -> Operand:
    """One element of each result, so many quarters into every reduced dimension."""
    layout = source.layout
    kept = kept_layout(layout, dims)
    offset = sum(layout.size[dim] * quarter // 4 * layout.stride[dim] for dim in dims)
    return Operand(source.value, Layout(kept.dtype, kept.size, kept.stride, layout.offset + offset))


def keep(lowering: Lowering, scratch: int, number: Instr) -> Operand:
    """Hand a number of each result to the next part."""
    layout = Layout.contiguous(number.dtype, lowering.kept_shape)
    value = scratch_value(scratch, layout.nbytes, lowering.part.node)
    lowering.store(value, layout, number, KEPT)
    return Operand(value, layout)


def written(lowering: Lowering, scratch: int, places: Sequence[int | None], numbers: Sequence[Instr], dims: Sequence[int]
            ) -> list[Operand]:  # fmt: skip
    """Numbers of each result, written to the ``places`` among the node's writes, for the next part, exactly."""
    node, found = lowering.part.node, []
    for index, (place, number) in enumerate(zip(places, numbers)):
        exact = place is not None and node.writes[place].layout.dtype is number.dtype
        if place is not None:
            write_kept(lowering, place, number, tuple(dims))
        found.append(Operand(node.writes[place].value, node.writes[place].layout) if exact and place is not None
                     else keep(lowering, scratch + index, number))
    return found


def is_long(layout: Layout, dims: Sequence[int]) -> bool:
    extent = math.prod(layout.size[dim] for dim in dims)
    few = math.prod(layout.size) < FEW_ROWS * extent
    return extent > (LONG_ROW // 2 if few else LONG_ROW) and settings.enabled("long_norms")


def is_tall(layout: Layout, dims: Sequence[int]) -> bool:
    """Are columns reduced that registers do not hold?"""
    tall = math.prod(layout.size[dim] for dim in dims) > TALL
    return tall and _in_columns(layout, dims) and settings.enabled("long_norms")


def few_and_long(layout: Layout, dims: Sequence[int]) -> bool:
    """Would rows, or columns, that a program each walks, leave most of the machine idle for long?"""
    extent, whole = math.prod(layout.size[dim] for dim in dims), math.prod(layout.size)
    if not settings.enabled("long_norms") or not whole:
        return False
    if _in_columns(layout, dims):
        return extent > LONG_ROW // 16 and whole < FEW_ROWS * NARROW * extent
    return whole < FEW_ROWS * extent and extent > LONG_ROW or 4 * whole < FEW_ROWS * extent and 2 * extent > LONG_ROW


def _in_columns(layout: Layout, dims: Sequence[int]) -> bool:
    """Do results lie next to one another, not what they are made of?"""
    along = min(((stride, dim) for dim, (size, stride) in enumerate(zip(layout.size, layout.stride)) if size > 1 and stride),
                default=(0, dims[0] if dims else -1))[1]
    return along not in dims


def rows(node: Node, source: Operand, dims: Sequence[int], eps: Any, scratch: int) -> tuple[Part, Operand, Operand]:
    """A norm's sums over ``dims`` as a part, and its means and reciprocal deviations, which are the node's second and third
    results, over the shape of ``source``."""
    lowering, dims = reduction(node, source, tuple(dims))
    mean, squares = moments(lowering, source, dims)
    variance = mean_of(lowering, squares)
    scale = lowering.expr("tl.rsqrt({0} + {1})", variance, lowering.read(eps, variance.dtype), dtype=variance.dtype)
    lowering.part.apart = True
    found = written(lowering, scratch, (1, 2), (mean, scale), dims)
    first, second = (spread(number, dims, len(source.layout.size)) for number in found)
    return lowering.part, first, second


def handed_on(lowering: Lowering, scratch: int, numbers: Sequence[Instr], dims: Sequence[int]) -> list[Operand]:
    """Numbers of each row for a part of its own, over the reduced shape."""
    lowering.part.apart = True
    return [spread(keep(lowering, scratch + index, number), dims, len(lowering.shape)) for index, number in enumerate(numbers)]


def spread(number: Operand, dims: Sequence[int], rank: int) -> Operand:
    """A number of each row along rows of ``rank`` dimensions."""
    layout = number.layout
    if len(layout.size) == rank:
        return number
    size, stride = iter(layout.size), iter(layout.stride)
    places = [dim not in dims for dim in range(rank)]
    return Operand(number.value, Layout(layout.dtype, tuple(next(size) if kept else 1 for kept in places),
                                        tuple(next(stride) if kept else 0 for kept in places), layout.offset))
