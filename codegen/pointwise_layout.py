"""Lays out bodies that reduce nothing: flat, in rows, or in squares where operands disagree on the fast axis. Imports codegen's
leaf modules and `ir_nodes.settings`."""

from __future__ import annotations

import math
from dataclasses import replace

from codegen.aligned import KNOWN, in_a_vector, over_rows, peel
from codegen.body import Body, Step
from codegen.bounds import growth
from codegen.draws import WORDS, Stream
from codegen.forms import touched
from codegen.instructions import FULL
from codegen.row_traits import narrow, slow
from codegen.tile import Axis, Strides, Tile, warps_for
from codegen.tuning import Tuning, power_of_two, snug_block
from ir_nodes import settings

MANY, WRITTEN = 5, 2
"""Operands, and results among them, of which more are moved faster with fewer elements a thread: an optimizer's in bfloat16, by
3 %. A rotary embedding's one result, from as many operands, takes a half longer so."""

SIDE = 16
"""The shortest rows and columns of squares."""

SHARED = 64
"""How often a table's numbers are used before they count as lying in a cache."""

ALONE = 256
"""The shortest rows that programs take one by one where an operand's place jumps from element to element."""

TAPS, BESIDE = 4, 8
"""Reads by index of which an element may have no more, or threads have few, so that each read's neighbours lie so many bytes from
those of the next thread. On an H200, averages of 3 x 3 in float32: 53 us with 16 bytes, 43 with 8; the largest of 3 x 3, every
second, in bfloat16: 137 us with 64, 79 with 16, 64 with 8; that of 5 x 5, channels side by side: 145 us with 16, 109 with 8."""

ANGLES = ("libdevice.sin(", "libdevice.cos(", "libdevice.tan(")
"""What reduces large angles in a branch that every element has code for: with many elements a thread, instructions no longer lie
in a cache. On an H200, sines and cosines of 16.8 million bfloat16 numbers take 54 us with 16 elements a thread, 38 with 8; of an
elu and a sine with both functions' gradients 86 and 72."""

WORD_BLOCK = 512
"""Elements of each of a Philox call's four words in a program. On most GPUs the number of ATen's threads is a multiple of it."""


def _lane(body: Body, dims: tuple[int, ...], strides: Strides, tuning: Tuning, in_parts: bool) -> int:
    """Elements per thread of a body that reduces nothing: as many as its operands allow, so that threads with many of them have
    registers for all."""
    lane = tuning.pointwise_lane * (2 if narrow(body) else 1)
    widths = _moved(body, dims, strides)
    moved, widest = sum(width for _, width in widths), max((width for _, width in widths), default=4)
    if ("store", 1) in widths and widest > 1:  # so that threads have as many elements of a mask as of what it masks
        lane = min(lane, 16 // widest)
    many = len(widths) > MANY and sum(stage == "store" for stage, _ in widths) > WRITTEN
    most = tuning.thread_bytes // (2 if many or in_parts else 1)
    least = max(4, in_a_vector(over_rows(body, strides))) if in_parts else 4
    while lane > least and lane * moved > most:
        lane //= 2
    if any(function in step.text for step in body.steps for function in ANGLES):
        lane = min(lane, tuning.pointwise_lane)
    apart = _taps(body, strides)
    return min(lane, max(2, BESIDE // apart)) if apart else lane


def _taps(body: Body, strides: Strides) -> int:
    """Where each element reads many others along memory, as windows do, or many pixels' channels: how many bytes lie between two
    neighbours' at most; else 0."""
    takes = [step for step in body.steps if step.stage == "take" and not step.takes_bits and step.access is not None]
    found = [step.access.dtype.itemsize * growth(index) for step in takes if step.access is not None
             for index, (stride, _) in zip(step.args, step.payload) if stride == 1]  # type: ignore[call-overload]
    found += [step.access.dtype.itemsize for step in takes if step.access is not None and strides[id(step)][-1:] == (1,)]
    return max(found) if len(found) > TAPS else 0


def _moved(body: Body, dims: tuple[int, ...], strides: Strides) -> list[tuple[str, int]]:
    """How, and with how many bytes an element, memory is read or written that a thread waits for. One number for a row takes next
    to nothing; a cache has tables that many rows share, and a tensor's parts, of which each element reads one, are as one: a
    rotary embedding's gradient takes half as long with as many elements a thread as that leaves."""
    found: dict[tuple[object, ...], tuple[str, int]] = {}
    for step in body.steps:
        if step.access is not None and step.level == FULL:
            along = strides.get(id(step), (1,))
            shared = len(along) == len(dims) and touched(tuple(zip(dims, along))) * SHARED <= body.numel
            if any(along[-1:]) and not shared:
                start = None if step.args and step.stage == "load" else step.access.byte_offset
                found[step.stage, step.access.value, along, start] = (step.stage, step.access.dtype.itemsize)
    return list(found.values())


def _in_parts(body: Body, dims: tuple[int, ...], strides: Strides) -> bool:
    """Does each element read one part or another of what lies as programs walk, in whole vectors? Half of what such a thread
    loads is nothing, and is waited for: a rotary embedding takes up to 9 % less time with one vector of each operand, its
    gradient, which reads rows in another order than it writes them, up to 18 % more. With half a vector of each, as the bytes of
    tables that are no part of a cache would have it, it takes 47 us and not 35, its gradient 64 and 41."""
    moved = over_rows(body, strides)
    parts = [step for step in moved if step.stage == "load" and step.args]
    alongs = {strides[id(step)] for step in moved if all(strides[id(step)])}
    return bool(parts) and len(alongs) == 1 and not dims[-1] % (2 * in_a_vector(moved))


def pointwise_tile(body: Body, dims: tuple[int, ...], strides: Strides, tuning: Tuning) -> Tile:
    """Flat, in rows, or in squares; a single element has no dimension."""
    in_parts = bool(dims) and _in_parts(body, dims, strides)
    lane = _lane(body, dims, strides, tuning, in_parts)
    usual = tuning.pointwise_block * (2 if lane > tuning.pointwise_lane and tuning.pointwise_block <= 4096 else 1)
    if (in_parts or _taps(body, strides)) and lane < tuning.pointwise_lane:  # as many threads
        usual //= 2
    block = usual
    if body.numel <= usual * 64:  # few programs: smaller ones, with more threads
        block, lane = usual // 4, min(lane, max(tuning.few_lane // (4 if slow(body) else 1 if narrow(body) else 2), 1))
    if tuning.pointwise_block > 4096:
        block = min(usual, power_of_two(body.numel))
    exchanged = _exchanged(body, dims, strides)
    jumps = bool(dims) and _jumps(body, strides)
    run = 1 if exchanged is not None else _run(body, dims, strides, tuning, jumps)
    if run == len(dims):
        axis = Axis(tuple(range(len(dims))), body.numel, block)
        apart = _words_apart(body, dims, strides)
        if apart:
            axis = replace(axis, block=math.gcd(apart, WORD_BLOCK))
            return Tile(dims, strides, (None, axis, None), None, False, 0, warps_for(axis.block, 4), strips=WORDS, words=apart)
        flat = Tile(dims, strides, (None, axis, None), None, False, 0, warps_for(block, lane))
        return peel(flat, body) if block == usual and body.numel % KNOWN else flat
    if exchanged is not None:
        return _squares(body, dims, strides, exchanged, tuning)
    along = math.prod(dims[-run:])
    inner = snug_block(along, block, tuning.narrowest, trim=True)  # narrower ones move less with each instruction
    outer_extent = body.numel // along
    outer = min(max(block // inner, 1), power_of_two(outer_extent))
    inmost = tuple(range(len(dims) - run, len(dims)))
    axes = (Axis(tuple(range(len(dims) - run)), outer_extent, outer), Axis(inmost, along, inner), None)
    several = Tile(dims, strides, axes, None, False, 0, warps_for(inner * outer, lane))
    alone = replace(several, axes=(replace(axes[0], block=1), axes[1], None), num_warps=warps_for(inner, lane))
    tile = alone if jumps else several
    if inner < tuning.peeled * (1 if outer == 1 else 2 if along > inner else 4):
        return tile
    if outer == 1:
        return peel(tile, body)
    # Rows off boundaries one by one, so that most blocks lie within one, unless these are all at a row's end.
    found = peel(alone, body)
    return found if found.peel else tile


def _words_apart(body: Body, dims: tuple[int, ...], strides: Strides) -> int:
    """How far apart in a flat body the elements lie that share a call of Philox; 0 where neighbours do, or nothing is drawn."""
    draws = [step for step in body.steps if step.stage == "random"]
    streams = [step.payload for step in draws if isinstance(step.payload, Stream)]
    if len(dims) > 1 or len(streams) != 1 or streams[0].vector > 1 or strides[id(draws[0])] != (1,):
        return 0
    return streams[0].threads if streams[0].threads < body.numel else 0


def _squares(body: Body, dims: tuple[int, ...], strides: Strides, exchanged: tuple[int, int], tuning: Tuning) -> Tile:
    """Blocks of the ``exchanged`` dimension and of so many last ones, smaller where there are few."""
    other, count = exchanged
    few = body.numel <= tuning.transpose_side**2 * tuning.cores // 2
    side = tuning.transpose_side // (2 if few else 1)
    inmost = tuple(range(len(dims) - count, len(dims)))
    rest = tuple(dim for dim in range(len(dims) - count) if dim != other)
    square = [Axis(axis, extent, min(side, power_of_two(extent)))
              for axis, extent in (((other,), dims[other]), (inmost, math.prod(dims[-count:])))]
    outer_axis = Axis(rest, math.prod(dims[dim] for dim in rest), 1) if rest else None
    warps = warps_for(square[0].block * square[1].block, 2 * tuning.pointwise_lane)
    return Tile(dims, strides, (square[0], square[1], outer_axis), None, False, 0, warps, told=0)


def _run(body: Body, dims: tuple[int, ...], strides: Strides, tuning: Tuning, jumps: bool) -> int:
    """How many of the last dimensions are walked as one: all where rows are very short, or short and some operand's place
    ``jumps`` from each of their elements to the next; several where rows are short and lie off 16-byte boundaries, but memory
    runs on from row to row: as few as start on boundaries, and let smaller operands run on, too, if there are such."""
    if len(dims) <= 1 or dims[-1] < (ALONE if jumps else 16):
        return len(dims)
    full = [step for step in over_rows(body, strides) if step.stage in ("load", "store")]
    width = in_a_vector(full)
    picks = any(step.stage in ("gather", "take") for step in body.steps)
    if picks or not dims[-1] % width or dims[-1] >= tuning.run_on or not settings.enabled("aligned_rows"):
        return 1
    found = dict.fromkeys(strides[id(step)] for step in full)
    large = [one for one in found if touched(tuple(zip(dims, one))) * 2 > body.numel]
    if not large or not all(_runs_on(one, dims, len(dims)) for one in large):
        return 1
    small = [one for one in found if one not in large]
    aligned = (count for count in range(2, len(dims)) if not math.prod(dims[-count:]) % width)
    return next((count for count in aligned if all(_runs_on(one, dims, count) for one in small)), len(dims))


def _jumps(body: Body, strides: Strides) -> bool:
    """Does the place of some operand follow from the last dimension's index in another way than one by one? In blocks of several
    rows the compiler, which can't tell where neighbours lie then, lets threads walk down the columns. What all rows have in
    common, such as a layer's few weights, is loaded once for all of them."""
    moving = _moving(body, strides)
    found = [step for step in over_rows(body, strides) if step.stage in ("load", "take")]
    picked = any(id(arg) in moving for step in found if step.stage == "take" for arg in step.args)
    return picked or any(strides[id(step)][-1] > 1 and any(strides[id(step)][:-1]) for step in found)


def _moving(body: Body, strides: Strides) -> set[int]:
    """The steps, by `id`, that differ along the last dimension."""
    moving: set[int] = set()
    for step in body.steps:
        if any(strides.get(id(step), ())[-1:]) or any(id(arg) in moving for arg in step.args):
            moving.add(id(step))
    return moving


def _runs_on(strides: tuple[int, ...], dims: tuple[int, ...], count: int) -> bool:
    """Does memory run on through the last ``count`` dimensions?"""
    return strides[-count:] == tuple(math.prod(dims[dim + 1 :]) for dim in range(len(dims) - count, len(dims)))


def _exchanged(body: Body, dims: tuple[int, ...], strides: Strides) -> tuple[int, int] | None:
    """The dimension that some operand runs along in memory while the tile's rows run along the last one, and of how many last
    dimensions a square has its rows then: more than one where windows of narrow images jump from pixel to pixel."""
    last, moving = len(dims) - 1, _moving(body, strides)
    for step in body.steps if settings.enabled("tiling") else ():
        if step.access is None or id(step) not in strides:
            continue
        count = 0
        if last > 0 and strides[id(step)][last] > 1:
            count = 1 if dims[last] >= SIDE else 0
        elif _by_index(step, moving) > 1:
            count = next((count for count in range(1, last + 1) if math.prod(dims[-count:]) >= SIDE), 0)
        along = [dim for dim, stride in enumerate(strides[id(step)][: last + 1 - count]) if stride == 1 and dims[dim] >= SIDE]
        if count and along:
            return along[0], count
    return None


def _by_index(step: Step, moving: set[int]) -> int:
    """The least stride by which an index that differs along the last dimension moves what the ``step`` takes; 0: none does."""
    if step.stage != "take" or step.takes_bits:
        return 0
    return min((stride for index, (stride, _) in zip(step.args, step.payload) if id(index) in moving), default=0)  # type: ignore[call-overload]
