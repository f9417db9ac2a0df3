"""Lets rows that start off 16-byte boundaries be walked in blocks that start on them. Imports codegen's leaf modules.

Rows that are looped over or cut among programs have blocks that lie within them and need no mask ("peeled"); those at the ends
load whole vectors, too, and mask what they compute with. Where columns are reduced, a program takes every so-many-th row, all of
which lie equally far off a boundary, and loads whole vectors, whatever lies beside the row in them ("covered"): a vector with one
element of the row lies in its memory's page. So does a program that holds its row in registers.

Rows that start on boundaries and end off them ("ragged") are loaded in whole vectors, too: padded logits, 1,000 classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Sequence

from codegen.body import Body, Step
from codegen.instructions import FULL, IN_BITS
from codegen.source_args import SMALL
from ir_nodes import settings

if TYPE_CHECKING:
    from codegen.tile import Axis, Strides, Tile

KNOWN = 16
"""What the compiler is told that sizes and strides are multiples of."""

FEWEST = 4
"""Elements that are loaded at a time at least where rows start on multiples of them. With two of float32, which are 8 bytes as
well, norms' gradients take up to 15 % more than from boundaries on."""


def walked(dims: tuple[int, ...], strides: tuple[int, ...], axes: tuple[Axis | None, Axis, Axis | None]) -> int | None:
    """The stride between rows of an operand that runs along axis 1 with stride 1; 0 where it has one row, None where neither."""
    rows, along = axes[0], axes[1]
    if rows is None or not along.dims or strides[along.dims[-1]] != 1:
        return None
    for axis in (rows, along):
        if any(strides[a] != strides[b] * dims[b] for a, b in zip(axis.dims, axis.dims[1:])):
            return None
    if axes[2] is not None and any(strides[dim] for dim in axes[2].dims):
        return None
    return strides[rows.dims[-1]] if rows.dims else 0


def peel(tile: Tile, body: Body) -> Tile:
    """The tile with the rows' ends taken off where that lets whole blocks run without masks, loading 16 bytes at a time."""
    full = over_rows(body, tile.strides)
    strides, width = _walk(tile, full)
    if not settings.enabled("aligned_rows"):
        return tile
    flat = tile.axes[0] is None
    by_run = any(step.stage == "random" or step.text == IN_BITS for step in body.steps)  # several, from the row's first on
    if body.backwards or not flat and by_run:
        return tile
    if len(strides) == 1 and strides[0] % width and not tile.share:
        return replace(tile, peel=width, row=strides[0], vectors=not any(_unlike(step) for step in body.steps))
    return replace(tile, peel=1) if tile.reduced_axis is not None or flat else tile


def cover(tile: Tile, body: Body, shortest: int) -> Tile:
    """The tile, whose programs take one row or every ``shares``-th: where rows start off boundaries, they load 16 bytes at a time
    nevertheless. Rows below ``shortest`` elements are left as they are, and rows that fill their lanes, so that none are left for
    what lies between a boundary and a row's start."""
    full = over_rows(body, tile.strides)
    strides, width = _walk(tile, full)
    if not settings.enabled("aligned_rows") or len(strides) != 1 or not strides[0] % width or tile.shares % width:
        return tile
    short = tile.reduced_axis == 1 and tile.axes[1].block * max(tile.strips, 1) < tile.axes[1].extent + width - 1
    if tile.axes[1].extent < shortest or short or any(_unlike(step) for step in body.steps):
        return tile
    return replace(tile, covered=width, row=strides[0])


def end_in_vectors(tile: Tile, body: Body, shortest: int) -> Tile:
    """The tile, which loads 16 bytes at a time although its rows, whose starts lie on boundaries, end off them or are of a length
    that the compiler does not know to be aligned. Rows below ``shortest`` elements that end off boundaries are left as they
    are."""
    if tile.peel > 1 or tile.covered or tile.depth or tile.axes[0] is None or tile.axes[2] is not None or body.backwards:
        return tile
    full = [step for step in over_rows(body, tile.strides) if step.stage in ("load", "store")]
    strides, width = _walk(tile, full)
    cut = tile.share and tile.reduced_axis == 1 and not tile.mixed  # programs' shares of a row begin anywhere
    if not settings.enabled("aligned_rows") or cut or len(strides) != 1 or strides[0] % width:
        return tile
    short = tile.axes[1].extent < shortest and tile.axes[1].extent % width
    if width == 1 or short or tile.axes[1].block % width:
        return tile
    if not (tile.axes[1].extent % KNOWN or strides[0] % KNOWN) or tile.axes[1].extent <= SMALL:  # usual masks cut no vectors
        return tile
    alone = tile.reduced_axis is None and tile.axes[0].block == 1
    return replace(tile, ragged=width, row=strides[0], peel=1 if alone else tile.peel)


def row_stride(tile: Tile, body: Body) -> int:
    """How far apart rows lie in all operands, 0 where that differs."""
    strides = _row_strides(tile, over_rows(body, tile.strides))
    return strides[0] if len(strides) == 1 else 0


def in_vectors(tile: Tile, body: Body) -> bool:
    """False where blocks of several rows are loaded an element at a time: what a loop copies ahead then lies in shared memory
    column by column, where threads that write neighbours wait for one another (8 times as long, measured under Triton 3.6)."""
    rows, along = tile.axes[0], tile.axes[1]
    if tile.depth or rows is None or rows.block == 1 or tile.covered or tile.ragged or tile.peel > 1 or not along.dims:
        return True
    loads = [tile.strides[id(step)] for step in over_rows(body, tile.strides) if step.stage == "load"]
    full = [strides for strides in loads if any(strides[dim] for dim in along.dims)]  # others have an element for each row
    apart = {stride for strides in full for stride in strides if stride > 1}
    return not full or all(size % KNOWN == 0 for size in (*apart, tile.dims[along.dims[-1]]))


def loaded_singly(tile: Tile, body: Body) -> bool:
    """Do programs walk rows, reducing nothing, most of whose operands lie off boundaries? Threads with neighbours would load one
    of them at a time, each as far from the next thread's as a vector is long: of 5 operands off boundaries 91 us, of 9 66, where
    neighbouring threads' elements take 60 and 35 (an H200, float32, 200 and 100 MB)."""
    rows, along, others = tile.axes
    if rows is None or body.reduced is not None or tile.told is not None or tile.peel > 1 or tile.covered or tile.depth:
        return False
    if not settings.enabled("aligned_rows"):
        return False
    apart = [dim for axis in (rows, others) if axis is not None for dim in axis.dims]
    walk = [step for step in over_rows(body, tile.strides) if along.dims and tile.strides[id(step)][along.dims[-1]] == 1]
    alike = [step for step in walk if not _unlike(step) or _takes_rows(step) or _is_moved_by_vectors(step)]
    whole = [step for step in alike if step.access is not None and not step.access.byte_offset % 16
             and (tile.ragged and tile.follows(step)
                  or not any(size % KNOWN for size in (along.extent, *(tile.strides[id(step)][dim] for dim in apart))))]
    return len(walk) - len(whole) > max(len(whole), 1)


def _takes_rows(step: Step) -> bool:
    """Does it read by indices that leave it on boundaries, such as all channels of a window's pixels?"""
    return step.stage == "take" and not step.takes_bits and not any(stride % KNOWN for stride, _ in step.payload)  # type: ignore[attr-defined]


def _is_moved_by_vectors(step: Step) -> bool:
    """Does it read a window that begins on a boundary, such as a quarter of an image's channels?"""
    return step.stage == "load" and step.access is not None and not step.access.scattered and step.access.shift % KNOWN == 0


def over_rows(body: Body, strides: Strides) -> list[Step]:
    """The accesses to memory that differ from element to element and are walked by these ``strides``."""
    return [step for step in body.steps if step.access is not None and step.level == FULL and id(step) in strides]


def in_a_vector(steps: Sequence[Step], *strides: int) -> int:
    """Elements of the narrowest of these operands in 16 bytes; 1 where there is none. Half or a quarter of them, but `FEWEST`,
    where ``strides`` are multiples of these only: then no row has to be walked from a boundary before it, from which what all
    rows share comes one by one. On an H200, bfloat16, a softmax over 300 takes 22.8 us so, 30.6 otherwise, a layer norm's
    gradient over 12,004 takes 58 and 75."""
    widest = 16 // min((step.access.dtype.itemsize for step in steps if step.access is not None), default=16)
    fitting = (width for width in (widest, widest // 2, widest // 4) if width >= FEWEST)
    return next((width for width in fitting if not any(stride % width for stride in strides)), widest)


def _walk(tile: Tile, steps: Sequence[Step]) -> tuple[list[int], int]:
    """The strides of these operands' rows, and how many elements of them are loaded at a time."""
    strides = _row_strides(tile, steps)
    return strides, in_a_vector(steps, *strides)


def _row_strides(tile: Tile, steps: Sequence[Step]) -> list[int]:
    """The strides, each once, of these operands' rows, where they run along axis 1 and have several."""
    found = dict.fromkeys(walked(tile.dims, tile.strides[id(step)], tile.axes) for step in steps)
    return [stride for stride in found if stride]


def _unlike(step: Step) -> bool:
    """True where an instruction must not see elements beside the row."""
    access = step.access
    return step.stage in ("random", "take") or access is not None and (access.scattered or access.shift > 0)
