"""An index's place along a dimension, and the index along those before it. Imports codegen's leaf modules.

Dividing by what a kernel is given takes some twenty instructions an element. A small extent is a number in the source, which the
compiler divides by in two or three. By any other a kernel multiplies and shifts, as it is given both. That hides from the
compiler that neighbours stay neighbours, so that it would no longer load them together: where elements lie flat, and along the
axis that a tile names (`Tile.told`), it is told so, elsewhere along memory multiples of 16 are divided by.
"""

from __future__ import annotations

import math

from codegen.aligned import KNOWN
from codegen.source_args import SMALL, ArgumentList
from codegen.tile import Axis, Tile


def is_flat(tile: Tile, number: int) -> bool:
    """Is the axis the tile's only one, so that blocks begin at multiples of 16 of its elements?"""
    axis = tile.axes[number]
    alone = sum(one is not None for one in tile.axes) == 1 and not (tile.peel or tile.covered or tile.ragged or tile.words)
    return alone and axis is not None and not axis.block % KNOWN


def runs_from(tile: Tile, number: int, strides: tuple[int, ...]) -> int:
    """From which of the axis' dimensions on an operand runs with one stride."""
    axis = tile.axes[number]
    dims = axis.dims if axis is not None else ()
    start = max(len(dims) - 1, 0)
    while start and strides[dims[start - 1]] == strides[dims[start]] * tile.dims[dims[start]]:
        start -= 1
    return start


def places(arguments: ArgumentList, tile: Tile, number: int) -> list[str]:
    """Lines that define the index ``x`` along each dimension of axis ``number``, and, where elements lie flat, ``r`` along it and
    all behind it for operands that run on through these."""
    axis = tile.axes[number]
    assert axis is not None
    rest, lines, known = f"i{number}", list[str](), is_flat(tile, number)
    near = math.gcd(tile.dims[axis.dims[-1]], KNOWN) if known or tile.told == number else 0
    moving = [strides for strides in tile.strides.values() if strides[axis.dims[-1]]]
    runs = {runs_from(tile, number, strides) for strides in moving} if known else set()
    for place in reversed(range(1, len(axis.dims))):
        dim = axis.dims[place]
        told = (f"{near}" if known else f"[1, {near}]" if number else f"[{near}, 1]") if near > 1 else ""
        lines += _divided(arguments, rest, dim, tile.dims[dim], told, number == 0 or near > 1, place == len(axis.dims) - 1)
        rest = f"q{dim}"
        if place in runs and place < len(axis.dims) - 1:
            extent = math.prod(tile.dims[one] for one in axis.dims[place:])
            run, side = f"i{number} - q{dim} * {arguments.size(f'e{dim}', extent)}", math.gcd(extent, KNOWN)
            lines.append(f"r{dim} = " + (f"tl.max_contiguous(tl.multiple_of({run}, {side}), {side})" if side > 1 else run))
    return [*lines, f"x{axis.dims[0]} = {rest}"]


def _divided(arguments: ArgumentList, index: str, dim: int, extent: int, near: str, free: bool, inmost: bool) -> tuple[str, str]:
    """Lines that define ``q{dim}`` and ``x{dim}``, the quotient and the rest of ``index`` by the dimension's extent. ``near``: so
    many neighbours, from each multiple of that on, lie side by side in the axis' last dimension, or ""; ``free``: they are told
    of, or there are none; ``inmost``: this is that dimension."""
    if extent > SMALL and (extent % KNOWN or free) and not arguments.wide:
        given = _reciprocal(arguments, f"d{dim}", extent)
        quotient = f"_quotient({index}, {given[0]}, {given[1]})"
        rest = f"{index} - q{dim} * {arguments.size(f'd{dim}', extent)}"
        if near:
            # What is told of a call's result is lost, and so is what is told of one that changes its type.
            unsigned = f"tl.umulhi({index}.to(tl.uint32), {given[0]}.to(tl.uint32)) >> {given[1]}.to(tl.uint32)"
            quotient = f"tl.max_constancy({unsigned}, {near}).to(tl.int32)"
            rest = f"tl.max_contiguous(tl.multiple_of({rest}, {near}), {near})" if inmost else f"tl.max_constancy({rest}, {near})"
        return f"q{dim} = {quotient}", f"x{dim} = {rest}"
    size = arguments.size(f"d{dim}", extent, literal=True)
    return f"x{dim} = {index} % {size}", f"q{dim} = {index} // {size}"


def parted(arguments: ArgumentList, program: str, name: str, axis: Axis, over: int = 0) -> tuple[list[str], str, str]:
    """Programs in the order of an axis' blocks, of which there are ``name``: lines to write before, how often all blocks lie
    before ``program``, and its block, or "" where there is one. ``over``: so many more elements than the axis has."""
    count = -(-(axis.extent + over) // axis.block)
    if count == 1:
        return [], program, ""
    given = arguments.constant(name, count)
    if arguments.wide:
        return [f"q_{name} = {program} // {given}"], f"q_{name}", f"({program} % {given})"
    factor, shift = _reciprocal(arguments, name, count)
    return [f"q_{name} = _quotient({program}, {factor}, {shift})"], f"q_{name}", f"({program} - q_{name} * {given})"


def _reciprocal(arguments: ArgumentList, name: str, extent: int) -> tuple[str, str]:
    """The kernel's arguments for `reciprocal`."""
    factor, shift = reciprocal(extent)
    return arguments.constant(f"{name}_factor", factor - (1 << 32)), arguments.constant(f"{name}_shift", shift)


def reciprocal(extent: int) -> tuple[int, int]:
    """``factor`` and ``shift`` such that index // extent == index * factor >> (32 + shift) for all indices below 2 to the 31st.

    From Granlund and Montgomery, "Division by invariant integers using multiplication" (1994): with l the bits of extent - 1, the
    factor, 2^(31 + l) / extent rounded up, is too large by less than 2^l / 2^(31 + l) of itself. It has 32 bits.
    """
    bits = (extent - 1).bit_length()
    return -(-(1 << (31 + bits)) // extent), bits - 1


def divisible(text: str, value: int) -> str:
    """The size ``text``, so that the compiler sees what power of two below 16 divides it; kernels differ by that, not by size."""
    side = math.gcd(value, KNOWN)
    return f"({text} // {side} * {side})" if 1 < side < KNOWN else text
