"""How rows too long for registers are walked twice and read from memory once. Imports torch and codegen's leaf modules.

A multiprocessor's cache keeps what its programs load, as long as no loop loads ahead through the memory that is the cache's other
half, and as the rows that they work on at a time fit. So as many programs share one as its cache holds rows; each loads several
blocks before it computes with one, and keeps a few for the second walk in registers, packed as they came. Read again from the
cache that all multiprocessors share, rows of 50,257 logits took a fifth longer.
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

WAYS = ((8, 2, 4), (16, 2, 4), (32, 0, 2))
"""Warps of a row, blocks that stay in registers, blocks that are loaded at a time."""

FILLS = 24576
"""Elements beyond which a row that registers hold leaves no room for another."""

STREAM = 32 << 20
"""Bytes of results that no cache holds until they are read: they leave it to the rows."""


@dataclass(frozen=True, slots=True)
class Walk:
    """``warps`` per row, ``block`` elements of ``width`` bytes at a time, of which ``batch`` blocks are loaded together and the
    row's first ``held`` ones stay in registers; ``streams``: results do not stay in caches."""

    warps: int
    block: int
    width: int
    held: int
    batch: int
    streams: bool


def cached_walk(body: Body, tuning: Tuning) -> Walk | None:
    """The way, or None where rows are short or few, longer than the cache, or more than one operand's."""
    operand = _only_operand(body)
    if operand is None or not tuning.cached or body.kept <= tuning.few or not settings.enabled("cached_rows"):
        return None
    width = operand.dtype.itemsize
    longest = tuning.held_loss * (1 if width == 2 else 2) if makes_gradient(body) else FILLS
    row = body.extent * width
    if body.extent <= longest or row > 2 * tuning.cached << 10:
        return None
    for warps, held, batch in WAYS:
        block = warps * 32 * 16 // width
        fits = (row - held * block * width) * (32 // warps) <= tuning.cached << 10
        if body.extent > (held + 1) * block and (fits or warps == 32):
            return Walk(warps, block, width, held, batch, body.numel * width >= STREAM)
    return None


def _only_operand(body: Body) -> MemAccess | None:
    """What is loaded over whole rows, 16-bit or 32-bit floats, where that is one operand and rows are walked for a sum of
    exponentials and again for results."""
    loads = [step for step in body.steps if step.stage in ("load", "gather", "take") and step.level == FULL]
    others = any(step.stage in ("random", "scan") or step.across for step in body.steps)
    if len(loads) != 1 or others or body.backwards or not any(pairs(body)) or not walks_again(body):
        return None
    access = loads[0].access
    if loads[0].stage != "load" or loads[0].args or access is None or access.scattered or access.shift:
        return None
    return access if access.dtype in (torch.bfloat16, torch.float16, torch.float32) else None
