"""How rows too long for a program's registers are read from memory once. Imports torch and codegen's leaf modules.

One program holds the row by itself, or those of a cluster hold it together and exchange their sums (`cluster_source.py`), or it
is walked twice:

A multiprocessor's cache keeps what its programs load, as long as no loop loads ahead through the memory that is the cache's other
half, and as the rows that they work on at a time fit. So as many programs share one as its cache holds rows; each loads several
blocks before it computes with one, and keeps a few for the second walk in registers, packed as they came. Read again from the
cache that all multiprocessors share, rows of 50,257 logits took a third longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from codegen.body import Body
from codegen.instructions import FULL, MemAccess
from codegen.online import pairs
from codegen.row_traits import makes_gradient, walks_again
from codegen.tuning import Tuning
from ir_nodes import settings

REGISTERS = 64
"""Of a thread, so that 32 warps fill a multiprocessor's."""

TOGETHER = 4
"""Blocks that are loaded before any is computed with. What is left over would come one at a time, a latency of memory each: so
many blocks stay in registers that nothing is (on an H200, 50,264 logits of 12 blocks: 863 us with 4 held, 940 with 3)."""

WAYS = ((8, 3), (16, 4), (32, 4))
"""Warps of a row, and blocks that stay in registers at least; up to three more do. What lies there leaves room in the cache: of
rows of 128,256 in float32, which are longer than it, seven blocks instead of three save a twentieth of the time on an H200, of a
softmax of as many in 16 bits a tenth."""

LONGEST = 5
"""How many times as long as what the cache holds rows may be: what it does hold is still read once. On an H100 rows of 256,000 in
float32 take 0.93 of the time of loops that leave them to the cache of all multiprocessors, of 128,256 0.81."""

ALONE = {2: ((8, 16, 128),), 4: ()}
"""By bytes of an element: warps of a program that holds a row by itself, how many blocks of 16 bytes a thread it holds at most,
and registers of a thread: what fits beside what is computed. On an H200 a softmax of 32,000 in bfloat16 takes 1.03 times as long
as a copy, so."""

SEVERAL = {2: ((4, 26, 168), (8, 20, 128)), 4: ((8, 26, 128), (16, 26, 128))}
"""The same of programs that hold a row together. The first of which a cluster holds the row are taken."""

AT_LEAST = {2: 1, 4: 2}
"""So many rows in a multiprocessor's cache are as good as such programs. Where it holds one of float32, its phases leave the
memory idle in turn: a softmax of 50,257 takes 1.23 times as long as a copy on an H200, 1.11 times in programs that share rows; in
16 bits, where it holds two, 1.17 times and 1.19. (On an H100 these take 1.02 and 1.06 in float32.)"""

HELD = {(2, True): 12_288, (4, True): 24_576, (2, False): 16_384, (4, False): 49_152}
"""Elements of the longest row that registers hold as fast, by bytes of one and whether a loss leaves its gradient, which takes
more of them."""

STREAM = 32 << 20
"""Bytes of results that no cache holds until they are read: they leave it to the rows."""


Ways = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """``warps`` per row, ``block`` elements of ``width`` bytes at a time, of which ``held`` stay in registers, the first that are
    whole; ``streams``: results do not stay in caches. ``programs``: that hold all of the row together, each every so-many-th
    block of it, 0 where one walks it; ``registers`` of a thread."""

    warps: int
    block: int
    width: int
    held: int
    streams: bool
    programs: int = 0
    registers: int = REGISTERS


def way_through(body: Body, tuning: Tuning, stride: int) -> Walk | None:
    """The way through rows that lie ``stride`` elements apart, or None where they are short or few, much longer than what holds
    them, or more than one operand's."""
    operand = _only_operand(body)
    if operand is None or body.kept <= tuning.few or body.extent <= HELD[operand.dtype.itemsize, makes_gradient(body)]:
        return None
    width = operand.dtype.itemsize
    alone = _held(body, tuning, stride, width, ALONE[width], int(tuning.packs and tuning.cached > 0))
    if alone is not None:
        return alone
    cached, rows = _cached(body, tuning, stride, width)
    several = _held(body, tuning, stride, width, SEVERAL[width], tuning.clusters) if rows < AT_LEAST[width] else None
    return several or cached


def _held(body: Body, tuning: Tuning, stride: int, width: int, ways: Ways, most: int) -> Walk | None:
    """In registers of as few programs as have room, up to ``most``."""
    if not settings.enabled("held_rows") or not _only_exponentials(body):
        return None
    for warps, longest, registers in ways:
        block = warps * 32 * 16 // width
        blocks = -(-(body.extent + (16 // width - 1 if stride * width % 16 else 0)) // block)
        programs = -(-blocks // longest)
        if programs <= most:
            return Walk(warps, block, width, -(-blocks // programs), body.numel * width >= STREAM, programs, registers)
    return None


def _only_exponentials(body: Body) -> bool:
    """Is nothing reduced but sums of exponentials in float32, and one maximum, nothing added to what is in memory, and nothing
    picked by what follows from the sums, when other programs of the row may have overwritten it?"""
    sums = pairs(body)
    highest = {total.args[0].args[0].args[1] for total in sums}
    reduces = {step for step in body.steps if step.stage == "reduce"}
    adds = any(step.stage == "store" and (step.partial or step.access is None or step.access.scattered) for step in body.steps)
    late = any(step.stage in ("gather", "take") and step.phase for step in body.steps)
    known = len(highest) == 1 and reduces == {*sums, *highest} and all(one.dtype is torch.float32 for one in reduces)
    return known and not adds and not late


def _cached(body: Body, tuning: Tuning, stride: int, width: int) -> tuple[Walk | None, int]:
    """A program for each row, whose multiprocessor's cache holds it; and how many rows are there at a time, 0 where less than one
    is."""
    row, room = body.extent * width, tuning.cached << 10
    if not tuning.cached or row > LONGEST * room or not settings.enabled("cached_rows"):
        return None, 0
    for warps, least in WAYS:
        block = warps * 32 * 16 // width
        whole = (body.extent - 1) // block - (stride * width % 16 > 0)
        least = min(least, whole - TOGETHER)
        held = least + (whole - least) % TOGETHER
        fits = (row - held * block * width) * (32 // warps) <= room
        if whole >= TOGETHER and (fits or warps == 32):
            return Walk(warps, block, width, held, body.numel * width >= STREAM), 32 // warps if fits else 0
    return None, 0


def _only_operand(body: Body) -> MemAccess | None:
    """What is loaded over whole rows, 16-bit or 32-bit floats, where that is one operand and rows are walked for a sum of
    exponentials and again for results, as wide as it: threads hold what they load in the places where they store."""
    loads = [step for step in body.steps if step.stage in ("load", "gather", "take") and step.level == FULL]
    others = any(step.stage in ("random", "scan") or step.across for step in body.steps)
    if len(loads) != 1 or others or body.backwards or not any(pairs(body)) or not walks_again(body):
        return None
    access = loads[0].access
    if loads[0].stage != "load" or loads[0].args or access is None or access.scattered or access.shift:
        return None
    widths = {step.access.dtype.itemsize for step in body.steps if step.stage == "store" and step.level == FULL and step.access}
    known = access.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return access if known and widths == {access.dtype.itemsize} else None
