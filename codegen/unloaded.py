"""Rows whose elements are computed from their positions alone, for which nothing is loaded. Imports codegen's leaf modules.

No load tells the compiler how such a row's elements lie among threads. It takes the layout of what they are computed with: for a
block of one number, one in which each thread holds the whole row. A running sum of 1,024 took two minutes to compile then, to
31,000 instructions that spill (Triton 3.6).
"""

from __future__ import annotations

from typing import Iterable

from codegen.body import Step
from codegen.instructions import FULL
from codegen.online import ONLINE
from codegen.tile import Tile


def loads_nothing(steps: Iterable[Step]) -> bool:
    """Are elements computed from their positions alone, or from what is one number for a row?"""
    return not any(step.stage in ("load", "gather", "take", "dot") and step.level == FULL for step in steps)


def along(step: Step, tile: Tile) -> str:
    """What a reduction goes along, how, and the shape of its result: a plain number, which has no layout, where that is one row's
    of positions alone."""
    rows, axis, how = tile.axes[0], tile.reduced_axis, "add" if step.text == ONLINE else step.text
    alone = axis == 1 and (rows is None or rows.block == 1) and loads_nothing(behind(step))
    return f"None, _{how}" if alone else f"{axis}, _{how}, keep_dims=True"


def behind(step: Step) -> set[Step]:
    """All that a reduction's elements are computed from."""
    found: set[Step] = set()
    stack = list(step.args)
    while stack:
        at = stack.pop()
        if at.level == FULL and at not in found:
            found.add(at)
            stack.extend(at.args)
    return found
