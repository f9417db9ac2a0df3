"""An index's place along a dimension, and the index along those before it. Imports codegen's leaf modules.

Dividing by what a kernel is given takes some twenty instructions an element. A small extent is a number in the source, which the
compiler divides by in two or three. By any other a kernel multiplies and shifts, as it is given both. Multiples of 16 are divided
by, because the compiler then knows that neighbours stay neighbours and loads them together.
"""

from __future__ import annotations

from codegen.aligned import KNOWN
from codegen.source_args import SMALL, ArgumentList


def divided(arguments: ArgumentList, index: str, dim: int, extent: int) -> tuple[str, str]:
    """Lines that define ``q{dim}`` and ``x{dim}``, the quotient and the rest of ``index`` by the dimension's extent."""
    if extent > SMALL and extent % KNOWN and not arguments.wide:
        factor, shift = reciprocal(extent)
        given = (arguments.constant(f"d{dim}_factor", factor - (1 << 32)), arguments.constant(f"d{dim}_shift", shift))
        size = arguments.size(f"d{dim}", extent)
        return f"q{dim} = _quotient({index}, {given[0]}, {given[1]})", f"x{dim} = {index} - q{dim} * {size}"
    size = arguments.size(f"d{dim}", extent, literal=True)
    return f"x{dim} = {index} % {size}", f"q{dim} = {index} // {size}"


def reciprocal(extent: int) -> tuple[int, int]:
    """``factor`` and ``shift`` such that index // extent == index * factor >> (32 + shift) for all indices below 2 to the 31st.

    From Granlund and Montgomery, "Division by invariant integers using multiplication" (1994): with l the bits of extent - 1, the
    factor, 2^(31 + l) / extent rounded up, is too large by less than 2^l / 2^(31 + l) of itself. It has 32 bits.
    """
    bits = (extent - 1).bit_length()
    return -(-(1 << (31 + bits)) // extent), bits - 1
