"""Lowers matrix products with a few rows or columns of results to sums, which share a kernel with what is around them. Imports
`ir_nodes` and codegen's leaf modules.

A network's last layer, which gives one number or two for each row, and the gradients of its first, over two or three coordinates:
what moves is one large matrix, read once, from which libraries' tiles make mostly padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

from codegen import forms
from codegen.expressions import Unsupported
from codegen.instructions import KEPT, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF
from codegen.pulled import Known
from codegen.reductions import accumulator, by_columns, operand_of
from codegen.small_products import FACTORS, added, refuse_dtypes
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

FEW = 4
"""Rows or columns of results at most."""
LEAST = 1 << 18
"""Elements of the large matrix; a library's kernel for fewer takes no longer than a launch."""
SHORT, APART, EACH = 256, 1024, 64
"""Up to how many summands of a row, or results along a column, four of each cost no more than a library's tiles in 16 bits; up to
how many of a row the narrow matrix is read in steps; and up to how many that matrix is another for other rows. On an H200, us
of a library and of these kernels alone: 2^20 rows of 64 for one, three results in bfloat16 36, 179 and 41, 49; 2^20 of 16 for
four 97 and 15; 16,384 of 4,096 for four 50 and 127 in steps; 4,096 times 196 of 32 for four 47 and 29, 32 of 196 36 and 64."""
_VECTORS = {"mv": ("self", "vec"), "addmv": ("mat", "vec"), "dot": ("self", "tensor")}
"""Ops whose second factor is a vector, and so the column of a matrix."""
_FACTORS = FACTORS | _VECTORS
NAMES = frozenset(_FACTORS)


@dataclass(frozen=True, slots=True)
class Product:
    """``wide`` (*batch, long, summands) times ``narrow`` (*batch, few, summands) is ``out`` (*batch, long, few), to which
    ``bias`` may be added."""

    wide: Operand
    narrow: Operand
    out: Layout
    bias: Operand | None

    @property
    def few(self) -> int:
        return self.out.size[-1]


def narrow_product(node: Node) -> Product | None:
    """What ``node`` multiplies, where the results have few rows or columns; None for others."""
    args = arguments(node)
    left, right = (operand_of(args[name]) for name in _FACTORS[node.name])
    out, bias = node.writes[0].layout, operand_of(args["self"]) if node.name.startswith(("add", "badd")) else None
    if node.name in _VECTORS:
        right, out, bias = _seen(right, Layout.unsqueezed, -1), out.unsqueezed(-1), bias and _seen(bias, Layout.unsqueezed, -1)
    if node.name == "dot":
        left, out = _seen(left, Layout.unsqueezed, -2), out.unsqueezed(-2)
    bias = bias and _seen(bias, Layout.expanded, out.size)
    if out.size[-1] <= out.size[-2]:
        found = Product(left, _seen(right, Layout.turned), out, bias)
    else:
        found = Product(_seen(right, Layout.turned), left, out.turned(), bias and _seen(bias, Layout.turned))
    return found if found.few <= FEW else None


def lower_narrow_product(node: Node, product: Product, known: Known) -> list[Part]:
    """One part that reads the wide matrix once; sums are held in float32, or float64, and rounded once. Raises Unsupported where
    a library had better multiply."""
    if not settings.enabled("narrow_products"):
        raise Unsupported("narrow_products is switched off")
    layout = product.wide.layout
    refuse_dtypes(node, product.wide, product.narrow)
    if math.prod(layout.size) < LEAST:
        raise Unsupported(f"no kernel for {node.target}: a library's kernel for less than {LEAST} elements takes no longer")
    columns = layout.size[-2] > 1 and layout.stride[-2] < layout.stride[-1]  # walked as it lies, as what makes it is
    if _better_in_tiles(product, columns, known):
        raise Unsupported(f"no kernel for {node.target}: a library multiplies matrices of this size")
    wide, narrow = (_seen(one, Layout.turned) if columns else one for one in (product.wide, product.narrow))
    size, axis, across = wide.layout.size, len(layout.size) - (2 if columns else 1), -1 if columns else -2
    lowering = Lowering(node, size, forms.intervals(size, (axis,)), layout.size[:-1])
    lowering.part.column = by_columns(wide.layout, (axis,))
    held = accumulator(layout.dtype)
    element = lowering.cast(lowering.load(wide), held)
    for number in range(product.few):
        one = Operand(narrow.value, narrow.layout.selected(across, number).unsqueezed(across))
        factor = lowering.cast(lowering.load(one), held)
        bias = product.bias and lowering.load(_seen(product.bias, Layout.selected, -1, number), KEPT)
        total = lowering.reduce("add", lowering.expr("{0} * {1}", element, factor, dtype=held))
        if bias is not None:
            total = added(lowering, lowering.cast(bias, held), total)
        lowering.store(node.writes[0].value, product.out.selected(-1, number), total, KEPT)
    return [lowering.part]


def _better_in_tiles(product: Product, columns: bool, known: Known) -> bool:
    """Does a library take less time, though nothing shares its kernel?"""
    *batch, long, inner = product.wide.layout.size
    if not columns and product.few > 1 and product.narrow.layout.stride[-1] != 1 and inner > APART:
        return True
    if product.out.dtype not in HALF or product.wide.value in known.parts:
        return False
    if columns:
        return product.few == 1 or product.few == FEW and long > SHORT
    if product.few > 2 and inner > SHORT or batch and inner > EACH:
        return True
    return product.bias is not None and inner > APART  # it is loaded for a row or two at a time


def _seen(operand: Operand, way: Callable[..., Layout], *how: object) -> Operand:
    """The operand through what a method of its layout gives."""
    return Operand(operand.value, way(operand.layout, *how))
