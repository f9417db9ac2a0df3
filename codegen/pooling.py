"""Lowers max pooling with its gradient; holds what sums over a few places share. Imports torch, `ir_nodes` and codegen's lowering
modules.

Both look at a few places for each element that they write: a window's elements, or the windows that an element lies in. So the
gradient needs no atomics, and sums in one order.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence

import torch

from codegen.bounds import add, over, rest, times
from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part, scratch_value
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF
from codegen.pulled import Known
from codegen.reductions import operand_of
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand, Write

MOST_TAPS, MOST_WINDOWS = 27, 27
"""Larger windows, and elements that lie in more of them, would be long kernels."""

Place = tuple[Instr, Instr | None]
"""An index along a dimension, and whether it counts, if it may not."""
Share = Callable[[Instr, tuple[int, ...]], Instr]
"""From an element and the numbers of its places to what is summed up."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Windows along a dimension of the planes."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def windows(self) -> int:
        """In how many windows an element may lie."""
        return (self.kernel - 1) * self.dilation // self.stride + 1


def axes_of(args: dict[str, Any], rank: int = 2) -> list[Axis]:
    """Of planes, or of boxes where ``rank`` is 3."""

    def each(name: str) -> Sequence[int]:
        value = args.get(name)
        value = (value,) if isinstance(value, int) else tuple(value or ())
        return value * rank if len(value) == 1 else value

    kernel = each("kernel_size")
    stride = each("stride") or kernel
    return [Axis(*one) for one in zip(kernel, stride, each("padding") or (0,) * rank, each("dilation") or (1,) * rank)]


def rank_of(node: Node) -> int:
    """How many dimensions the windows of an op such as "avg_pool3d" have."""
    return 3 if "3d" in node.name else 2


def take(lowering: Lowering, operand: Operand, places: Sequence[Instr]) -> Instr:
    """The operand's element at these places along its last dimensions; zero outside of it."""
    first = len(operand.layout.size) - len(places)
    return lowering.take_at(operand, dict(enumerate(places, first)))


def sum_at(lowering: Lowering, source: Operand, places: Mapping[int, Sequence[Place]], share: Share | None = None) -> Instr:
    """The sum of the elements at all combinations of ``places`` along these dimensions, of which the last one's follow one
    another; of each element what ``share`` makes of it and of its places' numbers."""
    total: Instr | None = None
    for numbers in itertools.product(*(range(len(some)) for some in places.values())):
        chosen = {dim: some[number] for (dim, some), number in zip(places.items(), numbers)}
        term = lowering.take_at(source, {dim: place for dim, (place, _) in chosen.items()})
        term = share(term, numbers) if share is not None else term
        counts = [count for _, count in chosen.values() if count is not None]
        if counts:
            text = f"tl.where({' & '.join(f'{{{number}}}' for number in range(1, len(counts) + 1))}, {{0}}, 0.0)"
            term = lowering.expr(text, term, *counts, dtype=term.dtype)
        total = term if total is None else lowering.expr("{0} + {1}", total, term, dtype=term.dtype)
    assert total is not None
    return total


def _number(lowering: Lowering, places: Sequence[Instr], extents: Sequence[int]) -> Instr:
    """An element's number in its plane of these ``extents``, as the op's indices name it."""
    number, *others = places
    for place, extent in zip(others, extents[1:]):
        extent_here = lowering.size(extent, torch.int32)
        number = lowering.expr("{0} * {2} + {1}", number, place, extent_here, dtype=torch.int32)
    return number


def _pitches(axes: Sequence[Axis]) -> list[int]:
    """What a step along each dimension of a window counts as in the number of one of its elements: no place behind that a
    gradient looks at is as large."""
    spans = [axis.windows * axis.stride for axis in axes[1:]]
    return [math.prod(spans[dim:]) for dim in range(len(axes))]


def _numbered(axes: Sequence[Axis], write: Write) -> Layout | None:
    """How bytes that say which element of its window was the largest lie, where a byte holds that; else None."""
    most = sum((axis.kernel - 1) * pitch for axis, pitch in zip(axes, _pitches(axes)))
    plain = all(axis.dilation == 1 for axis in axes) and write.layout.covers(write.value.buffer.nbytes)
    return replace(write.layout, dtype=torch.int8) if plain and most <= 127 and settings.enabled("recompute") else None


def lower_max_pool(node: Node, scratch: int, known: Known) -> list[Part]:
    """max_pool2d_with_indices, max_pool3d_with_indices: the first largest element of each window, or the last that is not a
    number."""
    args = arguments(node)
    source, axes = operand_of(args["self"]), axes_of(args, rank_of(node))
    if len(node.writes) != 2 or not source.layout.dtype.is_floating_point:
        raise Unsupported(f"no kernel for {node.target} of {str(source.layout.dtype).removeprefix('torch.')}")
    if math.prod(axis.kernel for axis in axes) > MOST_TAPS:
        raise Unsupported(f"a window of more than {MOST_TAPS} elements")
    lowering = Lowering(node, node.writes[0].layout.size)
    extents = source.layout.size[-len(axes) :]
    places = [taps(lowering, axis, dim, extent)
              for dim, (axis, extent) in enumerate(zip(axes, extents), len(lowering.shape) - len(axes))]  # fmt: skip
    best, tap = _largest(lowering, source, places, _pitches(axes))
    best.rounded = source.layout.dtype if source.layout.dtype in HALF else None
    lowering.write(0, best)
    lowering.write(1, _where(lowering, axes, tap, [some[0][0] for some in places], extents))
    narrow = _numbered(axes, node.writes[1])
    if narrow is not None:
        operand = Operand(scratch_value(scratch, narrow.nbytes, node), narrow)
        lowering.store(operand.value, narrow, tap)
        known.narrow[node.writes[1].value] = operand
    return [lowering.part]


def _largest(lowering: Lowering, source: Operand, places: Sequence[Sequence[Place]],
             pitches: Sequence[int]) -> tuple[Instr, Instr]:
    """The largest element at all combinations of ``places``, and which it is, as `_pitches` counts them."""
    best: Instr | None = None
    tap, found = lowering.expr("-1", dtype=torch.int32), False
    for numbers in itertools.product(*(range(len(some)) for some in places)):
        chosen = [some[number] for some, number in zip(places, numbers)]
        value = take(lowering, source, [place for place, _ in chosen])
        if best is None:
            best = lowering.expr('float("-inf")', dtype=value.dtype)
        larger = lowering.expr("(({0} > {1}) | ({0} != {0}))", value, best, dtype=torch.bool)
        better = larger if found else lowering.expr("({0} | ({1} < 0))", larger, tap, dtype=torch.bool)  # any but none
        for _, valid in chosen:
            better = lowering.both(valid, better)
        number = sum(map(operator.mul, numbers, pitches))
        best = lowering.expr("tl.where({0}, {1}, {2})", better, value, best, dtype=value.dtype)
        tap = lowering.expr(f"tl.where({{0}}, {number}, {{1}})", better, tap, dtype=torch.int32)
        found = found or all(valid is None for _, valid in chosen)
    assert best is not None
    return best, tap


def _where(lowering: Lowering, axes: Sequence[Axis], tap: Instr, begins: Sequence[Instr], extents: Sequence[int]) -> Instr:
    """The number in its plane of a window's element, which is the ``tap``-th as `_pitches` counts them."""
    places, pitches = [], _pitches(axes)
    for axis, begin, pitch in zip(axes, begins, pitches):
        within = lowering.expr(f"{{0}} // {pitch}", tap, dtype=torch.int32) if pitch > 1 else tap
        tap = lowering.expr(f"{{0}} % {pitch}", tap, dtype=torch.int32) if pitch > 1 else lowering.expr("0", dtype=torch.int32)
        places.append(lowering.expr("{0} + {1}", begin, times(lowering, within, axis.dilation), dtype=torch.int32))
    return _number(lowering, places, extents)


def taps(lowering: Lowering, axis: Axis, dim: int, extent: int) -> list[tuple[Instr, Instr | None]]:
    """Along a dimension each element of the window: its index in the input, and whether that exists, if it may not."""
    last = (lowering.shape[dim] - 1) * axis.stride
    begins = [number * axis.dilation - axis.padding for number in range(axis.kernel)]
    return [(place, _inside(lowering, place, (begin, begin + last), extent))
            for place, begin in zip(elements(lowering, axis, dim), begins)]


def _inside(lowering: Lowering, place: Instr, span: tuple[int, int], extent: int) -> Instr | None:
    """Whether a ``place`` in this ``span`` is one of ``extent``; None where it always is."""
    low = lowering.expr("({0} >= 0)", place, dtype=torch.bool) if span[0] < 0 else None
    if span[1] < extent:
        return low
    return lowering.both(low, lowering.expr("({0} < {1})", place, lowering.size(extent, torch.int32), dtype=torch.bool))


def elements(lowering: Lowering, axis: Axis, dim: int) -> list[Instr]:
    """Along a dimension the index in the input of each element of the window."""
    begin = times(lowering, lowering.coord(dim), axis.stride)
    return [add(lowering, begin, number * axis.dilation - axis.padding) for number in range(axis.kernel)]


def lower_max_pool_backward(node: Node, scratch: int, known: Known) -> list[Part]:
    """max_pool2d_with_indices_backward and that of boxes: the gradients of those windows whose largest element it was.

    Forward's bytes are read in the place of its indices, where it left any.
    """
    args = arguments(node)
    grad, indices, axes = operand_of(args["grad_output"]), operand_of(args["indices"]), axes_of(args, rank_of(node))
    if len(node.writes) != 1 or math.prod(axis.windows for axis in axes) > MOST_WINDOWS:
        raise Unsupported(f"elements that lie in more than {MOST_WINDOWS} windows")
    lowering = Lowering(node, node.writes[0].layout.size)
    first = len(lowering.shape) - len(axes)
    own = [lowering.coord(dim) for dim in range(first, len(lowering.shape))]
    narrow = known.narrow.get(indices.value)
    narrow = narrow if narrow is not None and narrow.layout == replace(indices.layout, dtype=torch.int8) else None
    mine = _number(lowering, own, lowering.shape[first:])
    begin, steps = _taps_of(lowering, axes, own)
    total: Instr | None = None
    places = (windows(lowering, axis, place) for axis, place in zip(axes, own))
    for window, behind in zip(itertools.product(*places), itertools.product(*steps)):
        chosen, value = (take(lowering, operand, window) for operand in (narrow or indices, grad))
        if narrow is not None:
            mine = add(lowering, begin, sum(behind))
        passed = lowering.expr("tl.where({0} == {1}, {2}, 0.0)", chosen, mine, value, dtype=value.dtype)
        passed.rounded = value.rounded
        total = passed if total is None else lowering.expr("{0} + {1}", total, passed, dtype=value.dtype)
    assert total is not None
    lowering.write(0, total)
    return [lowering.part]


def _taps_of(lowering: Lowering, axes: Sequence[Axis], own: Sequence[Instr]) -> tuple[Instr, list[list[int]]]:
    """Which element of its last window each is, as `_pitches` counts them, and what each of `windows` along a dimension adds to
    that; not below the window's extent where it lies beside it."""
    number, steps = lowering.expr("0", dtype=torch.int32), []
    for axis, place, pitch in zip(axes, own, _pitches(axes)):
        steps.append([back * axis.stride * pitch for back in reversed(range(axis.windows))])
        if axis.stride > 1:
            within = times(lowering, rest(lowering, add(lowering, place, axis.padding), axis.stride), pitch)
            number = lowering.expr("{0} + {1}", number, within, dtype=torch.int32)
    return number, steps


def windows(lowering: Lowering, axis: Axis, place: Instr) -> list[Instr]:
    """Along a dimension the windows that an element may lie in, in ascending order."""
    if axis.stride == 1:
        return [add(lowering, place, axis.padding - back) for back in reversed(range(axis.windows))]
    last = over(lowering, add(lowering, place, axis.padding), axis.stride)
    return [add(lowering, last, -back) for back in reversed(range(axis.windows))]


POOLS = {
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), lower_max_pool),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"), lower_max_pool_backward),
}
"""Keyed by `ir_nodes.node.Node.name`."""
