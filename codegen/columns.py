"""How much of its columns a program that reduces columns works on at a time, with how many threads. Imports codegen's leaf
modules.

A warp along a row, whose threads load 16 bytes each, keeps a column in one thread: its summands need no exchange, and pieces of a
row are long enough for the memory. Where columns are so few that such pieces would leave programs idle, they are narrower.
"""

from __future__ import annotations

import math
from typing import Sequence

from codegen.aligned import KNOWN, in_a_vector
from codegen.body import Body
from codegen.forms import touched
from codegen.instructions import FULL
from codegen.row_blocks import loop_lane
from codegen.row_traits import loads, narrow, reads_again, sums_only, walks_again
from codegen.tile import Strides, reached, rows_by_index
from codegen.tuning import PIECE, PIECES, Tuning, power_of_two, snug_block

HELD = 64
"""Elements of its columns that a thread holds at a time, half as many where several operands are read."""

IN_TURN, WARP_HELD = 5, 64
"""From how many reductions in turn on a warp holds short columns by itself, so many elements a thread: it exchanges numbers with
no other one. On an H200, a norm over 96 of 64 x 96 x 56 x 56 with its gradient, five sums: 194 us by eight warps, 141 by four,
121 by one; with four sums of four operands 128 by more and 141 by one."""

NARROWEST = 16
"""Columns of a program at least, unless these are scanned, step after step. On an H200, running sums of 64 columns of 8,192 int64
take 139 us by programs for 16, 44 for 4, 25 for one."""

LONG = 8192
"""Elements from which on columns of very short runs take less time one run by one. On an H200, softmax in bfloat16 over 3,001 of
2,795 x 3,001 x 4: 71 us, 192 with several runs in a block; over 300 of 20,000 x 300 x 3 104 and 62."""


def column_width(body: Body, tuning: Tuning, split: bool) -> int:
    """Columns of one program, as many as leave enough programs. If the reduction is ``split``, they share columns."""
    least = tuning.narrow_width
    if not split and _in_turn(body):
        return NARROWEST
    again = not split and _short(body)
    narrowed = again or split and body.kept % 8 == 0
    widest = least if narrowed else tuning.scanned_width if _scans(body) else tuning.column_width
    width = snug_block(body.kept, widest, min(least, widest))
    sharing = max(body.extent // tuning.split_rows, 1)
    while split and width > least and -(-body.kept // width) * sharing < tuning.programs:
        width //= 2
    enough, narrowest = tuning.programs if body.kept % 8 == 0 else 2 * tuning.cores, 1 if _scans(body) else NARROWEST
    while not split and width > narrowest and -(-body.kept // width) < (enough if width > least else tuning.cores):
        width //= 2
    return width


def column_blocks(body: Body, tuning: Tuning, split: bool) -> tuple[int, int, bool, int]:
    """(rows per step, columns, looped?, elements per thread)."""
    width, vector = column_width(body, tuning, split), _vector(body)
    apart = split and body.kept % vector != 0 and body.kept < tuning.covered  # element by element
    lone = not (split or _scans(body)) and -(-body.kept // width) < tuning.programs  # each has a multiprocessor's room
    tile = tuning.column_tile // (2 if moves_much(body) and not lone else 1)
    tile *= 2 if _scans(body) or apart or _weighed(body) else 1
    rows, extent = max(tile // width, 1), power_of_two(body.extent)
    along = width >= 32 * vector and not _scans(body)  # a warp lies along a row
    if not split and _in_turn(body):
        return extent, width, False, WARP_HELD
    if split or extent > (_held(body) if along else 4 * tuning.column_tile // width):
        return min(extent, rows), width, True, loop_lane(body, tuning)
    return extent, width, False, extent * vector if along else tuning.lane


def runs_apart(body: Body, dims: Sequence[int], strides: Strides, kept: Sequence[int], gone: Sequence[int], block: int,
               programs: int) -> tuple[int, int]:  # fmt: skip
    """Of how many of the ``kept`` dimensions, the outer ones, a program takes one index, so that the others are a run in memory,
    and the block of it, ``block`` or narrower: an index that is split off in each element does not tell the compiler how they
    lie, who then loads one here and one there. Where an index chooses rows, it is loaded once for each, not for each element, and
    so is what all of a run share. (0, ``block``) where the compiler knows and none does, or where blocks would be longer by far.

    Very short runs count where they follow one another along what is reduced, if that is scanned, or long and done by so many
    ``programs``."""
    runs = len(kept) - 1
    while runs > 0 and all(one[kept[runs - 1]] == one[kept[runs]] * dims[kept[runs]] for one in strides.values()):
        runs -= 1
    along = math.prod(dims[dim] for dim in kept[runs:])
    narrower = min(block, power_of_two(along))
    once = any(rows_by_index(step, strides) or _shared(strides.get(id(step), ()), kept, gone, runs) for step in body.steps)
    if runs <= 0 or along % KNOWN == 0 and not (once and along >= NARROWEST):
        return 0, block
    if along < NARROWEST:
        whole = along == narrower and _scans(body) or body.extent * along >= LONG and body.kept >= programs * along
        moved = [strides[id(step)] for step in body.steps if step.access is not None and id(step) in strides]
        return (runs, narrower) if whole and _follow(moved, kept, gone, along) else (0, block)
    while narrower > NARROWEST and _wasted(along, narrower):
        narrower //= 2
    return (0, block) if _wasted(along, narrower) else (runs, narrower)


def _shared(moved: tuple[int, ...], kept: Sequence[int], gone: Sequence[int], runs: int) -> bool:
    """Does an operand have a number for each run and each of what is reduced, such as the weight of a row in a sum?"""
    return [any(moved[dim] for dim in some) for some in (gone, kept[:runs], kept[runs:]) if moved] == [True, True, False]


def _follow(moved: Sequence[tuple[int, ...]], kept: Sequence[int], gone: Sequence[int], along: int) -> bool:
    """Does each run, ``along`` so many elements, begin in all that is ``moved`` where the one before it in its columns ends?"""
    reduced = [one for one in moved if any(one[dim] for dim in gone)]
    return bool(reduced) and all(one[kept[-1]] == 1 and one[gone[-1]] == along for one in reduced)


def _wasted(along: int, block: int) -> bool:
    """Would more than a quarter of the threads have nothing to do?"""
    return -(-along // block) * block * 3 > along * 4


def moves_much(body: Body) -> bool:
    """Are several operands read, and results stored for all elements, too?"""
    return loads(body) > 1 and any(step.stage == "store" and step.level == FULL for step in body.steps)


def _weighed(body: Body) -> bool:
    """Is one 16-bit operand summed that has a factor for each row? It reaches the row's threads through shared memory, for more
    rows at a time in fewer turns. On an H200, 65,536 x 1,024 times a vector takes 43 us, 55 with as few as without it; 2^20 x 64
    times three 64, 91."""
    factors = any(step.stage == "load" and step.level == FULL and touched(step.form) == body.extent for step in body.steps)
    return factors and loads(body) == 1 and narrow(body) and sums_only(body)


def _held(body: Body) -> int:
    """Elements of a column that one thread holds."""
    return HELD // _vector(body) // (2 if loads(body) > 1 or body.crowded else 1)


def _walked_again(body: Body) -> int:
    """The longest columns that more threads hold, which exchange sums, because a loop would walk them a second time."""
    return 128 if loads(body) > 1 else 0 if narrow(body) else 32


def _short(body: Body) -> bool:
    """Do more threads hold columns that a loop would walk a second time?"""
    return walks_again(body) and _held(body) < body.extent <= _walked_again(body)


def _in_turn(body: Body) -> bool:
    """Are short columns reduced several times, one result being needed for the next?"""
    return _short(body) and sum(step.stage == "reduce" for step in body.steps) >= IN_TURN and not _scans(body)


def _scans(body: Body) -> bool:
    """Scans' threads wait for one another at every step, which is better taken by more of them."""
    return any(step.stage == "scan" for step in body.steps)


def _vector(body: Body) -> int:
    accesses = [step for step in body.steps if step.access is not None]
    return in_a_vector([step for step in accesses if step.level == FULL] or accesses)


def along_kept(body: Body, dims: tuple[int, ...], strides: Strides, flags: tuple[bool, ...], tuning: Tuning, split: bool) -> bool:
    """True where neighbouring results, not neighbouring summands, lie next to one another in memory, and more than a few of them;
    what takes none says it itself. So does, where it is ``split``, what has the same operands for all results, such as counts of
    classes: it has been divided as it says."""
    if reads_again(body) and not _scans(body):
        columns, rows = (_jumping(body, strides, max((dim for dim, flag in enumerate(flags) if flag is kind), default=0))
                         for kind in (False, True))  # fmt: skip
        if columns != rows:
            return columns < rows
    votes, least = [], PIECE if _better_rows(body, tuning) else 0
    walks = [step for step in body.steps if step.access is not None and step.level == FULL]
    if split and not any(stride > 0 and not flag for step in walks for stride, flag in zip(strides[id(step)], flags)):
        return body.column
    for step in walks:
        assert step.access is not None
        moving = [(stride, dim) for dim, stride in enumerate(strides[id(step)]) if stride > 0]
        if moving:
            weight = reached(step, body, strides)
            few = _side_by_side(dims, moving, flags) * step.access.dtype.itemsize <= least
            votes.append(-weight if few or flags[min(moving)[1]] else weight)
    return sum(votes) > 0 if votes else body.column


def _jumping(body: Body, strides: Strides, dim: int) -> int:
    """How many operands' elements, for neighbours along ``dim``, lie apart in memory."""
    return sum(strides[id(step)][dim] > 1 for step in body.steps if step.access is not None and step.level == FULL)


def _better_rows(body: Body, tuning: Tuning) -> bool:
    """Would programs, which are enough, hold all summands of some results, and is more done with these than to sum them, or would
    that be split otherwise? See `tuning.in_pieces`. Running sums of a few columns would wait for one another in one program."""
    if _scans(body):
        return body.kept < NARROWEST
    width = max((step.access.dtype.itemsize for step in body.steps if step.access is not None and step.level == FULL), default=0)
    divided = tuning.has_few(body.kept) or narrow(body) and body.kept % 8 != 0
    return body.kept >= tuning.programs and body.extent * width <= PIECES and (divided or not sums_only(body))


def _side_by_side(dims: Sequence[int], moving: list[tuple[int, int]], flags: Sequence[bool]) -> int:
    """How many results' summands lie next to one another before the next summand of the first: as many as there are elements, if
    that does not come. ``moving``: (stride, dimension)."""
    run = 1
    for stride, dim in sorted(moving):
        if flags[dim] or stride != run:
            return run if flags[dim] and stride == run else math.prod(dims)
        run *= dims[dim]
    return math.prod(dims)
