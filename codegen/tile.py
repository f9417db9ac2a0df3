"""Lays a body's iteration space out as a tile: common dimensions, the two axes they form, block sizes and warps. Imports
codegen's leaf modules.

Axis 1 runs along memory. A reduction's axes are its kept and its reduced dimensions; a pointwise body's are the innermost
dimension and all others, or one flat axis where everything is dense, or the two dimensions that a transposing body exchanges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen import forms
from codegen.body import Body, Step, reduced_flags
from codegen.instructions import FULL
from codegen.product import Product
from codegen.tuning import Tuning, power_of_two, snug_block

Strides = dict[int, tuple[int, ...]]
"""Per step (by id) its stride along each dimension."""


@dataclass(frozen=True, slots=True)
class Axis:
    """``dims`` (positions in `Tile.dims`, outermost first) walked by one index, ``block`` of them per program."""

    dims: tuple[int, ...]
    extent: int
    block: int


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """``axes`` are (axis 0, axis 1, outer axis); axis 0 is None for a flat pointwise body. Each program has one index of the
    outer axis, if there is one. ``reduced_axis``: 0, 1 or None.

    ``looped``: the reduced axis is walked block by block. ``share``: how many summands each program of a split reduction
    takes; 0 where a program sees all of them.
    """

    dims: tuple[int, ...]
    strides: Strides
    axes: tuple[Axis | None, Axis, Axis | None]
    reduced_axis: int | None
    looped: bool
    share: int
    num_warps: int
    stages: int = 1  # how many steps ahead the loop loads
    depth: int = 0  # summands of a matrix product that one step of its loop takes

    def shape(self) -> tuple[object, ...]:
        """What two tiles of one body may differ in."""
        return (self.axes, self.looped, self.num_warps, self.stages, self.depth)


def addressed(body: Body) -> list[Step]:
    """Steps that have an address pattern."""
    return [step for step in body.steps if step.stage in ("load", "store", "gather", "take", "coord", "random", "dot")]


def lay_out(body: Body, tuning: Tuning, share: int = 0) -> Tile:
    """The tile of ``body``; ``share`` above 0 makes the first kernel of a split reduction."""
    steps = addressed(body)
    cuts: tuple[int, ...] | None = forms.reduced_cuts(body.reduced or (), body.numel)
    for step in steps:
        cuts = None if cuts is None else forms.merge_cuts(cuts, forms.cuts(step.form))
    assert cuts is not None, "fusion let operands through whose dimensions do not nest"
    dims = forms.dims_of(cuts, body.numel)
    strides = {id(step): forms.strides_over(step.form, dims) for step in steps}
    flags = reduced_flags(dims, body.reduced)
    products = [step for step in body.steps if step.stage == "dot"]
    if products:
        return _product(products[0], *_merge(dims, strides, flags, [dim for dim in range(len(dims)) if dims[dim] > 1]), tuning)
    main = _main(body)
    order = sorted((dim for dim in range(len(dims)) if dims[dim] > 1),
                   key=lambda dim: (flags[dim], -strides[id(main)][dim] if main else 0, dim))
    dims, strides, flags = _merge(dims, strides, flags, order)
    if body.reduced is None:
        return _pointwise(body, dims, strides, tuning)
    return _reduction(body, dims, strides, flags, tuning, share)


def _main(body: Body) -> Step | None:
    """The access whose memory order the tile follows: what is stored, else what is loaded, over the whole space."""
    full = [step for step in body.steps if step.level == FULL and step.access is not None and not step.access.scattered]
    stores = [step for step in full if step.stage == "store"]
    dense = [step for step in stores or full if math.prod(n for n, s in step.form if s) == body.numel]
    candidates = dense or stores or full or [step for step in body.steps if step.stage == "store"]
    return candidates[0] if candidates else None


def _merge(dims: tuple[int, ...], strides: Strides, flags: tuple[bool, ...], order: list[int]) -> tuple[
        tuple[int, ...], Strides, tuple[bool, ...]]:
    """Dimensions in ``order``, neighbours joined where every operand runs through both as through one."""
    runs: list[list[int]] = []
    for dim in order:
        if runs and flags[runs[-1][-1]] == flags[dim] and all(
                step[runs[-1][-1]] == step[dim] * dims[dim] for step in strides.values()):
            runs[-1].append(dim)
        else:
            runs.append([dim])
    merged = tuple(math.prod(dims[dim] for dim in run) for run in runs)
    return merged, {key: tuple(s[run[-1]] for run in runs) for key, s in strides.items()}, tuple(flags[run[0]] for run in runs)


def _warps(elements: int, per_lane: int) -> int:
    return max(1, min(16, power_of_two(elements // (32 * per_lane))))


def _pointwise(body: Body, dims: tuple[int, ...], strides: Strides, tuning: Tuning) -> Tile:
    last = len(dims) - 1
    if len(dims) <= 1 or dims[last] < 16:
        block = tuning.pointwise_block if body.numel > tuning.pointwise_block * 64 else min(tuning.pointwise_block, 256)
        if tuning.pointwise_block > 4096:
            block = min(tuning.pointwise_block, power_of_two(body.numel))
        axis = Axis(tuple(range(len(dims))), body.numel, block)
        return Tile(dims, strides, (None, axis, None), None, False, 0, _warps(block, tuning.pointwise_lane))
    exchanged = _exchanged(body, dims, strides)
    if exchanged is not None:
        side = tuning.transpose_side
        rest = tuple(dim for dim in range(last) if dim != exchanged)
        square = [Axis((dim,), dims[dim], min(side, power_of_two(dims[dim]))) for dim in (exchanged, last)]
        warps = _warps(square[0].block * square[1].block, tuning.pointwise_lane)
        outer_axis = Axis(rest, math.prod(dims[dim] for dim in rest), 1) if rest else None
        return Tile(dims, strides, (square[0], square[1], outer_axis), None, False, 0, warps)
    inner = snug_block(dims[last], tuning.pointwise_block, 64)
    outer_extent = body.numel // dims[last]
    outer = min(max(tuning.pointwise_block // inner, 1), power_of_two(outer_extent))
    axes = (Axis(tuple(range(last)), outer_extent, outer), Axis((last,), dims[last], inner), None)
    return Tile(dims, strides, axes, None, False, 0, _warps(inner * outer, tuning.pointwise_lane))


def _product(product: Step, dims: tuple[int, ...], strides: Strides, _: tuple[bool, ...], tuning: Tuning) -> Tile:
    """Rows on axis 0 and columns on axis 1, in the product's own order."""
    assert isinstance(product.payload, Product)
    rows = tuple(dim for dim, stride in enumerate(strides[id(product)]) if stride > product.payload.columns)
    columns = tuple(dim for dim in range(len(dims)) if dim not in rows)
    extents = [math.prod(dims[dim] for dim in axis) for axis in (rows, columns)]
    wanted = (tuning.product_rows, tuning.product_columns)
    blocks = [min(block, max(power_of_two(extent), 16)) for block, extent in zip(wanted, extents)]
    axes = (Axis(rows, extents[0], blocks[0]), Axis(columns, extents[1], blocks[1]), None)
    warps = max(1, min(8, power_of_two(blocks[0] * blocks[1] // 2048)))
    return Tile(dims, strides, axes, None, False, 0, warps, 1, tuning.product_depth)


def _exchanged(body: Body, dims: tuple[int, ...], strides: Strides) -> int | None:
    """The dimension that some operand runs along in memory while the tile's rows run along the last one."""
    last = len(dims) - 1
    for step in body.steps:
        if step.access is not None and id(step) in strides and strides[id(step)][last] > 1:
            along = [dim for dim, stride in enumerate(strides[id(step)]) if stride == 1 and dims[dim] >= 16]
            if along:
                return along[0]
    return None


def _reduction(body: Body, dims: tuple[int, ...], strides: Strides, flags: tuple[bool, ...], tuning: Tuning,
               share: int) -> Tile:
    kept = tuple(dim for dim, flag in enumerate(flags) if not flag)
    gone = tuple(dim for dim, flag in enumerate(flags) if flag)
    column = _along_kept(body, dims, strides, flags)
    extent, block_r, block_x, looped = body.extent, 1, 1, share > 0
    if not any(step.level == FULL or step.stage == "reduce" for step in body.steps):
        block_x = min(128, power_of_two(body.kept))
    elif column:
        block_x = min(tuning.column_width, power_of_two(body.kept))
        limit = max(tuning.column_tile // block_x, 1)
        looped = looped or power_of_two(extent) > limit * 2
        block_r = min(power_of_two(extent), limit if looped else limit * 2)
    else:
        looped = looped or power_of_two(extent) > tuning.persistent
        block_r = min(tuning.looped if looped else tuning.persistent, power_of_two(extent))
        block_x = min(max(tuning.tile // block_r, 1), power_of_two(body.kept))
    axis_x, axis_r = Axis(kept, body.kept, block_x), Axis(gone, extent, block_r)
    axes = (axis_r, axis_x, None) if column else (axis_x, axis_r, None)
    warps = _warps(block_x * block_r, tuning.loop_lane if looped else tuning.lane)
    stages = tuning.column_stages if looped and column else 1
    return Tile(dims, strides, axes, 0 if column else 1, looped, share, warps, stages)


def _along_kept(body: Body, dims: tuple[int, ...], strides: Strides, flags: tuple[bool, ...]) -> bool:
    """True where neighbouring results, not neighbouring summands, lie next to one another in memory."""
    votes = 0
    for step in body.steps:
        if step.access is None or step.level != FULL:
            continue
        moving = [(stride, dim) for dim, stride in enumerate(strides[id(step)]) if stride > 0]
        if moving:
            weight = math.prod(dims[dim] for _, dim in moving)
            votes += -weight if flags[min(moving)[1]] else weight
    return votes > 0
