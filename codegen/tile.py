"""Lays a body's iteration space out as a tile: common dimensions, the two axes they form, block sizes and warps. Imports
codegen's leaf modules.

Axis 1 runs along memory. A reduction's axes are its kept and its reduced dimensions; a pointwise body's are the innermost
dimension and all others, or one flat axis where everything is dense, or the two dimensions that a transposing body exchanges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen import forms
from codegen.aligned import cover, end_in_vectors, peel, walked
from codegen.body import Body, Step, reduced_flags
from codegen.instructions import FULL
from codegen.product import Product
from codegen.row_blocks import lanes_needed, loads, loop_lane, makes_gradient, narrow, neighbours, part_of, row_block, warps_resident
from codegen.tuning import Tuning, power_of_two, snug_block
from ir_nodes import settings

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

    ``peel``: 0 where every block is masked. Otherwise a program has one row, and blocks that lie within it need no mask; above 1,
    rows start off 16-byte boundaries and are walked in blocks that don't: so many elements lie between two boundaries. ``row``:
    the stride from row to row of the operands that are walked so.
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
    shares: int = 0  # how many programs share a reduction
    peel: int = 0
    vectors: bool = False  # with ``peel`` above 1: blocks at a row's ends load whole vectors, too
    covered: int = 0  # as ``peel``, for programs that take every ``shares``-th row and mask whole vectors
    ragged: int = 0  # above 1: rows start on 16-byte boundaries and end off them; so many elements lie between two
    row: int = 0
    packs: bool = True  # does the machine round two floats to bfloat16 at a time?
    near: int = 0  # neighbours that share a maximum in a loop that sums exponentials, or 0: all of a block do
    mixed: bool = False  # programs walk ``share`` rows each, and sum columns beside
    parts: int = 0  # above 1: so many blocks hold a row

    def follows(self, step: Step) -> bool:
        """True where the operand's rows lie ``row`` elements apart and run along axis 1."""
        return walked(self.dims, self.strides[id(step)], self.axes) == self.row

    def shape(self) -> tuple[object, ...]:
        """What two tiles of one body may differ in."""
        return (self.axes, self.looped, self.num_warps, self.stages, self.depth, self.peel, self.ragged, self.near, self.parts)


def addressed(body: Body) -> list[Step]:
    """Steps that have an address pattern."""
    return [step for step in body.steps if step.stage in ("load", "store", "gather", "take", "coord", "random", "dot")]


def lay_out(body: Body, tuning: Tuning, share: int = 0, shares: int = 0) -> Tile:
    """The tile of ``body``; ``share`` above 0 makes the first kernel of a reduction split over ``shares`` programs."""
    tile = end_in_vectors(_laid_out(body, tuning, share, shares), body, tuning.covered)
    return replace(tile, packs=tuning.packs and settings.enabled("packed_rounding"))


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
    main = _main(body) if settings.enabled("loop_order") else None
    order = sorted((dim for dim in range(len(dims)) if dims[dim] > 1),
                   key=lambda dim: (flags[dim], -strides[id(main)][dim] if main else 0, dim))
    dims, strides, flags = _merge(dims, strides, flags, order)
    if body.reduced is None:
        return _pointwise(body, dims, strides, tuning)
    return _reduction(body, dims, strides, flags, tuning, (share, shares))


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


def _warps(elements: int, per_lane: int, most: int = 16) -> int:
    return max(1, min(most, power_of_two(elements // (32 * per_lane))))


def _lane(body: Body, strides: Strides, tuning: Tuning) -> int:
    """Elements per thread of a body that reduces nothing: as many as its operands allow, so that threads with many of them have
    registers for all."""
    lane = tuning.pointwise_lane * (2 if narrow(body) else 1)
    widths = [(step.stage, step.access.dtype.itemsize) for step in body.steps if step.access is not None and step.level == FULL
              and any(strides.get(id(step), (1,))[-1:])]  # one number for a row takes next to nothing
    moved, widest = sum(width for _, width in widths), max((width for _, width in widths), default=4)
    if ("store", 1) in widths and widest > 1:  # so that threads have as many elements of a mask as of what it masks
        lane = min(lane, 16 // widest)
    while lane > 4 and lane * moved > tuning.thread_bytes:
        lane //= 2
    return lane


def _pointwise(body: Body, dims: tuple[int, ...], strides: Strides, tuning: Tuning) -> Tile:
    last = len(dims) - 1
    lane = _lane(body, strides, tuning)
    usual = tuning.pointwise_block * (2 if lane > tuning.pointwise_lane and tuning.pointwise_block <= 4096 else 1)
    block = usual if body.numel > usual * 64 else usual // tuning.few_block  # few programs: smaller ones
    if block < usual:
        lane = min(lane, tuning.few_pointwise)
    if tuning.pointwise_block > 4096:
        block = min(usual, power_of_two(body.numel))
    run = _run(body, dims, strides, tuning) if len(dims) > 1 and dims[last] >= 16 else len(dims)
    if run == len(dims):
        axis = Axis(tuple(range(len(dims))), body.numel, block)
        flat = Tile(dims, strides, (None, axis, None), None, False, 0, _warps(block, lane))
        return peel(flat, body) if len(dims) == 1 and block == usual and body.numel % 16 else flat
    exchanged = _exchanged(body, dims, strides)
    if exchanged is not None:
        side = tuning.transpose_side if body.numel > tuning.transpose_side**2 * tuning.few_squares else tuning.transpose_side // 2
        rest = tuple(dim for dim in range(last) if dim != exchanged)
        square = [Axis((dim,), dims[dim], min(side, power_of_two(dims[dim]))) for dim in (exchanged, last)]
        outer_axis = Axis(rest, math.prod(dims[dim] for dim in rest), 1) if rest else None
        warps = _warps(square[0].block * square[1].block, 2 * tuning.pointwise_lane)
        return Tile(dims, strides, (square[0], square[1], outer_axis), None, False, 0, warps)
    along = math.prod(dims[-run:])
    inner = snug_block(along, block, 64)
    outer_extent = body.numel // along
    outer = min(max(block // inner, 1), power_of_two(outer_extent))
    inmost = tuple(range(len(dims) - run, len(dims)))
    axes = (Axis(tuple(range(len(dims) - run)), outer_extent, outer), Axis(inmost, along, inner), None)
    tile = Tile(dims, strides, axes, None, False, 0, _warps(inner * outer, lane))
    if outer > 1 and inner >= tuning.peeled:  # rows off boundaries one by one, so that most blocks lie within one
        alone = replace(tile, axes=(replace(axes[0], block=1), axes[1], None), num_warps=_warps(inner, lane))
        found = peel(alone, body)
        return found if found.peel else tile
    return peel(tile, body) if outer == 1 and inner >= tuning.peeled else tile


def _run(body: Body, dims: tuple[int, ...], strides: Strides, tuning: Tuning) -> int:
    """How many of the last dimensions are walked as one: several where rows are short and lie off 16-byte boundaries, but memory
    runs on from row to row."""
    full = [step for step in body.steps if step.stage in ("load", "store") and step.level == FULL and id(step) in strides]
    width = 16 // min((step.access.dtype.itemsize for step in full if step.access is not None), default=16)
    if not dims[-1] % width or dims[-1] >= tuning.run_on or not settings.enabled("aligned_rows"):
        return 1
    whole = [strides[id(step)] for step in full if math.prod(n for n, s in zip(dims, strides[id(step)]) if s) * 2 > body.numel]
    if any(step.stage in ("gather", "take") for step in body.steps):
        return 1
    if not any(step.stage == "store" for step in full) or any(not _dense(one, dims, len(dims)) for one in whole):
        return 1
    small = [strides[id(step)] for step in full if strides[id(step)] not in whole]
    runs = (n for n in range(2, len(dims)) if not math.prod(dims[-n:]) % width and all(_dense(one, dims, n) for one in small))
    return next(runs, len(dims))


def _dense(strides: tuple[int, ...], dims: tuple[int, ...], count: int) -> bool:
    """Does memory run on through the last ``count`` dimensions?"""
    return strides[-count:] == tuple(math.prod(dims[dim + 1 :]) for dim in range(len(dims) - count, len(dims)))


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
    for step in body.steps if settings.enabled("tiling") else ():
        if step.access is not None and id(step) in strides and strides[id(step)][last] > 1:
            along = [dim for dim, stride in enumerate(strides[id(step)]) if stride == 1 and dims[dim] >= 16]
            if along:
                return along[0]
    return None


def _reduction(body: Body, dims: tuple[int, ...], strides: Strides, flags: tuple[bool, ...], tuning: Tuning,
               divided: tuple[int, int]) -> Tile:
    share, shares = divided
    kept = tuple(dim for dim, flag in enumerate(flags) if not flag)
    gone = tuple(dim for dim, flag in enumerate(flags) if flag)
    column = _along_kept(body, dims, strides, flags)
    if body.mixed:
        return _mixed(body, dims, strides, (kept, gone), tuning)
    extent, looped, lane, parts = body.extent, share > 0, tuning.lane, 0
    if not any(step.level == FULL or step.stage == "reduce" for step in body.steps):
        block_r, block_x = 1, min(128, power_of_two(body.kept))
    elif column:
        block_r, block_x, looped = _column_blocks(body, tuning, looped)
        lane = loop_lane(body, tuning) if looped else tuning.lane
    else:
        block_r, looped, lane = row_block(body, tuning, looped)
        parts = -(-lanes_needed(body) // block_r) if not looped and block_r < extent else 0
        block_x = 1 if looped else min(max((tuning.part_tile if parts > 1 else tuning.tile) // (block_r * max(parts, 1)), 1), power_of_two(body.kept))
    if not looped and any(step.stage == "random" for step in body.steps):
        lane = min(lane, tuning.drawing_lane)
    if tuning.walks and not (looped or column or share) and body.kept >= tuning.walks and body.extent <= tuning.mixed_row:
        return _mixed(body, dims, strides, (kept, gone), tuning)
    if not looped and -(-body.kept // block_x) <= tuning.few:
        lane = min(lane, tuning.few_lane)
    warps = _warps(block_x * block_r * max(parts, 1), tuning.pointwise_lane if body.crowded else lane, 32)
    if parts > 1:
        warps = max(1, min(warps, block_r * block_x // (32 * tuning.part_vector // (1 if narrow(body) else 2))))
    if looped and not column and not share and warps_resident(body, tuning) > warps:
        warps = warps_resident(body, tuning)
        step = warps * 32 * tuning.rewalked_lane
        block_r = min(step if makes_gradient(body) else max(block_r, step), power_of_two(extent))
    axis_x, axis_r = Axis(kept, body.kept, block_x), Axis(gone, extent, block_r)
    axes = (axis_r, axis_x, None) if column else (axis_x, axis_r, None)
    stages = tuning.stages if looped and not body.crowded and not 0 < share <= 2 * block_r else 1
    near = neighbours(body, tuning) if looped and not column and not share and block_x == 1 else 0
    tile = Tile(dims, strides, axes, 0 if column else 1, looped, share, warps, stages, shares=shares, near=min(near, block_r),
                parts=parts)
    alone = not looped and block_x == 1 and extent > tuning.covered
    if share and column or alone and not column and (parts > 1 or not power_of_two(extent + 7) > block_r):
        return cover(tile, body, tuning.covered)
    return peel(tile, body) if looped and not column and (not share or extent % 16) else tile


def mixed_blocks(body: Body, tuning: Tuning) -> tuple[int, int, int, int, int]:
    """(rows per step, a row's block, warps, rows per program, programs) where columns are reduced beside rows."""
    along = part_of(body, tuning, tuning.mixed_row) or power_of_two(lanes_needed(body))
    parts = -(-lanes_needed(body) // along)
    down = min(max(tuning.mixed_tile // (along * parts), 1), power_of_two(body.kept))
    held = loads(body) + sum(step.across and step.stage == "reduce" for step in body.steps)
    warps = _warps(down * along * parts, tuning.wide_lane if held <= 4 else tuning.lane)
    if parts > 1:
        warps = tuning.mixed_warps or max(1, min(warps, along * down // (32 * tuning.part_vector // (1 if narrow(body) else 2))))
    programs = tuning.cores * max((8 if held > 2 else 16) // warps, 1)
    share = -(-body.kept // (programs * down)) * down
    return down, along, warps, share, whole_shares(-(-body.kept // share), body.extent)


def whole_shares(shares: int, row: int) -> int:
    """As many programs, or a few more, so that each may take rows that lie alike."""
    return -(-shares // 8) * 8 if row % 8 else shares


def _mixed(body: Body, dims: tuple[int, ...], strides: Strides, split: tuple[tuple[int, ...], tuple[int, ...]],
           tuning: Tuning) -> Tile:
    down, along, warps, share, shares = mixed_blocks(body, tuning)
    axes = (Axis(split[0], body.kept, down), Axis(split[1], body.extent, along), None)
    width = sum(step.access.dtype.itemsize for step in body.steps if step.stage == "load" and step.level == FULL and step.access)
    ahead = min(tuning.stages, 1 + tuning.shared_bytes // (down * along * -(-lanes_needed(body) // along) * max(width, 1)))
    parts = -(-lanes_needed(body) // along)
    return cover(Tile(dims, strides, axes, 1, False, share, warps, ahead, shares=shares, mixed=True, parts=parts), body, tuning.covered)


def _column_blocks(body: Body, tuning: Tuning, split: bool) -> tuple[int, int, bool]:
    """(rows per step, columns, looped?): narrow tiles where columns are few, so that more programs share them."""
    width = min(tuning.column_width, power_of_two(body.kept))
    while not split and width > 16 and -(-body.kept // width) < tuning.cores:
        width //= 2
    crowded = loads(body) > 1 and any(step.stage == "store" and step.level == FULL for step in body.steps)
    limit = max(tuning.column_tile // (2 if crowded else 1) // width, 1)
    looped = split or power_of_two(body.extent) > limit * 2
    return min(power_of_two(body.extent), limit if looped else limit * 2), width, looped


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
