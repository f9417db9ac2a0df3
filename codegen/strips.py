"""Into which strips a row is cut that registers hold, and how many warps share it. Imports codegen's leaf modules.

A block's size is a power of two. Held as one block, rows of 768 elements waste a quarter of all lanes, and rows of 5,003 two
fifths; three strips of 256, or five of 1,024, waste next to nothing. Where rows lie off 16-byte boundaries, or end off them, only
the strips at their ends need masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.aligned import KNOWN
from codegen.body import Body
from codegen.draws import WORDS, Stream
from codegen.instructions import FULL
from codegen.row_traits import lanes_needed, loads, narrow, reduced_once, row_bytes, sums_only
from codegen.tuning import Tuning, power_of_two, snug_block
from ir_nodes import settings

SMALLEST, USUAL, LARGEST = 128, 2048, 4096
"""Elements of a strip; the largest are for rows that `USUAL` ones would cut in more than `FEW`."""

FEW, MOST = 8, 16
"""Strips of a row. Each is written out in the kernel's source."""

LIGHTEST = 5
"""Strips of a 16-bit row of which 40 registers hold a thread's part, while a norm is computed."""

LIGHT, SOME = 10, 12
"""Instructions of an element, as a norm has them, and an RMS norm's gradient."""

VECTOR = 4
"""Elements that a thread loads at a time where rows lie off 16-byte boundaries: what is read beside them comes one by one."""

FULLY = 8
"""Warps of a multiprocessor whose threads have all the registers that one may have."""

LEAST = 2800
"""Bytes that a program has to move, as starting it takes so long (an H200 starts 1,500 in a microsecond). Shorter rows share a
program, in one block; where results are stored, too, those of half as many, as a block takes more instructions than strips."""


def strip_of(body: Body, tuning: Tuning, longest: int) -> int:
    """Elements of each of the strips that hold a row of at most ``longest`` elements, or 0 where one block does better."""
    row, even = lanes_needed(body), body.extent % KNOWN == 0
    if row_bytes(body) < (LEAST if sums_only(body) else LEAST // 2):
        return 0
    if body.kept <= tuning.few or even and row <= 4 * SMALLEST or not settings.enabled("row_strips") or not can_be_cut(body):
        return 0
    pieces = _pieces(body)
    strip = _snug(row, pieces, (even or pieces > FEW) and not _draws_by_eight(body))
    held = -(-row // strip) * strip
    if not strip < held <= min(longest, MOST * strip):
        return 0
    return 0 if even and held * 8 > power_of_two(row) * 7 and not _waits_long(body) else strip


def _snug(row: int, pieces: int, fine: bool) -> int:
    """Elements of the strips that rows of ``row`` elements are best cut into: so many ``pieces`` of a power of two, or more;
    ``fine``: `SMALLEST` will do."""
    usual, smallest = USUAL if row <= FEW * USUAL else LARGEST, SMALLEST if fine else 2 * SMALLEST
    return snug_block(row, max(min(power_of_two(row) // pieces, usual), smallest), smallest)


def _pieces(body: Body) -> int:
    """Strips that a row of a power of two elements would be cut into. More of them leave a thread more elements, of which it
    loads no more at a time. Off 16-byte boundaries, where what all rows share comes one by one, few threads take less time than
    many: on an H200, bfloat16, a layer norm over 1,001 takes 43.3 us with strips of 128, 57.8 of 256; over 3,001 52.9 with 256,
    72.9 with 1,024; a softmax over 3,001 47.3 and 51.2. With a second operand they take more."""
    alone = body.extent % 8 and narrow(body) and loads(body) < 2 and not _crossed(body)
    return 2 * FEW if alone and not _summed_lightly(body) else _usual_pieces(body.extent)


def _usual_pieces(extent: int) -> int:
    return FEW if extent % KNOWN else 4


def _summed_lightly(body: Body) -> bool:
    """Do 40 registers hold a thread's part of 16-bit rows that are summed once, and what a norm computes?"""
    row = lanes_needed(body)
    short = -(-row * FEW // power_of_two(row)) <= LIGHTEST
    return short and narrow(body) and reduced_once(body) and _work(body) <= LIGHT


def lanes_drawn(row: int) -> int:
    """Lanes for which a kernel draws that holds rows of ``row`` 16-bit elements, in strips where these fit better."""
    strip = power_of_two(row) if row <= 4 * SMALLEST else _snug(row, _usual_pieces(row), False)
    return -(-row // strip) * strip


def strips_of(body: Body, strip: int) -> int:
    return -(-lanes_needed(body) // strip) if strip < body.extent else 0


def strip_warps(body: Body, strip: int, lane: int) -> int:
    """Warps that share a row: each thread has ``lane`` of its elements, and loads 16 bytes of each strip; 8 where rows lie off
    16-byte boundaries. Of rows that are stored wider than others are loaded it has no more of a strip than it stores at a time:
    the compiler gives threads as many as they load of the narrowest, and exchanges results through shared memory."""
    vector = VECTOR if body.extent % 8 or not narrow(body) else 2 * VECTOR
    if _widens(body):
        return max(1, strip // (32 * VECTOR))
    return max(1, min(power_of_two(strip * strips_of(body, strip) // (32 * lane)), strip // (32 * vector)))


def registers_held(body: Body, strip: int, warps: int) -> int:
    """Registers of a thread of such rows at most, 0: as many as the compiler takes. With 40 a third more programs run beside each
    other and load while others wait: on an H200, an RMS norm over 5,003 in bfloat16 takes 42.4 us so, 42.9 cut like others."""
    return 40 if _summed_lightly(body) and strip == VECTOR * 32 * warps and strips_of(body, strip) <= LIGHTEST else 0


@dataclass(frozen=True, slots=True)
class Walking:
    """How programs walk rows in strips and sum columns beside, in further registers: ``strip`` elements, warps of a program,
    programs of a multiprocessor, and registers of a thread at most, or 0."""

    strip: int
    warps: int
    programs: int
    registers: int = 0


def walking(body: Body, strip: int, held: int) -> Walking:
    """``held``: operands and sums of columns. Measured on an H200, rows of 1,001 to 7,001 elements.

    Threads have 24 elements each, and two programs load while one would wait for its sums, where registers have room. Two sums of
    columns beside 16-bit operands leave none: fewer threads with 40 each wait for one another less. Where these fill a
    multiprocessor, vectors of 16 bytes are worth lanes that idle (gradients of a layer norm over 7,001: 109 us, 127 otherwise).
    """
    row, most = strip * strips_of(body, strip), strip // (32 * VECTOR)
    warps = max(1 if narrow(body) else 2, min(power_of_two(-(-row // (32 * 24))), most))
    if not narrow(body) or held <= 2:
        return Walking(strip, warps, max((16 if narrow(body) else FULLY) // warps, 1))
    if held == 3 and row <= warps * 32 * 20 and warps == FULLY and _work(body) <= SOME:
        return Walking(strip, warps, 2, 128)
    warps = max(1, min(power_of_two(-(-row // (32 * 40))), most))
    wide = strip * 2 if warps == FULLY and strip < warps * 32 * 2 * VECTOR else strip
    return Walking(wide, warps, max(FULLY // warps, 1))


def _work(body: Body) -> int:
    return sum(step.stage == "expr" and step.level == FULL for step in body.steps)


def _widens(body: Body) -> bool:
    """Are results stored of more bytes than an operand has that is loaded? Not where threads draw for eight neighbours: half as
    many warps take 38 us for GPT-2's dropout, sum and norm, which take 47 so."""
    if any(step.stage == "random" for step in body.steps):
        return False
    full = [(step.stage, step.access.dtype.itemsize) for step in body.steps if step.level == FULL and step.access is not None]
    loaded, stored = ([size for stage, size in full if stage == kind] for kind in ("load", "store"))
    return bool(loaded) and max(stored, default=0) == 4 and min(loaded) < 4


def _draws_by_eight(body: Body) -> bool:
    """Do threads draw for eight neighbours at a time? Half of a warp would have nothing to draw for in the smallest strips."""
    return any(isinstance(step.payload, Stream) and step.payload.vector > WORDS for step in body.steps if step.stage == "random")


def can_be_cut(body: Body) -> bool:
    """Are rows reduced from their own elements, and not scanned?"""
    reduces = [step for step in body.steps if step.stage == "reduce" and not step.across]
    scans = any(step.stage == "scan" for step in body.steps)
    return bool(reduces) and all(step.args[0].level == FULL for step in reduces) and not scans


def _crossed(body: Body) -> bool:
    """Are columns reduced beside the rows?"""
    return any(step.across for step in body.steps)


def _waits_long(body: Body) -> bool:
    """Are there two sums of long rows, one after the other, or very long ones? Then fewer warps that wait for one another take
    less time."""
    return not _crossed(body) and body.extent >= (4096 if _sums(body) > 1 else 8192 + 1)


def _sums(body: Body) -> int:
    return sum(step.stage == "reduce" and step.text == "add" for step in body.steps)
