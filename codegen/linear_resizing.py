"""Lowers resizing of series, images and volumes to what lies between their elements, with its gradient. Imports torch, `ir_nodes`
and codegen's lowering modules.

Weights are computed in float32, as ATen's kernels do. Its gradients add up atomically, in the result's dtype; here each element
looks for the results that it had a share in: no atomics, one order of sums, which are held in float32.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Mapping, Sequence

import torch

from codegen.bounds import clamped
from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part, scratch_value
from codegen.interpolation import Resized, resized, step_of
from codegen.lowering import Lowering
from codegen.pooling import MOST_WINDOWS, sum_at
from codegen.pulled import Known
from codegen.reductions import divide
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

MOST_ALONG, LARGEST = 40, 1 << 14
"""Results that an element may have a share in along a dimension, more would be long kernels; and results there, of which a
float32 tells where they lie to a hundredth of an element."""
_SLACK = 0.01
Around = tuple[Instr, Instr, Instr]
"""Along a dimension the element before a place, the one behind it, and the share of the latter."""


def lower_linear(node: Node) -> list[Part]:
    """upsample_linear1d, upsample_bilinear2d, upsample_trilinear3d: from the two elements around in each dimension."""
    args, source, lowering, dims = resized(node, "self")
    around = [_around(lowering, *one, bool(args["align_corners"])) for one in dims]
    lowering.write(0, _mixed(lowering, source, dims, around, {}))
    return [lowering.part]


def _mixed(lowering: Lowering, source: Operand, dims: Sequence[Resized], around: Sequence[Around],
           places: Mapping[int, Instr]) -> Instr:
    """What lies between the elements along all dimensions behind those of ``places``."""
    if len(places) == len(dims):
        return lowering.take_at(source, places)
    dim, (*both, share) = dims[len(places)][0], around[len(places)]
    near, far = (_mixed(lowering, source, dims, around, {**places, dim: place}) for place in both)
    return lowering.expr("(1.0 - {2}) * {0} + {2} * {1}", near, far, share, dtype=near.dtype)


def _around(lowering: Lowering, dim: int, extent: int, results: int, factor: Any, corners: bool) -> Around:
    place = _source(lowering, lowering.coord(dim), extent, results, factor, corners)
    before = clamped(lowering, "{0}.to(tl.int32)", place, extent=extent)
    behind = clamped(lowering, "{0} + 1", before, extent=extent)
    return before, behind, lowering.expr("{0} - {1}.to(tl.float32)", place, before, dtype=torch.float32)


def _source(lowering: Lowering, number: Instr, extent: int, results: int, factor: Any, corners: bool) -> Instr:
    """Where the result with this number lies among what there is."""
    place = lowering.expr("{0}.to(tl.float32)", number, dtype=torch.float32)
    step = _step(lowering, extent, results, factor, corners)
    text = "{0} * {1}" if corners else "tl.maximum({1} * ({0} + 0.5) - 0.5, 0.0)"
    return lowering.expr(text, place, step, dtype=torch.float32)


def _step(lowering: Lowering, extent: int, results: int, factor: Any, corners: bool) -> Instr:
    """How far neighbours of the result are apart."""
    if not corners:
        return step_of(lowering, extent, results, factor)
    return divide(lowering, lowering.size(extent - 1 if results > 1 else 0), lowering.size(max(results - 1, 1)))


# The gradient


def lower_linear_backward(node: Node, scratch: int, known: Known) -> list[Part]:
    """The gradients of the results that an element had a share in: all at once, or one dimension after the other where these are
    many."""
    args, grad, _, swapped = resized(node, "grad_output")
    dims = [(dim, extent, results, factor) for dim, results, extent, factor in swapped]
    corners = bool(args["align_corners"])
    counts = {dim: _takers(extent, results, _known(factor), corners) for dim, extent, results, factor in dims}
    together = math.prod(counts.values()) <= MOST_WINDOWS
    size, parts = list(grad.layout.size), []
    for number, group in enumerate([dims] if together else [[one] for one in reversed(dims)]):
        for dim, extent, _, _ in group:
            size[dim] = extent
        lowering = Lowering(node, tuple(size))
        total = _sum(lowering, grad, group, counts, corners)
        if tuple(size) == node.writes[0].layout.size:
            lowering.write(0, total)
        else:
            layout = _lying_as(grad.layout, tuple(size))
            grad = Operand(scratch_value(scratch + number, layout.nbytes, node), layout)
            lowering.store(grad.value, layout, total)
        parts.append(lowering.part)
    return parts


def _known(factor: Any) -> float | None:
    if not isinstance(factor, float | None):
        raise Unsupported("resizing by a factor that is known only when the kernel runs")
    return factor


def _sum(lowering: Lowering, grad: Operand, dims: Sequence[Resized], counts: Mapping[int, int], corners: bool) -> Instr:
    """The gradients along ``dims`` of which an element has a share, each times that."""
    places, shares = {}, []
    for dim, extent, results, factor in dims:
        begin = _first(lowering, dim, extent, results, factor, corners)
        numbers = [lowering.expr(f"{{0}} + {number}", begin, dtype=torch.int32) for number in range(counts[dim])]
        places[dim] = [(number, None) for number in numbers]
        last = lowering.size(extent - 1)
        sources = (_source(lowering, number, extent, results, factor, corners) for number in numbers)
        shares.append([lowering.expr("tl.maximum(1.0 - tl.abs(tl.minimum({0}, {1}) - {2}.to(tl.float32)), 0.0)", source, last,
                                     lowering.coord(dim), dtype=torch.float32) for source in sources])

    def share(value: Instr, chosen: tuple[int, ...]) -> Instr:
        for some, number in zip(shares, chosen):
            value = lowering.expr("{0} * {1}", value, some[number], dtype=value.dtype)
        return value

    return sum_at(lowering, grad, places, share)  # zero beside the results


def _first(lowering: Lowering, dim: int, extent: int, results: int, factor: Any, corners: bool) -> Instr:
    """The first of the results that an element may have a share in."""
    if corners and min(extent, results) == 1:
        return lowering.expr("0", dtype=torch.int32)
    step = _step(lowering, extent, results, factor, corners)
    place = lowering.expr("{0}.to(tl.float32) - " + ("1.0" if corners else "0.5"), lowering.coord(dim), dtype=torch.float32)
    number = divide(lowering, place, step)
    return lowering.expr(f"tl.ceil({{0}} - {_SLACK if corners else 0.5 + _SLACK}).to(tl.int32)", number, dtype=torch.int32)


@lru_cache(maxsize=1024)
def _takers(extent: int, results: int, factor: float | None, corners: bool) -> int:
    """How many results, from what `_first` computes on, an element has a share in at most. Raises Unsupported for too many."""
    if results > LARGEST:
        raise Unsupported(f"gradients of more than {LARGEST} results along a dimension")
    if corners and min(extent, results) == 1:
        most = results
    else:
        step = (extent - 1) / (results - 1) if corners else extent / results if factor is None else 1 / factor
        elements, numbers = torch.arange(extent, dtype=torch.float64), torch.arange(results, dtype=torch.float64)
        source = numbers * step if corners else ((numbers + 0.5) * step - 0.5).clamp(min=0)
        first = (elements - 1) / step if corners else (elements - 0.5) / step - 0.5
        first = (first - 1.5 * _SLACK).ceil()  # where rounding may have it
        last = torch.searchsorted(source.clamp(max=extent - 1), elements + 1)
        most = int((last - first).max())
    if most > MOST_ALONG:
        raise Unsupported(f"elements that more than {MOST_ALONG} results along a dimension had a share of")
    return most


def _lying_as(layout: Layout, size: tuple[int, ...]) -> Layout:
    """float32 elements whose dimensions follow one another in memory as those of ``layout``."""
    order = sorted(range(len(size)), key=lambda dim: -layout.stride[dim])
    steps = itertools.accumulate((size[dim] for dim in reversed(order[1:])), lambda step, extent: step * extent, initial=1)
    stride = dict(zip(reversed(order), steps))
    return replace(layout, dtype=torch.float32, stride=tuple(stride[dim] for dim in range(len(size))), size=size, offset=0)


NAMES = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
RESIZES = dict.fromkeys(NAMES, lower_linear)
GRADIENTS = {f"{name}_backward": lower_linear_backward for name in NAMES}
"""Both are keyed by `ir_nodes.node.Node.name`."""
