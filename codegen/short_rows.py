"""Lays out rows of a few elements, such as coordinates, colours or a stack's parts: a thread holds whole rows, one element after
the other, as if each were elementwise. Imports codegen's leaf modules and `ir_nodes.settings`.

As a block, rows of three elements leave a quarter of all lanes idle, threads exchange what they sum, and where neighbouring rows
lie side by side each loads number by number. Every instruction over whole rows is written once for each of their elements instead
(`codegen.strip_source`). On an H200, a norm of a convolution's weights under 3 x 3 pixels takes 120 us with its gradient, 177 as
blocks; experts mixed for each of three tasks 171 and 283; forces between 2,048 points in space 94 and 166.
"""

from __future__ import annotations

from typing import Sequence

from codegen.body import Body, Step
from codegen.instructions import FULL, IN_BITS, UNIFORM
from codegen.row_traits import narrow
from codegen.strips import can_be_cut
from codegen.tile import Axis, Strides, Tile, warps_for
from codegen.tuning import Tuning, power_of_two
from ir_nodes import settings

LONGEST = 8
"""Elements of such a row at most: it is what a kernel's source may name."""

WARPS, BYTES, HELD = 4, 16, 32
"""Warps of a program at most, bytes that a thread loads of an operand at a time, and elements that it holds of one."""


def short_tile(body: Body, dims: tuple[int, ...], strides: Strides, kept: Sequence[int], gone: Sequence[int],
               tuning: Tuning) -> Tile | None:  # fmt: skip
    """None where rows are longer, are made of numbers alone, or lie in memory as vectors that a thread loads anyway."""
    full = [step for step in body.steps if step.access is not None and step.level == FULL]
    short = 2 <= body.extent <= LONGEST and can_be_cut(body) and settings.enabled("short_rows")
    by_eight = any(step.stage == "random" or step.text == IN_BITS for step in body.steps)
    if not short or by_eight or not _placed(body) or _as_vectors(full, body, strides, gone):
        return None
    lane = min(BYTES // (2 if narrow(body) else 4), HELD // power_of_two(body.extent))
    while lane > 1 and body.kept < tuning.programs * WARPS * 32 * lane:  # few rows: more threads
        lane //= 2
    block = min(WARPS * 32 * lane, power_of_two(body.kept))
    axes = (Axis(tuple(kept), body.kept, block), Axis(tuple(gone), body.extent, 1), None)
    told = 0 if len(kept) > 1 else None
    return Tile(dims, strides, axes, 1, False, 0, warps_for(block, lane), strips=body.extent, told=told)


def _placed(body: Body) -> bool:
    """Is all that is reduced made of what lies at places or was reduced, and not of numbers alone, which are no block of
    elements?"""
    made = set[Step]()
    for step in body.steps:
        placed = step.stage == "reduce" or step.level != UNIFORM and any(stride for _, stride in step.form)
        if placed or not made.isdisjoint(step.args):
            made.add(step)
    return all(step.args[0] in made for step in body.steps if step.stage == "reduce")


def _as_vectors(full: Sequence[Step], body: Body, strides: Strides, gone: Sequence[int]) -> bool:
    """Are there rows of a power of two elements side by side?"""
    whole = body.extent & (body.extent - 1) == 0
    return whole and any(strides[id(step)][gone[-1]] == 1 for step in full if step.stage == "load")
