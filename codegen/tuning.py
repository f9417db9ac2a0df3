"""Block sizes and when a reduction is split over programs. Imports codegen's leaf modules only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from codegen.instructions import FULL, Part


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def snug_block(extent: int, largest: int, smallest: int, trim: bool = False) -> int:
    """The largest power of two up to ``largest`` that wastes at most an eighth of its lanes on ``extent`` elements. Where none
    does from ``smallest`` on: the largest, or, to ``trim`` what is wasted, the one that wastes least."""
    blocks = [min(largest, power_of_two(extent))]
    while blocks[-1] // 2 >= smallest:
        blocks.append(blocks[-1] // 2)
    padded = {block: -(-extent // block) * block for block in blocks}
    last_resort = min(blocks, key=padded.__getitem__) if trim else blocks[0]
    return next((block for block in blocks if padded[block] * 8 <= extent * 9), last_resort)


def off_boundaries(part: Part) -> bool:
    """Are columns of 16-bit elements in rows off 16-byte boundaries? They are read element by element, unless programs share
    them, each of which takes rows that lie alike."""
    narrow = any(access.dtype.itemsize <= 2 and access.level == FULL for _, access in part.accesses())
    return narrow and part.kept % 8 != 0


PIECE, PIECES = 16, 8192
"""Bytes of neighbouring results that are too few to reduce columns by, and of all summands of such a result that a program holds.
On an H200, softmax over 256 of 32,769 x 256 x 3 in bfloat16: 37 us as rows, 102 as columns; over 100 of 100,000 x 100 x 2 34 and
209; in pieces of 24 bytes, over 300 of 20,000 x 300 x 6 in float32, 247 and 175; over 3,000 of 2,000 x 3,000 x 3 79 and 61."""


def in_pieces(part: Part) -> bool:
    """Do so few results of a column lie side by side that they had better be rows, whose elements lie apart?"""
    if part.reduced is None or len(part.reduced) != 1:
        return False
    (low, high), whole = part.reduced[0], ((part.numel, 1),)
    widths = [access.dtype.itemsize for _, access in part.accesses() if access.level == FULL and access.form == whole]
    return bool(widths) and low * max(widths) <= PIECE and high // low * max(widths) <= PIECES


@dataclass(frozen=True, slots=True)
class Tuning:
    """Choices that depend on the machine. Block sizes are elements a program handles at a time.

    ``pointwise_block``: of 4-byte elements; narrower ones take twice as many, so that each thread has 32 bytes of every operand
    in flight. ``tile``, ``lane``: elements per program and per thread where short rows are held in registers, ``drawing_lane``:
    per thread where random numbers are drawn beside, which come four at a time and change places with what is loaded;
    ``wide_lane``: per thread of rows longer than ``short_row`` whose elements have 16 bits. ``looped``, ``online``: elements per
    step of a loop over rows that sums, and of one that keeps a maximum beside the sum of exponentials; ``loop_lane``,
    ``online_lane``: per thread of them. ``column_width`` and ``column_tile``: results and elements per step where columns are
    reduced, half as many elements where several operands are read and what is summed is stored, too; ``narrow_width``: results
    where there would be too few programs otherwise, ``scanned_width``: of running sums. ``stages``: how many steps ahead loops
    load. ``programs``: how many programs keep the machine busy; ``cores``: its multiprocessors. ``persistent``, ``once``: the
    longest reduction held in registers where a loop would walk it again, and where it would not (a program of 32 warps has
    nothing to do while it loads), unless it lies off 16-byte boundaries and would fill less than three of ``padded`` parts of the
    registers: that wastes more instructions than walking it again. ``resident``: MiB of rows that are worked on at a time where
    rows are walked more than once, so that the cache holds them, or 0; ``rewalked``: the same where a loss's kernel walks its row
    again for the gradient, unless the row is short enough for ``once``, ``rewalking``: warps of it that run on a multiprocessor,
    with 64 registers a thread, ``rewalked_bytes``: what each thread loads of an operand at a time in its loops over rows on
    16-byte boundaries, a quarter over others; ``near``: a thread's neighbours have a maximum of their own beside sums of
    exponentials, in such a kernel, or in all that loop (2), or in none (0). ``split_column`` and ``split_row``: the longest
    reduction that is left to one program where there are few results; ``split_numel``: below so many elements none is split.
    ``mixed_row``, ``mixed_rows``: the longest row and the fewest rows that are reduced together with columns, ``mixed_tile``:
    elements per step of that, ``shared_bytes``: what its loads ahead may take of a multiprocessor's memory; ``walks``: the fewest
    short rows of which programs walk several so although no columns are reduced, or 0. ``product_rows``, ``product_columns``,
    ``product_depth``: a matrix product's block, and how many summands its loop takes at a time. ``pointwise_lane``: 4-byte
    elements per thread of a kernel that reduces nothing, ``thread_bytes``: what these may take in all its operands together.
    ``philox_blocks``: blocks of 256 threads that the machine runs at a time, which decides the random numbers that ATen's kernels
    draw; 0 where generators are not Philox. ``peeled``, ``covered``: the shortest rows off 16-byte boundaries that
    `codegen.aligned` treats, ``run_on``: the shortest that are not walked through as if they were one, where nothing is reduced,
    ``narrowest``: the narrowest block of such a row, unless all of it is shorter. ``at_once``: so many times ``programs`` at most
    take a block each of a long row of one operand of 4 bytes or more that is summed by several; beyond, ``programs`` walk
    several. ``few``: so many programs leave much of the machine idle, and get more threads, with ``few_lane`` elements each,
    twice as many where they reduce, so that programs for shorter rows may still share their launch; fewer of 4 bytes, and where
    each takes many instructions. ``held``: the longest row that registers hold in strips, ``held_loss``: the same of 16-bit
    elements where a loss's kernel makes its gradient, whose loop finds longer rows in the cache; twice as long of wider ones.
    ``cached``: KiB of rows that a multiprocessor's own cache holds, or 0; ``clusters``: programs that may form one, or 0.
    ``overreads``: ATen's matrix products read what lies behind a row's end and multiply it with zeros, as oneDNN does on CPUs
    with AMX.
    """

    pointwise_block: int = 1024
    tile: int = 1024
    transpose_side: int = 64
    persistent: int = 32768
    once: int = 16384
    short_row: int = 2048
    padded: int = 4
    resident: int = 0
    rewalked: int = 24
    rewalking: int = 32
    rewalked_bytes: int = 64
    near: int = 1
    looped: int = 4096
    online: int = 2048
    column_width: int = 512
    narrow_width: int = 64
    scanned_width: int = 128
    column_tile: int = 2048
    lane: int = 16
    drawing_lane: int = 8
    wide_lane: int = 32
    loop_lane: int = 32
    online_lane: int = 16
    stages: int = 3
    packs: bool = True  # False before compute capability 8
    overlaps: bool = True  # False before compute capability 9
    peeled: int = 256
    covered: int = 256
    mixed_row: int = 8192
    mixed_rows: int = 512
    mixed_tile: int = 1024
    walks: int = 0
    shared_bytes: int = 160 << 10
    pointwise_lane: int = 8
    thread_bytes: int = 128
    product_rows: int = 128
    product_columns: int = 128
    product_depth: int = 64
    programs: int = 528
    cores: int = 132
    split_rows: int = 32
    split_column: int = 128
    split_row: int = 8192
    split_numel: int = 1 << 15
    run_on: int = 4096
    few: int = 528
    few_lane: int = 4
    narrowest: int = 256
    at_once: int = 8
    held: int = 53248
    held_loss: int = 16384
    cached: int = 220
    clusters: int = 8
    philox_blocks: int = 1056  # H200
    overreads: bool = False

    def changed(self, text: str) -> Tuning:
        """This with what ``text`` ("looped=8192,loop_lane=16") changes."""
        return replace(self, **{key: int(value) for key, _, value in (item.partition("=") for item in text.split(",") if item)})

    def splits(self, part: Part) -> bool:
        """True where the reduction leaves too few programs unless each result is computed by several."""
        extent = part.numel // part.kept
        if part.numel <= self.split_numel:
            return False
        if part.apart:
            return True
        if part.column and part.kept >= self.programs and in_pieces(part):
            return False
        if part.column:
            return extent > self.split_column and (self.has_few(part.kept) or off_boundaries(part))
        return extent > self.split_row and part.kept * 4 < self.programs

    def has_few(self, columns: int) -> bool:
        """Do so many, however narrow, leave much of the machine idle?"""
        return -(-columns // self.narrow_width) * 2 < self.programs


HOPPER = Tuning()
INTERPRETER = Tuning(pointwise_block=1 << 16, transpose_side=256, tile=1 << 16, persistent=1 << 16, once=1 << 16, looped=1 << 14,
                     online=1 << 14, programs=4, cores=1, few=0, cached=0, clusters=0, philox_blocks=0, overlaps=False,
                     overreads=True)
"""The interpreter pays per instruction and program, not per element."""
