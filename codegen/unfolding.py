"""Lowers what lays out an image's or a series' windows side by side, and sums them up again: `im2col` and `col2im`, of which
`torch.nn.Unfold` and `torch.nn.Fold` are made, and the gradient of `torch.Tensor.unfold`. Imports torch, `ir_nodes` and codegen's
lowering modules.

Each element of a sum looks at the windows that it lies in: no atomics, one order of sums.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Sequence

import torch

from codegen import forms
from codegen.bounds import add, over, rest
from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.pooling import MOST_WINDOWS, Axis, axes_of, windows
from codegen.reductions import operand_of
from codegen.whole_windows import in_runs
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

Index = tuple[Instr, int, int]
"""An index, its stride, and how many there are, as `Lowering.take` has them."""


@dataclass(frozen=True, slots=True)
class Share:
    """Where one of the windows that an element lies in has it: these indices, and so many elements behind them. ``counts`` tells
    whether the window has it at all, where the indices' ranges do not."""

    indices: tuple[Index, ...]
    behind: int
    counts: Instr | None


def _side_by_side(axes: Sequence[Axis]) -> bool:
    """Does each window begin where the one before it ends, the first with the first element?"""
    return all(axis.kernel == axis.stride and not axis.padding and axis.dilation == 1 for axis in axes)


def _columns(layout: Layout, axes: Sequence[Axis], counts: Sequence[int]) -> Layout:
    """A layout (..., channels * taps, windows) as (..., channels, taps down, taps along, windows down, windows along)."""
    rank = len(layout.size)
    for dim, run in ((rank - 1, counts[1]), (rank - 2, axes[1].kernel), (rank - 2, axes[0].kernel)):
        layout = layout.in_runs(dim, run)
    return layout


def _counts(extents: Sequence[int], axes: Sequence[Axis]) -> list[int]:
    """How many windows images of these extents have along each dimension."""
    return [(extent + 2 * axis.padding - axis.dilation * (axis.kernel - 1) - 1) // axis.stride + 1
            for extent, axis in zip(extents, axes)]  # fmt: skip


def _windows_of(layout: Layout, axes: Sequence[Axis], counts: Sequence[int]) -> Layout:
    """Images without padding as (..., taps down, taps along, windows down, windows along): windows may share elements."""
    (down, along), outer = layout.stride[-2:], len(layout.size) - 2
    return replace(layout, size=(*layout.size[:outer], axes[0].kernel, axes[1].kernel, *counts),
                   stride=(*layout.stride[:outer], axes[0].dilation * down, axes[1].dilation * along,
                           axes[0].stride * down, axes[1].stride * along))


def lower_im2col(node: Node) -> list[Part]:
    """im2col: each window's elements, zero where it reaches into the padding. From (..., channels, height, width) to
    (..., channels * taps, windows)."""
    args = arguments(node)
    source, axes, write = operand_of(args["self"]), axes_of(args), node.writes[0]
    counts = _counts(source.layout.size[-2:], axes)
    layout = _columns(write.layout, axes, counts)
    lowering = Lowering(node, layout.size)
    if any(axis.padding for axis in axes):
        rank = len(layout.size)
        places = [_place(lowering, axis, rank - 4 + number, rank - 2 + number) for number, axis in enumerate(axes)]
        lies = _windows_of(source.layout, axes, counts)
        others = replace(lies, stride=(*lies.stride[:-4], 0, 0, 0, 0))
        value = lowering.take(source, others, list(zip(places, source.layout.stride[-2:], source.layout.size[-2:])))
    else:
        value = lowering.load(Operand(source.value, _windows_of(source.layout, axes, counts)))
    lowering.store(write.value, layout, value)
    return [lowering.part]


def _place(lowering: Lowering, axis: Axis, tap: int, window: int) -> Instr:
    """Along a dimension of the images where an element of a window is: these dimensions number the two."""
    steps = {tap: axis.dilation, window: axis.stride}
    form = forms.collapse(lowering.shape, tuple(steps.get(dim, 0) for dim in range(len(lowering.shape))))
    return add(lowering, lowering.place(form), -axis.padding)


def lower_col2im(node: Node) -> list[Part]:
    """col2im: the sum of what each window has in an element's place. From (..., channels * taps, windows) to
    (..., channels, height, width)."""
    args = arguments(node)
    source, axes, write = operand_of(args["self"]), axes_of(args), node.writes[0]
    counts = _counts(write.layout.size[-2:], axes)
    columns = _columns(source.layout, axes, counts)
    if _side_by_side(axes) and write.layout.size[-2:] == tuple(count * axis.kernel for count, axis in zip(counts, axes)):
        rank = len(columns.size)
        lies = in_runs(write.layout, [axis.kernel for axis in axes])
        lowering = Lowering(node, lies.size)
        order = (*range(rank - 4), rank - 2, rank - 4, rank - 1, rank - 3)
        same = replace(columns, size=lies.size, stride=tuple(columns.stride[dim] for dim in order))
        lowering.store(write.value, lies, lowering.load(Operand(source.value, same)))
        return [lowering.part]
    dims = [(axis, len(write.layout.size) - 2 + number, count) for number, (axis, count) in enumerate(zip(axes, counts))]
    strides = list(zip(columns.stride[-4:-2], columns.stride[-2:]))
    return [_sums(node, Operand(source.value, columns), dims, strides)]


def lower_unfold_backward(node: Node) -> list[Part]:
    """unfold_backward: the sum of what each window has in an element's place. ``grad_in`` counts windows where the result counts
    elements, and has a window's elements in its last dimension."""
    args = arguments(node)
    grad, write = operand_of(args["grad_in"]), node.writes[0]
    if not write.layout.size:
        raise Unsupported("a tensor without dimensions")
    dim, axis = args["dim"] % len(write.layout.size), Axis(args["size"], args["step"], 0, 1)
    stride = grad.layout.stride
    return [_sums(node, grad, [(axis, dim, grad.layout.size[dim])], [(stride[-1], stride[dim])])]


def _sums(node: Node, source: Operand, dims: Sequence[tuple[Axis, int, int]], strides: Sequence[tuple[int, int]]) -> Part:
    """Sums over the windows that an element lies in. ``dims``: windows, their dimension in the result, and how many there are;
    ``strides``: in ``source`` from tap to tap, and from window to window. Other dimensions of the result are that of ``source``
    as well."""
    write = node.writes[0]
    if not source.layout.dtype.is_floating_point:
        raise Unsupported(f"no kernel for {node.target} of {str(source.layout.dtype).removeprefix('torch.')}")
    lowering = Lowering(node, write.layout.size)
    shares = [_shares(lowering, *each, *steps) for each, steps in zip(dims, strides)]
    if math.prod(map(len, shares)) > MOST_WINDOWS:
        raise Unsupported(f"elements that lie in more than {MOST_WINDOWS} windows")
    along = {dim for _, dim, _ in dims}
    extents = enumerate(zip(lowering.shape, source.layout.stride))
    size, stride = zip(*((1, 0) if dim in along else (extent, step) for dim, (extent, step) in extents))
    others = replace(source.layout, size=size, stride=stride)
    total: Instr | None = None
    for chosen in itertools.product(*shares):
        behind = replace(others, offset=others.offset + sum(one.behind for one in chosen))
        term = lowering.take(source, behind, [index for one in chosen for index in one.indices])
        for counts in (one.counts for one in chosen if one.counts is not None):
            term = lowering.expr("tl.where({1}, {0}, 0.0)", term, counts, dtype=term.dtype)
        total = term if total is None else lowering.expr("{0} + {1}", total, term, dtype=term.dtype)
    assert total is not None
    lowering.write(0, total)
    return lowering.part


def _shares(lowering: Lowering, axis: Axis, dim: int, count: int, tap: int, window: int) -> list[Share]:
    """Along a dimension the windows that an element may lie in, in ascending order; ``tap`` and ``window`` are the strides."""
    if (axis.kernel if axis.stride == 1 else axis.windows) > MOST_WINDOWS:
        raise Unsupported(f"elements that lie in more than {MOST_WINDOWS} windows")
    place = add(lowering, lowering.coord(dim), axis.padding)
    if axis.stride == 1:  # each of a window's elements in a window of its own
        return [Share(((add(lowering, place, -number * axis.dilation), window, count),), number * tap, None)
                for number in reversed(range(axis.kernel))]  # fmt: skip
    within = rest(lowering, place, axis.stride)
    shares = []
    for number, back in zip(windows(lowering, axis, lowering.coord(dim)), reversed(range(axis.windows))):
        far = add(lowering, within, back * axis.stride)
        counts = None
        if axis.dilation > 1:
            counts = lowering.expr("({0} == 0)", rest(lowering, far, axis.dilation), dtype=torch.bool)
        shares.append(Share(((number, window, count), (over(lowering, far, axis.dilation), tap, axis.kernel)), 0, counts))
    return shares


LOWERED = {"im2col": lower_im2col, "col2im": lower_col2im, "unfold_backward": lower_unfold_backward}
"""Keyed by `ir_nodes.node.Node.name`."""
