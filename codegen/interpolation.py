"""Lowers resizing of images to the nearest elements, with its gradient. Imports torch, `ir_nodes` and codegen's lowering modules.

Places are computed in float32, as ATen's kernels do, or results would be other elements at some sizes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Callable, Sequence

import torch

from codegen.bounds import clamped
from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.pooling import MOST_WINDOWS, Place, sum_at
from codegen.promotion import HALF
from codegen.pulled import Known
from codegen.reductions import divide, operand_of
from codegen.whole_windows import in_runs, sums_of_runs
from ir_nodes.node import Node, Operand

_FLOATS = (torch.float32, *HALF)
Resized = tuple[int, int, int, Any]
"""A dimension's number, how many elements there are, how many there will be, and the user's factor."""
_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}


def resized(node: Node, name: str) -> tuple[dict[str, Any], Operand, Lowering, list[Resized]]:
    """Arguments, the tensor ``name``, a lowering over the result, and the resized dimensions. Raises Unsupported."""
    args = arguments(node)
    source = operand_of(args[name])
    if source.layout.dtype not in _FLOATS or len(node.writes) != 1:
        raise Unsupported(f"resizing of {str(source.layout.dtype).removeprefix('torch.')}")
    lowering = Lowering(node, node.writes[0].layout.size)
    dims = range(2, len(lowering.shape))
    factors = [args.get(factor) for factor in _SCALES[len(dims)]]
    return args, source, lowering, [(dim, source.layout.size[dim], lowering.shape[dim], factor) for dim, factor in
                                    zip(dims, factors)]


def step_of(lowering: Lowering, extent: int, results: int, factor: Any) -> Instr:
    """How far neighbours of the result are apart among what there is: what the user's factor says, or the sizes."""
    if factor is None:
        return divide(lowering, lowering.size(extent), lowering.size(results))
    given = lowering.read(factor, torch.float64)
    return lowering.expr("(1.0 / {0}).to(tl.float32)", given, dtype=torch.float32)


@lru_cache(maxsize=1024)
def _whole_times(extent: int, results: int, factor: float | None, shift: float) -> int:
    """How many results, one after the other, take each element; 0 where not all are taken equally often, as rounding has it."""
    times, rest = divmod(results, extent)
    if rest or not times:
        return 0
    step = torch.tensor(extent / results if factor is None else 1.0 / factor, dtype=torch.float64).float()
    taken = ((torch.arange(results, dtype=torch.float32) + shift) * step).to(torch.int32).clamp(max=extent - 1)
    return times if torch.equal(taken, torch.arange(results, dtype=torch.int32) // times) else 0


def _all_times(dims: Sequence[Resized], shift: float) -> list[int]:
    """`_whole_times` of all dimensions; none where some has other ones, or where a factor is known only when the kernel runs."""
    if any(not isinstance(factor, float | None) for *_, factor in dims):
        return []
    found = [_whole_times(extent, results, factor, shift) for _, extent, results, factor in dims]
    return found if all(found) else []


def lower_nearest(shift: float) -> Callable[[Node], list[Part]]:
    """upsample_nearest and, with a ``shift`` of half an element, _upsample_nearest_exact: the element that each lies in."""

    def lower(node: Node) -> list[Part]:
        _, source, lowering, dims = resized(node, "self")
        if times := _all_times(dims, shift):
            write = node.writes[0]
            lowering = Lowering(node, in_runs(write.layout, times).size)
            same = lowering.load(Operand(source.value, in_runs(source.layout, [1] * len(times))))
            lowering.store(write.value, in_runs(write.layout, times), same)
            return [lowering.part]
        places = {}
        for dim, extent, results, factor in dims:
            text = f"(({{0}}.to(tl.float32) + {shift}) * {{1}}).to(tl.int32)"
            place = lowering.coord(dim), step_of(lowering, extent, results, factor)
            places[dim] = clamped(lowering, text, *place, extent=extent)
        lowering.write(0, lowering.take_at(source, places))
        return [lowering.part]

    return lower


def lower_nearest_backward(shift: float) -> Callable[[Node, Known], list[Part]]:
    """The sums of the gradients of all that took an element."""

    def lower(node: Node, known: Known) -> list[Part]:
        _, grad, lowering, dims = resized(node, "grad_output")
        times = _all_times([(dim, extent, results, factor) for dim, results, extent, factor in dims], shift)
        if times:
            return sums_of_runs(node, known, grad, times, MOST_WINDOWS)
        places = {dim: _takers(lowering, dim, results, extent, factor, shift) for dim, results, extent, factor in dims}
        if math.prod(map(len, places.values())) > MOST_WINDOWS:
            raise Unsupported(f"elements that more than {MOST_WINDOWS} others took")
        lowering.write(0, sum_at(lowering, grad, places))
        return [lowering.part]

    return lower


def _takers(lowering: Lowering, dim: int, results: int, extent: int, factor: Any, shift: float) -> list[Place]:
    """Along a dimension which of the ``results`` took an element, and whether each exists."""
    if factor is None:
        step = divide(lowering, lowering.size(results), lowering.size(extent))
    else:
        step = lowering.expr("{0}.to(tl.float32)", lowering.read(factor, torch.float64), dtype=torch.float32)
    text = f"tl.minimum(tl.ceil(({{0}} + {{1}}).to(tl.float32) * {{2}} - {shift}).to(tl.int32), {{3}})"
    begin, end = (lowering.expr(text, lowering.coord(dim), lowering.size(ahead, torch.int32), step,
                                lowering.size(results, torch.int32), dtype=torch.int32) for ahead in (0, 1))
    places = [lowering.expr(f"{{0}} + {number}", begin, dtype=torch.int32) for number in range(-(-(results + 1) // extent))]
    return [(place, lowering.expr("({0} < {1})", place, end, dtype=torch.bool)) for place in places]


RESIZES = {
    **{f"upsample_nearest{rank}d": lower_nearest(0.0) for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d": lower_nearest(0.5) for rank in (1, 2, 3)},
}
"""Keyed by `ir_nodes.node.Node.name`."""


GRADIENTS = {
    **{f"upsample_nearest{rank}d_backward": lower_nearest_backward(0.0) for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d_backward": lower_nearest_backward(0.5) for rank in (1, 2, 3)},
}
"""The same of what has to know what makes its operands."""
