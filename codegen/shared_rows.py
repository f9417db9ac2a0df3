"""Operands that all rows of a block share, such as a bias, of which a row's sum is made. Imports codegen's leaf modules and
`ir_nodes.settings`.

Loaded once, such an operand is spread over all threads of a program, and so the compiler lays the rows, too, which it then sums
and hands from thread to thread through shared memory. Loaded for each row, from the cache, it lies as they do. On an H200 in
bfloat16, 2^25 elements, a norm over 64 of a sum with a bias takes 43 us instead of 85; 2^26, rows of 64 times a vector 34 instead
of 85. Where nothing but results are made of it, as of a norm's weight, loading it once takes up to a tenth less.
"""

from __future__ import annotations

from codegen.body import Body
from codegen.tile import Tile
from codegen.unloaded import behind
from ir_nodes import settings

SHORTEST = 64
"""Rows of fewer elements are hardly spread: 2^20 of 16 times four vectors take 13 us on an H200, and 15 where each loads them."""


def before_sums(body: Body, tile: Tile) -> frozenset[int]:
    """The loads (by id) that sums of a block's rows wait for: of these, what all rows share is to be made for each of them."""
    rows = tile.axes[0]
    apart = tile.covered or tile.strips or tile.peel or tile.walk is not None
    one = rows is None or rows.block == 1 or tile.axes[1].block < SHORTEST
    if tile.reduced_axis != 1 or one or apart or not settings.enabled("shared_rows"):
        return frozenset()
    before = {step for reduce in body.steps if reduce.stage == "reduce" and not reduce.across for step in behind(reduce)}
    return frozenset(id(step) for step in before if step.stage == "load" and not step.args)
