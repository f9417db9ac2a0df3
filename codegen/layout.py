"""Lays a body's iteration space out as a tile. Imports codegen's leaf modules and `ir_nodes.settings`.

Axis 1 runs along memory. A reduction's axes are its kept and its reduced dimensions; a pointwise body's are the innermost
dimension and all others, or one flat axis where everything is dense, or the two dimensions that a transposing body exchanges.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from codegen import forms
from codegen.aligned import FEWEST, KNOWN, cover, end_in_vectors, in_vectors, loaded_singly, over_rows, peel, row_stride
from codegen.body import Body, Step, reduced_flags
from codegen.cached_rows import way_through
from codegen.columns import along_kept, column_blocks, runs_apart
from codegen.instructions import FULL
from codegen.pointwise_layout import pointwise_tile
from codegen.product import Product
from codegen.reduced_squares import square_tile
from codegen.row_blocks import neighbours, row_block, tile_of_rows, warps_resident
from codegen.row_traits import (
    FILE,
    REGISTERS,
    fitting,
    has_functions,
    lanes_needed,
    loads,
    makes_gradient,
    narrow,
    slow,
    sums_only,
    values_at_once,
    walks_again,
    works_much,
)
from codegen.shares import evenly, steps_ahead, walked_by
from codegen.short_rows import short_tile
from codegen.strips import registers_held, strip_of, strip_warps, strips_of, walking
from codegen.tile import Axis, Strides, Tile, addressed, reached, rows_by_index, warps_for
from codegen.tuning import Tuning, power_of_two
from ir_nodes import settings

COLUMN_WARPS = 8
"""Warps that hold a block of columns at most, unless few blocks leave the machine idle. On an H200, the logarithm of a sum of 48
exponentials in each of 24,576 columns takes 7.8 us with 8, 11.7 with 16 and 19.3 with 32."""

AT_ONCE = 4
"""How many times as many rows are loaded at once of columns off boundaries that are walked again: the norm of 128 x 321 of 512
takes 224 us on an H200 so, 260 otherwise."""


def lay_out(body: Body, tuning: Tuning, share: int = 0, shares: int = 0) -> Tile:
    """The tile of ``body``; ``share`` above 0 makes the first kernel of a reduction split over ``shares`` programs."""
    tile = end_in_vectors(_laid_out(body, tuning, share, shares), body, tuning.covered)
    if _apart(tile, body):
        tile = replace(tile, told=1)
    if loaded_singly(tile, body):
        tile = replace(tile, singly=True)
    tile = tile if tile.told is not None or in_vectors(tile, body) else _by_element(tile, body)
    return replace(tile, packs=tuning.packs and settings.enabled("packed_rounding"), overlaps=tuning.overlaps)


def _apart(tile: Tile, body: Body) -> bool:
    """Do rows that are reduced, or results of columns, lie in pieces, so that the compiler can't see what lies side by side? Of
    columns only where that are whole vectors: else loops do better not to load ahead."""
    moved = tile.peel > 1 or tile.covered or tile.ragged or tile.walk is not None or tile.mixed or tile.axes[1].block % KNOWN
    if tile.reduced_axis is None or len(tile.axes[1].dims) < 2 or moved:
        return False
    if tile.reduced_axis == 1:
        return not tile.share % KNOWN
    inmost = tile.axes[1].dims[-1]
    walks = [tile.strides[id(step)] for step in over_rows(body, tile.strides) if tile.strides[id(step)][inmost] == 1]
    return math.gcd(KNOWN, tile.dims[inmost], *(stride for walk in walks for stride in walk if stride > 1)) >= FEWEST


def _by_element(tile: Tile, body: Body) -> Tile:
    """The ``tile``, whose operands are loaded an element at a time: not ahead, and by more threads where columns are reduced, for
    more rows at once where these are walked again."""
    rows, threads = tile.axes[0], 1
    if rows is not None and tile.reduced_axis == 0 and not tile.share:
        threads = 2
        if tile.looped and walks_again(body) and loads(body) > 1:
            threads = 4
            rows = replace(rows, block=min(AT_ONCE * rows.block, power_of_two(body.extent)))
    return replace(tile, axes=(rows, *tile.axes[1:]), stages=1, num_warps=min(threads * tile.num_warps, 32))


def _laid_out(body: Body, tuning: Tuning, share: int, shares: int) -> Tile:
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
    main = _main(body, strides) if settings.enabled("loop_order") else None
    scans = any(step.stage == "scan" for step in body.steps)  # these take their summands in order
    order = sorted((dim for dim in range(len(dims)) if dims[dim] > 1), key=lambda dim: (
        flags[dim], -(strides[id(main)][dim] or body.numel) if main and not (scans and flags[dim]) else 0, dim))
    dims, strides, flags = _merge(dims, strides, flags, order)
    if body.reduced is None:
        return pointwise_tile(body, dims, strides, tuning)
    return _reduction(body, dims, strides, flags, tuning, (share, shares))


def _main(body: Body, strides: Strides) -> Step | None:
    """The access whose memory order the tile follows: what is stored, else what is loaded, over the whole space. Elementwise ones
    have squares for operands that lie across; other bodies follow the order in which most bytes lie."""
    full = [step for step in body.steps if step.level == FULL and step.access is not None
            and (not step.access.scattered or rows_by_index(step, strides))]
    stores = [step for step in full if step.stage == "store"]
    whole = [step for step in full if reached(step, body, strides) == body.numel]
    dense = [step for step in whole if not stores or step.stage == "store"]
    candidates = dense or stores or full or [step for step in body.steps if step.stage == "store"]
    if body.reduced is not None and not dense and not stores:
        moving = [strides[id(step)] for step in body.steps if step.access is not None and any(strides.get(id(step), ()))]
        along = Counter(map(_innermost, moving))
        most = max(along.values(), default=0)  # small operands, in a cache: most of them in order
        candidates = [step for step in candidates if along[_innermost(strides[id(step)])] == most] or candidates
    if body.reduced is None or not dense:
        return max(candidates, key=lambda step: reached(step, body, strides), default=None)
    ends = [_innermost(strides[id(step)]) for step in whole]
    moved: Counter[int] = Counter()
    for dim, step in zip(ends, whole):
        moved[dim] += step.access.dtype.itemsize if step.access is not None else 0
    first = max(moved, key=lambda dim: moved[dim])
    return whole[ends.index(first)] if moved[first] > moved[_innermost(strides[id(dense[0])])] else dense[0]


def _innermost(strides: tuple[int, ...]) -> int:
    """The dimension along which neighbours lie next to one another."""
    return min(((stride, dim) for dim, stride in enumerate(strides) if stride), default=(0, 0))[1]


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


def _reduction(body: Body, dims: tuple[int, ...], strides: Strides, flags: tuple[bool, ...], tuning: Tuning,
               divided: tuple[int, int]) -> Tile:
    share, shares = divided
    kept = tuple(dim for dim, flag in enumerate(flags) if not flag)
    gone = tuple(dim for dim, flag in enumerate(flags) if flag)
    if body.mixed:
        return _mixed(body, dims, strides, (kept, gone), tuning)
    square = square_tile(body, dims, strides, (kept, gone), tuning, divided)
    if square is not None:
        return square
    short = None if share else short_tile(body, dims, strides, kept, gone, tuning)
    if short is not None:
        return short
    column = along_kept(body, dims, strides, flags, tuning, share > 0)
    extent, looped, lane, strips = body.extent, share > 0, tuning.lane, 0
    if not any(step.level == FULL or step.stage == "reduce" for step in body.steps):
        block_r, block_x = 1, min(128, power_of_two(body.kept))
    elif column:
        block_r, block_x, looped, lane = column_blocks(body, tuning, looped)
    else:
        block_r, looped, lane = row_block(body, tuning, looped)
        block_r = min(block_r, power_of_two(share)) if share else block_r
        strips = 0 if looped else strips_of(body, block_r)
        block_x = 1 if looped or strips else min(max(tile_of_rows(body, tuning, block_r) // block_r, 1), power_of_two(body.kept))
    wide, runs = block_x, 0
    if column:
        runs, block_x = runs_apart(body, dims, strides, kept, gone, wide, tuning.programs)
        block_r = min(block_r * wide // block_x, max(power_of_two(share or extent), block_r)) if looped else block_r
    if tuning.walks and not (looped or column or share) and body.kept >= tuning.walks and body.extent <= tuning.mixed_row:
        return _mixed(body, dims, strides, (kept, gone), tuning)
    one_row = (Axis(kept, body.kept, 1), Axis(gone, extent, 1), None)
    cached = None if column or share else _cached(body, Tile(dims, strides, one_row, 1, True, 0, 1), tuning)
    if cached is not None:
        return cached
    lane = lane if looped or block_x > tuning.narrow_width else _lane_held(body, tuning, lane, -(-body.kept // block_x))
    threads = shares * -(-body.kept // block_x) * 32 * warps_for(block_x * block_r, lane, 32) if share else 0
    most = values_at_once(body, threads, tuning.cores)
    if looped and lane > tuning.few_lane and (works_much(body) or column and share and has_functions(body)):
        lane //= 2
    fits = lane if column and not looped else fitting(body, lane, looped, block_r, most)
    if looped and fits < lane:  # as many threads
        block_r = max(block_r * fits // lane, 1)
    warps = strip_warps(body, block_r, fits) if strips else warps_for(block_x * block_r, fits, 32)
    if column and not looped:  # threads of more warps wait for one another
        warps = min(warps, max(COLUMN_WARPS, power_of_two(2 * COLUMN_WARPS * tuning.cores // -(-body.kept // block_x))))
    if looped and not column and not share and warps_resident(body, tuning) > warps:
        warps = warps_resident(body, tuning)
        again = tuning.rewalked_bytes // ((2 if narrow(body) else 4) * (4 if extent % KNOWN else 1))
        step = warps * 32 * fitting(body, again, True)
        block_r = min(step if makes_gradient(body) else max(block_r, step), power_of_two(extent))
    axis_x, axis_r, outer = Axis(kept, body.kept, block_x), Axis(gone, extent, block_r), None
    if runs:
        along = math.prod(dims[dim] for dim in kept[runs:])
        axis_x, outer = Axis(kept[runs:], along, block_x), Axis(kept[:runs], body.kept // along, 1)
    axes = (axis_r, axis_x, outer) if column else (axis_x, axis_r, None)
    stages = 1
    if looped and not 0 < share <= 2 * block_r:
        least, sharing = tuning.stages + (column and narrow(body)), 0
        if shares and evenly(body, tuning):
            least, sharing = 2, -(-body.kept // block_x) * shares
        stages = steps_ahead(body, tuning, block_r * block_x, least, sharing)
    near = neighbours(body, tuning) if looped and not column and not share and block_x == 1 else 0
    tile = Tile(dims, strides, axes, 0 if column else 1, looped, share, warps, stages, shares=shares, near=min(near, block_r),
                strips=strips)
    alone = not looped and block_x == 1 and extent > tuning.covered
    if column and share or alone and not column:
        tile = cover(tile, body, tuning.covered)
        return replace(tile, registers=registers_held(body, block_r, warps)) if tile.covered and strips else tile
    return peel(tile, body) if looped and not column and (not share or extent % 16) else tile


def _cached(body: Body, tile: Tile, tuning: Tuning) -> Tile | None:
    """The ``tile`` of rows that a multiprocessor's cache holds, or several's registers, or None."""
    stride = row_stride(tile, body)
    walk = way_through(body, tuning, stride) if stride else None
    if walk is None:
        return None
    axes = (tile.axes[0], replace(tile.axes[1], block=walk.block), None)
    tile = peel(replace(tile, axes=axes, num_warps=walk.warps, near=16 // walk.width, walk=walk), body)
    return tile if tile.peel else None


def _lane_held(body: Body, tuning: Tuning, lane: int, programs: int) -> int:
    """Elements per thread of rows that registers hold, in so many programs: fewer where these leave much of the machine idle."""
    if any(step.stage == "random" for step in body.steps):
        lane = min(lane, tuning.drawing_lane * (1 if narrow(body) else 2))
    few = tuning.few_lane * (1 if slow(body) else 2)
    return min(lane, tuning.pointwise_lane if body.crowded else lane, few if programs <= tuning.few else lane)


@dataclass(frozen=True, slots=True)
class MixedBlocks:
    """Rows per step, a row's block, warps, registers of a thread at most or 0, rows per program, programs."""

    down: int
    along: int
    warps: int
    registers: int
    share: int
    shares: int


def mixed_blocks(body: Body, tuning: Tuning) -> MixedBlocks:
    """Where columns are reduced beside rows."""
    held = loads(body) + sum(step.across and step.stage == "reduce" for step in body.steps)
    strip = strip_of(body, tuning, tuning.mixed_row)
    if strip:
        way = walking(body, strip, held)
        return MixedBlocks(1, way.strip, way.warps, way.registers, *walked_by(body, tuning, 1, tuning.cores * way.programs))
    along = power_of_two(lanes_needed(body, tuning.covered))
    tile = tuning.mixed_tile * (2 if along == tuning.mixed_tile else 1)  # measured: two rows of it are faster than one
    down = min(max(tile // along, 1), power_of_two(body.kept))
    lane = tuning.wide_lane if held <= 4 else tuning.lane
    fits = fitting(body, lane, False)
    warps = warps_for(down * along, fits)
    each = max((8 if held > 2 and fits == lane else 16) // warps, 1)
    registers = FILE // (each * warps * 32)  # or a multiprocessor would not run so many at a time
    return MixedBlocks(down, along, warps, registers if registers < REGISTERS else 0,
                       *walked_by(body, tuning, down, tuning.cores * each))  # fmt: skip


def _mixed(body: Body, dims: tuple[int, ...], strides: Strides, split: tuple[tuple[int, ...], tuple[int, ...]],
           tuning: Tuning) -> Tile:
    how = mixed_blocks(body, tuning)
    strips = strips_of(body, how.along)
    axes = (Axis(split[0], body.kept, how.down), Axis(split[1], body.extent, how.along), None)
    once = [id(step) for step in addressed(body) if not any(strides[id(step)][dim] for dim in split[0])]
    sharing = how.shares if sums_only(body) else 0  # a norm's gradient takes longer if it loads three rows ahead
    stages = steps_ahead(body, tuning, how.down * how.along * max(strips, 1), tuning.stages, sharing, once)
    tile = Tile(dims, strides, axes, 1, False, how.share, how.warps, stages, shares=how.shares, mixed=True, strips=strips,
                registers=how.registers)
    return cover(tile, body, tuning.covered)
