"""Squares for reductions where operands disagree on the fast axis: some run along what is reduced, others along what is kept.
Imports codegen's leaf modules and `ir_nodes.settings`.

A convolution of groups leaves images in rows, one with a window of a pixel leaves the channels of each pixel side by side, and a
batch norm's gradient between the two sums over both. By rows or by columns, one of the two is fetched sector by sector for an
element of each. What would be walked again, for something else of each element, is left as it is: that was not measured.
"""

from __future__ import annotations

import math
from typing import Sequence

from codegen.aligned import KNOWN
from codegen.body import Body
from codegen.instructions import FULL
from codegen.row_traits import walks_again
from codegen.tile import Axis, Strides, Tile, reached, warps_for
from codegen.tuning import Tuning, power_of_two
from ir_nodes import settings

NARROWEST = 16
"""Neighbours below which it makes no difference that memory runs along them."""
AREA, LANE, WARPS = 2048, 16, 8
"""Elements of a square, how many of them a thread has, and warps of one at most."""
SIMPLE = ("load", "store", "reduce", "expr", "scalar", "size", "coord")
"""Stages of steps that walk a square as they walk rows."""


def square_tile(body: Body, dims: tuple[int, ...], strides: Strides, split: tuple[tuple[int, ...], tuple[int, ...]],
                tuning: Tuning, divided: tuple[int, int]) -> Tile | None:
    """Squares of the last kept and the last reduced dimension, if memory runs along either; ``split``: the dimensions that are
    kept and those that are reduced, ``divided``: as for `codegen.layout.lay_out`."""
    (kept, gone), (share, shares) = split, divided
    if not settings.enabled("tiling") or not disagree(body, dims, strides, kept, gone):
        return None
    along, extent = dims[kept[-1]], body.extent
    outer = math.prod(dims[dim] for dim in kept[:-1])
    columns = min(tuning.transpose_side, power_of_two(along))
    while columns > NARROWEST and -(-along // columns) * outer * max(shares, 1) * 2 < tuning.programs:
        columns //= 2
    rows = min(AREA // columns, power_of_two(share or extent))
    axes = (Axis(gone, extent, rows), Axis(kept[-1:], along, columns), Axis(kept[:-1], outer, 1) if outer > 1 else None)
    looped = share > 0 or rows < extent
    return Tile(dims, strides, axes, 0, looped, share, warps_for(rows * columns, LANE, WARPS), shares=shares,
                told=None if share % KNOWN else 0)


def disagree(body: Body, dims: Sequence[int], strides: Strides, kept: Sequence[int], gone: Sequence[int]) -> bool:
    """Does one of the large operands run along the last kept dimension, another along the last reduced one?"""
    simple = not walks_again(body) and all(step.stage in SIMPLE for step in body.steps)
    if not simple or not kept or not gone or min(dims[kept[-1]], dims[gone[-1]]) < NARROWEST:
        return False
    large = [strides[id(step)] for step in body.steps if step.access is not None and step.level == FULL
             and 2 * reached(step, body, strides) >= body.numel]
    ends = {dim for moved in large for dim, stride in enumerate(moved) if stride == 1 and dims[dim] > 1}
    return {kept[-1], gone[-1]} <= ends
