"""How rows too long for registers are walked twice and read from memory once. Imports torch and codegen's leaf modules.

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

PRESSED = 3
"""The same of a 16-bit loss that leaves its gradient: beside what it computes with at a time six blocks fit and seven do not."""

LONGEST = 5
"""How many times as long as what the cache holds rows may be: what it does hold is still read once. On an H100 rows of 256,000 in
float32 take 0.93 of the time of loops that leave them to the cache of all multiprocessors, of 128,256 0.81."""

HELD = {(2, True): 12_288, (4, True): 24_576, (2, False): 16_384, (4, False): 49_152}
"""Elements of the longest row that registers hold as fast, by bytes of one and whether a loss leaves its gradient, which takes
more of them."""

STREAM = 32 << 20
"""Bytes of results that no cache holds until they are read: they leave it to the rows."""


@dataclass(frozen=True, slots=True)
class Walk:
    """``warps`` per row, ``block`` elements of ``width`` bytes at a time, of which ``held`` stay in registers, the first that are
    whole; ``streams``: results do not stay in caches."""

    warps: int
    block: int
    width: int
    held: int
    streams: bool


def cached_walk(body: Body, tuning: Tuning, stride: int) -> Walk | None:
    """The way through rows that lie ``stride`` elements apart, or None where they are short or few, many times as long as the
    cache, or more than one operand's."""
    operand = _only_operand(body)
    if operand is None or not tuning.cached or body.kept <= tuning.few or not settings.enabled("cached_rows"):
        return None
    width = operand.dtype.itemsize
    row, room = body.extent * width, tuning.cached << 10
    if body.extent <= HELD[width, makes_gradient(body)] or row > LONGEST * room:
        return None
    pressed = width == 2 and makes_gradient(body)
    for warps, least in WAYS:
        block = warps * 32 * 16 // width
        whole = (body.extent - 1) // block - (stride * width % 16 > 0)
        least = min(PRESSED if pressed else least, whole - TOGETHER)
        held = least + (whole - least) % TOGETHER
        fits = (row - held * block * width) * (32 // warps) <= room
        if whole >= TOGETHER and (fits or warps == 32):
            return Walk(warps, block, width, held, body.numel * width >= STREAM)
    return None


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
