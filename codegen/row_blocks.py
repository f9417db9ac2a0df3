"""How much of a row a program that reduces rows works on at a time, with how many threads. Imports codegen's leaf modules."""

from __future__ import annotations

from codegen.aligned import KNOWN
from codegen.body import Body
from codegen.instructions import FULL
from codegen.online import pairs
from codegen.row_traits import (
    lanes_needed,
    loads,
    longest_held,
    longest_in_strips,
    makes_gradient,
    narrow,
    reduced_once,
    reductions,
    sums_only,
    walks_again,
)
from codegen.strips import strip_of
from codegen.tuning import Tuning, power_of_two, snug_block
from ir_nodes import settings

AMPLE = 4
"""Times as much as a program holds otherwise, where there are enough such programs."""


def loop_lane(body: Body, tuning: Tuning) -> int:
    """Elements per thread where one operand is summed up in a loop; what reads several, or scans, has fewer at a time."""
    alone = loads(body) < 2 and not any(step.stage == "scan" for step in body.steps)
    return (tuning.loop_lane if narrow(body) else tuning.loop_lane // 2) if alone else tuning.lane


def may_walk_again(body: Body) -> bool:
    """True where a row lies off 16-byte boundaries, is read in vectors nevertheless, and draws no numbers, which cost much."""
    plain = not any(step.stage in ("random", "take") for step in body.steps)
    return body.extent % 8 != 0 and plain and settings.enabled("aligned_rows")


def row_block(body: Body, tuning: Tuning, split: bool) -> tuple[int, bool, int]:
    """(elements per step or strip, looped?, elements per thread) where rows are reduced."""
    strip = 0 if split else strip_of(body, tuning, longest_in_strips(body, tuning))
    if 0 < strip < body.extent:
        return strip, False, tuning.wide_lane
    reads, extent = loads(body), power_of_two(lanes_needed(body, tuning.covered))
    if not split and extent > tuning.short_row and extent * 3 > body.extent * tuning.padded and may_walk_again(body):
        return snug_block(body.extent + 7, min(tuning.looped, 2 * tuning.short_row), 512), True, tuning.lane
    if not split and extent <= longest_held(body, tuning):
        scanned = any(step.stage == "scan" for step in body.steps)
        long = extent > tuning.short_row and body.extent % 8 == 0 and narrow(body) and reads < 2 and not _extremes(body)
        wide = body.extent % KNOWN == 0 if scanned else long or _light(body, extent) or _waits(body, extent)
        return extent, False, _in_one_warp(body, tuning, extent) // 32 or (tuning.wide_lane if wide else tuning.lane)
    if any(pairs(body)):
        return min(tuning.online, extent), True, tuning.online_lane
    return min(tuning.looped, extent), True, loop_lane(body, tuning)


def _in_one_warp(body: Body, tuning: Tuning, block: int) -> int:
    """Elements of a program of one warp, whose threads need not wait for others, or 0 where more warps take less time. A table of
    what was fastest on an H200 for rows of 3 to 300 that are summed and that are not, loaded in vectors and by element."""
    if any(step.stage == "scan" for step in body.steps) or block > 512:
        return 0
    summed = sums_only(body)
    if not summed and block > 64 and reduced_once(body):
        return 0
    if block <= 32:
        return 0 if summed else tuning.tile // 2
    if body.extent % KNOWN == 0 or summed and block == 512:
        return 0
    if summed:
        return 2 * tuning.tile if narrow(body) and block > 64 else tuning.tile
    if block == 128 or block > 128 and loads(body) > 1:
        return tuning.tile // 2
    return tuning.tile if block == 64 or not _extremes(body) else 0


def _waits(body: Body, block: int) -> bool:
    """Do they wait so often, for rows off 16-byte boundaries, that fewer of them take less time?"""
    return block >= 2048 and body.extent % 8 != 0 and reductions(body) > 1


def _extremes(body: Body) -> bool:
    """Is anything but a sum made of rows?"""
    return any(step.stage == "reduce" and step.text != "add" for step in body.steps)


def _light(body: Body, block: int) -> bool:
    """Is so little moved for each row that programs are through before others have started?"""
    return narrow(body) and sums_only(body) and block >= 512


def tile_of_rows(body: Body, tuning: Tuning, block: int) -> int:
    """Elements of the rows that a program holds."""
    if _summed_alone(body, block) and body.numel >= AMPLE * tuning.tile * tuning.programs:
        return AMPLE * tuning.tile
    return _in_one_warp(body, tuning, block) or (2 * tuning.tile if _light(body, block) else tuning.tile)


def _summed_alone(body: Body, block: int) -> bool:
    """Is one sum of short 16-bit rows all that is made? Its programs are through before others have started: sums of 2^20 rows of
    64 take 32 us on an H200 by programs of 4,096 elements, 34 by 1,024."""
    plain = narrow(body) and sums_only(body) and reduced_once(body) and not any(step.stage == "take" for step in body.steps)
    return plain and 64 <= block <= 256 and body.extent % KNOWN == 0


def neighbours(body: Body, tuning: Tuning) -> int:
    """How many elements, which one thread loads at a time, share a maximum beside a sum of exponentials; 0: all of a block."""
    if not (tuning.near > 1 or tuning.near and makes_gradient(body)):
        return 0
    widths = [step.access.dtype.itemsize for step in body.steps if step.stage == "load" and step.level == FULL and step.access]
    return 16 // max(min(widths, default=4), 2)


def warps_resident(body: Body, tuning: Tuning) -> int:
    """Warps per row with which the rows that the machine works on at a time stay in its cache until they are walked again."""
    limit, warps = (tuning.rewalked, tuning.rewalking) if makes_gradient(body) else (tuning.resident, 64)
    if not limit or not walks_again(body):
        return 1
    row = sum(step.access.dtype.itemsize for step in body.steps if step.stage == "load" and step.level == FULL and step.access)
    return max(1, min(32, power_of_two(tuning.cores * warps * row * body.extent // (limit << 20))))
