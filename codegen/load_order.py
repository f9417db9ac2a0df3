"""Loads are written before what is computed, so that all of a thread's are under way together. Imports codegen's leaf modules.

ptxas moves no load across a branch, such as a correctly rounded division or a power has one, nor across a reduction over several
warps: an operand that is loaded behind one comes a whole latency of memory later, some 0.4 us, which is a sixth of what a small
kernel takes. Where many programs reduce, or draw random numbers, they hide that from one another, and registers are worth more.
"""

from __future__ import annotations

import math

from codegen.body import Body, Step
from codegen.instructions import FULL
from codegen.tile import Tile

SPARE = 128
"""Bytes per thread of operands that nothing needs before a reduction is through and that wait in registers nevertheless."""


def plain(body: Body) -> bool:
    """Does it compute elements from elements? Then one kernel suits any size, and steps of all sizes may share a launch."""
    return body.reduced is None and not any(step.stage in ("random", "dot") for step in body.steps)


def loads_first(body: Body, tile: Tile) -> None:
    """Puts loads in front, in their order; those for later phases only where they take few registers."""
    free = [step for step in body.steps if step.stage == "load" and not step.args or step.takes_bits]
    needed = _needed(body)
    late = [step for step in free if needed.get(step, 0) > 0]
    waits = sum(_bytes_per_thread(step, tile) for step in late) > SPARE
    early = dict.fromkeys(step for step in free if not (waits and step in late))
    body.steps = [*early, *(step for step in body.steps if step not in early)]


def _needed(body: Body) -> dict[Step, int]:
    """For each step how many reductions are through when it is used first."""
    found: dict[Step, int] = {}
    for step in body.steps:
        phase = step.phase - (step.stage == "reduce")
        for arg in step.args:
            found[arg] = min(found.get(arg, phase), phase)
    return found


def _bytes_per_thread(step: Step, tile: Tile) -> float:
    if step.level != FULL or step.access is None:
        return step.dtype.itemsize
    lanes = math.prod(axis.block for axis in tile.axes if axis is not None) * max(tile.strips, 1)
    return step.access.dtype.itemsize * lanes / (32 * tile.num_warps)
