"""Lowers max pooling with its gradient; holds what sums over a few places share. Imports torch, `ir_nodes` and codegen's lowering
modules.

Both look at a few places for each element that they write: a window's elements, or the windows that an element lies in. So the
gradient needs no atomics, and sums in one order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence

import torch

from codegen.bounds import add, over, times
from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part, scratch_value
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF
from codegen.pulled import Known
from codegen.reductions import operand_of
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand, Write

MOST_TAPS, MOST_WINDOWS = 25, 16
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


def axes_of(args: dict[str, Any]) -> list[Axis]:
    def pair(name: str) -> Sequence[int]:
        value = args.get(name)
        value = (value,) if isinstance(value, int) else tuple(value or ())
        return value * 2 if len(value) == 1 else value

    kernel = pair("kernel_size")
    stride = pair("stride") or kernel
    return [Axis(*each) for each in zip(kernel, stride, pair("padding") or (0, 0), pair("dilation") or (1, 1))]


def take(lowering: Lowering, operand: Operand, row: Instr, column: Instr) -> Instr:
    """The operand's element at this row and column of each plane; zero outside of it."""
    rank = len(operand.layout.size)
    return lowering.take_at(operand, {rank - 2: row, rank - 1: column})


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


def _number(lowering: Lowering, row: Instr, column: Instr, width: int) -> Instr:
    """An element's number in its plane, as the op's indices name it."""
    return lowering.expr("{0} * {2} + {1}", row, column, lowering.size(width, torch.int32), dtype=torch.int32)


def _pitch(axes: Sequence[Axis]) -> int:
    """What a row of a window counts as in the number of one of its elements: no column that a gradient looks at is as large."""
    return axes[1].windows * axes[1].stride


def _numbered(axes: Sequence[Axis], write: Write) -> Layout | None:
    """How bytes that say which element of its window was the largest lie, where a byte holds that; else None."""
    most = (axes[0].kernel - 1) * _pitch(axes) + axes[1].kernel - 1
    plain = axes[0].dilation == axes[1].dilation == 1 and write.layout.covers(write.value.buffer.nbytes)
    return replace(write.layout, dtype=torch.int8) if plain and most <= 127 and settings.enabled("recompute") else None


def lower_max_pool(node: Node, scratch: int, known: Known) -> list[Part]:
    """max_pool2d_with_indices: the first largest element of each window, or the last that is not a number."""
    args = arguments(node)
    source, axes = operand_of(args["self"]), axes_of(args)
    if len(node.writes) != 2 or not source.layout.dtype.is_floating_point:
        raise Unsupported(f"no kernel for {node.target} of {str(source.layout.dtype).removeprefix('torch.')}")
    if axes[0].kernel * axes[1].kernel > MOST_TAPS:
        raise Unsupported(f"a window of more than {MOST_TAPS} elements")
    lowering = Lowering(node, node.writes[0].layout.size)
    dims = (len(lowering.shape) - 2, len(lowering.shape) - 1)
    places = [taps(lowering, axis, dim, extent) for axis, dim, extent in zip(axes, dims, source.layout.size[-2:])]
    best: Instr | None = None
    tap, found, pitch = lowering.expr("-1", dtype=torch.int32), False, _pitch(axes)
    for down, (row, row_valid) in enumerate(places[0]):
        for along, (column, column_valid) in enumerate(places[1]):
            value = take(lowering, source, row, column)
            if best is None:
                best = lowering.expr('float("-inf")', dtype=value.dtype)
            larger = lowering.expr("(({0} > {1}) | ({0} != {0}))", value, best, dtype=torch.bool)
            better = larger if found else lowering.expr("({0} | ({1} < 0))", larger, tap, dtype=torch.bool)  # any but none
            for valid in (row_valid, column_valid):
                better = lowering.both(valid, better)
            best = lowering.expr("tl.where({0}, {1}, {2})", better, value, best, dtype=value.dtype)
            tap = lowering.expr(f"tl.where({{0}}, {down * pitch + along}, {{1}})", better, tap, dtype=torch.int32)
            found = found or row_valid is column_valid is None
    assert best is not None
    best.rounded = source.layout.dtype if source.layout.dtype in HALF else None
    lowering.write(0, best)
    lowering.write(1, _where(lowering, axes, tap, [some[0][0] for some in places], source.layout.size[-1]))
    narrow = _numbered(axes, node.writes[1])
    if narrow is not None:
        operand = Operand(scratch_value(scratch, narrow.nbytes, node), narrow)
        lowering.store(operand.value, narrow, tap)
        known.narrow[node.writes[1].value] = operand
    return [lowering.part]


def _where(lowering: Lowering, axes: Sequence[Axis], tap: Instr, begins: Sequence[Instr], width: int) -> Instr:
    """The number in its plane of a window's element, which is the ``tap``-th as `_pitch` counts them."""
    parts = (lowering.expr(f"{{0}} {sign} {_pitch(axes)}", tap, dtype=torch.int32) for sign in ("//", "%"))
    row, column = (lowering.expr("{0} + {1}", begin, times(lowering, part, axis.dilation), dtype=torch.int32)
                   for begin, part, axis in zip(begins, parts, axes))
    return _number(lowering, row, column, width)


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
    """max_pool2d_with_indices_backward: the gradients of those windows whose largest element it was.

    Forward's bytes are read in the place of its indices, where it left any.
    """
    args = arguments(node)
    grad, indices, axes = operand_of(args["grad_output"]), operand_of(args["indices"]), axes_of(args)
    if len(node.writes) != 1 or axes[0].windows * axes[1].windows > MOST_WINDOWS:
        raise Unsupported(f"elements that lie in more than {MOST_WINDOWS} windows")
    lowering = Lowering(node, node.writes[0].layout.size)
    rank = len(lowering.shape)
    row, column = lowering.coord(rank - 2), lowering.coord(rank - 1)
    narrow = known.narrow.get(indices.value)
    narrow = narrow if narrow is not None and narrow.layout == replace(indices.layout, dtype=torch.int8) else None
    mine = _number(lowering, row, column, lowering.shape[-1])
    pitch = lowering.size(_pitch(axes), torch.int32)
    total: Instr | None = None
    columns = windows(lowering, axes[1], column)
    for down in windows(lowering, axes[0], row):
        for along in columns:
            chosen, value = (take(lowering, operand, down, along) for operand in (narrow or indices, grad))
            if narrow is not None:
                places = [_within(lowering, axis, *each) for axis, each in zip(axes, ((row, down), (column, along)))]
                mine = lowering.expr("{0} * {2} + {1}", *places, pitch, dtype=torch.int32)
            passed = lowering.expr("tl.where({0} == {1}, {2}, 0.0)", chosen, mine, value, dtype=value.dtype)
            passed.rounded = value.rounded
            total = passed if total is None else lowering.expr("{0} + {1}", total, passed, dtype=value.dtype)
    assert total is not None
    lowering.write(0, total)
    return [lowering.part]


def _within(lowering: Lowering, axis: Axis, place: Instr, window: Instr) -> Instr:
    """Where in a window an element lies along a dimension; not below the window's extent where it lies beside it."""
    padding, stride = (lowering.size(number, torch.int32) for number in (axis.padding, axis.stride))
    return lowering.expr("{0} + {1} - {2} * {3}", place, padding, window, stride, dtype=torch.int32)


def windows(lowering: Lowering, axis: Axis, place: Instr) -> list[Instr]:
    """Along a dimension the windows that an element may lie in, in ascending order."""
    if axis.stride == 1:
        return [add(lowering, place, axis.padding - back) for back in reversed(range(axis.windows))]
    last = over(lowering, add(lowering, place, axis.padding), axis.stride)
    return [add(lowering, last, -back) for back in reversed(range(axis.windows))]
