"""Index arithmetic: how operands of different shapes walk one iteration space. Imports nothing of ours.

A *form* describes the addresses an operand visits as its row-major linear index runs: (size, stride) pairs, outermost
first, sizes above 1, merged wherever two dimensions continue each other. Two operands visit the same elements in the same
order exactly where their forms are equal, whatever shapes they were recorded with.

A *reduced* tuple holds the intervals (lo, hi) of the linear index's mixed-radix positions that a reduction sums over: the
rows of an M x N matrix are ((1, N),), its columns ((N, M * N),).
"""

from __future__ import annotations

import math
from functools import lru_cache

Form = tuple[tuple[int, int], ...]
Reduced = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1 << 16)
def collapse(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Form:
    """The form of a strided operand; strides in elements."""
    out: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides):
        if size == 1:
            continue
        if out and out[-1][1] == stride * size:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


@lru_cache(maxsize=1 << 16)
def broadcast(sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> Form | None:
    """The form of an operand expanded to ``shape``; None where it does not broadcast."""
    pad = len(shape) - len(sizes)
    if pad < 0:
        return None
    out = [0] * pad
    for size, stride, extent in zip(sizes, strides, shape[pad:]):
        if size != extent and size != 1:
            return None
        out.append(stride if size == extent else 0)
    return collapse(shape, tuple(out))


@lru_cache(maxsize=1 << 16)
def cuts(form: Form) -> tuple[int, ...]:
    """Inner positions of the linear index where the form changes stride."""
    out, position = [], 1
    for size, _ in reversed(form[1:]):
        position *= size
        out.append(position)
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def merge_cuts(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Union of two sorted cut lists; None where the positions do not nest, so that no common dimensions exist."""
    merged = tuple(sorted({*left, *right}))
    for lower, upper in zip(merged, merged[1:]):
        if upper % lower:
            return None
    return merged


def reduced_cuts(reduced: Reduced, numel: int) -> tuple[int, ...]:
    """Cut positions that separate reduced from kept dimensions."""
    return tuple(sorted({cut for interval in reduced for cut in interval if 1 < cut < numel}))


def dims_of(all_cuts: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Sizes of the common dimensions, outermost first."""
    positions = (1, *all_cuts, numel)
    return tuple(upper // lower for lower, upper in zip(positions, positions[1:]))[::-1]


def strides_over(form: Form, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The stride of ``form`` along each of ``dims``, whose cuts contain the form's."""
    out: list[int] = []
    rest = list(form)
    left, stride = rest.pop() if rest else (1, 0)
    for extent in reversed(dims):
        if extent == 1:
            out.append(0)
            continue
        if left == 1:
            left, stride = rest.pop() if rest else (extent, 0)
        out.append(stride)
        left, stride = left // extent, stride * extent
    return tuple(reversed(out))


@lru_cache(maxsize=1 << 14)
def intervals(size: tuple[int, ...], reduced_dims: tuple[int, ...]) -> Reduced:
    """The reduced tuple for reducing dimensions ``reduced_dims`` (non-negative) of ``size``."""
    out: list[tuple[int, int]] = []
    position = 1
    for dim in reversed(range(len(size))):
        upper = position * size[dim]
        if dim in reduced_dims and size[dim] > 1:
            if out and out[-1][1] == position:
                out[-1] = (out[-1][0], upper)
            else:
                out.append((position, upper))
        position = upper
    return tuple(out)


def reduced_extent(reduced: Reduced) -> int:
    """How many elements each result of the reduction combines."""
    total = 1
    for lower, upper in reduced:
        total *= upper // lower
    return total


def segments(reduced: Reduced, numel: int) -> list[tuple[int, bool]]:
    """Alternating (extent, is reduced) runs of the linear index, innermost first."""
    out, position = [], 1
    for lower, upper in reduced:
        if lower > position:
            out.append((lower // position, False))
        out.append((upper // lower, True))
        position = upper
    if numel > position:
        out.append((numel // position, False))
    return out


@lru_cache(maxsize=1 << 14)
def embed(form: Form, reduced: Reduced, numel: int) -> Form | None:
    """A form over the kept index seen over the full one, constant along what is reduced; None where cuts do not nest."""
    sizes: list[int] = []
    strides: list[int] = []
    rest = list(form)
    left, stride = 1, 0
    for extent, is_reduced in segments(reduced, numel):
        if is_reduced:
            sizes.append(extent)
            strides.append(0)
            continue
        while extent > 1:
            if left == 1:
                left, stride = rest.pop() if rest else (extent, 0)
            step = min(left, extent)
            if left % step or extent % step:
                return None
            sizes.append(step)
            strides.append(stride)
            left, stride, extent = left // step, stride * step, extent // step
    return collapse(tuple(reversed(sizes)), tuple(reversed(strides)))


def touched(form: Form) -> int:
    """How many elements ``form`` reaches: all whose indices differ along a dimension that it moves along."""
    return math.prod(extent for extent, stride in form if stride)


def reach(form: Form) -> int:
    """One more than the last address."""
    return 1 + sum((size - 1) * stride for size, stride in form)


def along(form: Form, interval: tuple[int, int], numel: int) -> tuple[int, Form] | None:
    """The stride of ``form`` along an interval of the linear index, and the form of what is left; None where it has several."""
    all_cuts = merge_cuts(reduced_cuts((interval,), numel), cuts(form))
    if all_cuts is None:
        return None
    dims = dims_of(all_cuts, numel)
    starts = [1]
    for extent in reversed(dims[1:]):
        starts.append(starts[-1] * extent)
    inside = [dim for dim, start in enumerate(reversed(starts)) if interval[0] <= start < interval[1]]
    if len(inside) != 1:
        return None
    strides = strides_over(form, dims)
    rest = [dim for dim in range(len(dims)) if dim not in inside]
    return strides[inside[0]], collapse(tuple(dims[dim] for dim in rest), tuple(strides[dim] for dim in rest))
