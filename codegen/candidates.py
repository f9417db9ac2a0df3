"""Algorithms of cuBLASLt that are worth a measurement for one matrix product. Imports `codegen.cublaslt` and plan types only.

The library suggests eight at most, by a model of its own, and may miss a kernel that it suggests for a product like it, with
twice the rows, say, or without a bias: up to a sixth of the time on an H200. What it suggests for such products is asked for,
too, and what the library says can run the one in question is measured beside its own suggestions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from codegen.cublaslt import Library, LibraryError, Multiplier
from codegen.kernel import Algorithm, MatMul

SIZES = ("rows", "columns", "inner")
TIMES = (2, 1 / 2, 4, 1 / 4)
SMALLEST = 64
"""Elements: smaller products have kernels of other kinds."""
STEP = 16
"""Sizes stay multiples of so many elements, as fast kernels want them."""


def candidates(library: Library, multiplier: Multiplier, reductions: int) -> list[Algorithm]:
    """The library's suggestions for the product of ``multiplier``, the best by its own judgement first, then others that can
    run it; ``reductions``: how parts of sums may be added up. Raises LibraryError where it refuses to answer."""
    found = multiplier.suggestions(reductions)
    known = {one.words for one in found}
    for product in neighbours(multiplier.product) if found else ():
        with contextlib.suppress(LibraryError):  # nothing is known of that one
            new = [one for one in Multiplier(library, product).suggestions(reductions) if one.words not in known]
            known.update(one.words for one in new)
            for one in new:
                able = multiplier.able(one, len(found) + 1)
                if able is not None:
                    found.append(able)
    return found


def neighbours(product: MatMul) -> Iterator[MatMul]:
    """Products that the library may have other suggestions for: without the bias, or larger or smaller in one direction."""
    if product.bias:
        yield replace(product, bias=False, relu=False)
    for name in SIZES:
        for times in TIMES:
            size = getattr(product, name) * times
            if size >= SMALLEST and size % STEP == 0:
                yield resized(product, name, int(size))


def resized(product: MatMul, name: str, size: int) -> MatMul:
    """``product`` with another number of rows, columns or summands; what lies between rows in memory is as much as before."""
    more = size - getattr(product, name)
    (left_over, left_apart), (right_over, right_apart) = product.left, product.right
    left = left_apart + more * (name == ("rows" if left_over else "inner"))
    right = right_apart + more * (name == ("inner" if right_over else "columns"))
    made = product.apart + more * (name == "columns")
    sizes = {one: size if one == name else getattr(product, one) for one in SIZES}
    return replace(product, **sizes, left=(left_over, left), right=(right_over, right), apart=made)
