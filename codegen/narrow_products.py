"""Lowers matrix products with a few rows or columns of results to sums, which share a kernel with what is around them. Imports
torch, `ir_nodes` and codegen's leaf modules.

A network's last layer, which gives one number or two for each row, and the gradients of its first, over two or three coordinates:
what moves is one large matrix, read once, from which libraries' tiles make mostly padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from codegen import forms
from codegen.expressions import Unsupported
from codegen.instructions import KEPT, Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF
from codegen.pulled import Known
from codegen.reductions import accumulator, by_columns, operand_of
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
_FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"),
            "mv": ("self", "vec"), "addmv": ("mat", "vec"), "dot": ("self", "tensor")}
_VECTORS = ("mv", "addmv", "dot")
"""Ops whose second factor is a vector, and so the column of a matrix."""
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
    out, bias = node.writes[0].layout, args["self"] if node.name.startswith(("add", "badd")) else None
    if node.name in _VECTORS:
        right, out = _unsqueezed(right, -1), _unsqueeze(out, -1)
        bias = None if bias is None else _unsqueezed(operand_of(bias), -1)
    if node.name == "dot":
        left, out = _unsqueezed(left, -2), _unsqueeze(out, -2)
    bias = None if bias is None else Operand(operand_of(bias).value, _expanded(operand_of(bias).layout, out.size))
    if out.size[-1] <= out.size[-2]:
        found = Product(left, _turned(right), out, bias)
    else:
        found = Product(_turned(right), left, _turn(out), None if bias is None else _turned(bias))
    return found if found.few <= FEW else None


def lower_narrow_product(node: Node, product: Product, known: Known) -> list[Part]:
    """One part that reads the wide matrix once; sums are held in float32, or float64, and rounded once. Raises Unsupported where
    a library had better multiply."""
    if not settings.enabled("narrow_products"):
        raise Unsupported("narrow_products is switched off")
    layout = product.wide.layout
    if {layout.dtype, product.narrow.layout.dtype} != {product.out.dtype}:
        raise Unsupported(f"no kernel for {node.target} of several dtypes")
    if layout.dtype not in (torch.float32, torch.float64, *HALF):
        raise Unsupported(f"no kernel for {node.target} of {str(layout.dtype).removeprefix('torch.')}")
    if math.prod(layout.size) < LEAST:
        raise Unsupported(f"no kernel for {node.target}: a library's kernel for less than {LEAST} elements takes no longer")
    columns = layout.size[-2] > 1 and layout.stride[-2] < layout.stride[-1]  # walked as it lies, as what makes it is
    if _better_in_tiles(product, columns, known):
        raise Unsupported(f"no kernel for {node.target}: a library multiplies matrices of this size")
    wide, narrow = (_turned(one) if columns else one for one in (product.wide, product.narrow))
    size, axis = wide.layout.size, len(layout.size) - (2 if columns else 1)
    lowering = Lowering(node, size, forms.intervals(size, (axis,)), layout.size[:-1])
    lowering.part.column = by_columns(wide.layout, (axis,))
    held = accumulator(layout.dtype)
    element = lowering.cast(lowering.load(wide), held)
    for number in range(product.few):
        factor = lowering.cast(lowering.load(_chosen(narrow, -1 if columns else -2, number, keep=True)), held)
        bias = None if product.bias is None else lowering.load(_chosen(product.bias, -1, number), KEPT)
        total = lowering.reduce("add", lowering.expr("{0} * {1}", element, factor, dtype=held))
        if bias is not None:
            total = _added(lowering, lowering.cast(bias, held), total)
        lowering.store(node.writes[0].value, _choose(product.out, -1, number), total, KEPT)
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


def _added(lowering: Lowering, bias: Instr, total: Instr) -> Instr:
    args = arguments(lowering.part.node)
    beta, alpha = (lowering.read(args[name], total.dtype) for name in ("beta", "alpha"))
    return lowering.expr("tl.where({3} == 0, 0.0, {3} * {2}) + {1} * {0}", total, alpha, bias, beta, dtype=total.dtype)


def _turn(layout: Layout) -> Layout:
    (*size, rows, columns), (*stride, down, across) = layout.size, layout.stride
    return replace(layout, size=(*size, columns, rows), stride=(*stride, across, down))


def _turned(operand: Operand) -> Operand:
    return Operand(operand.value, _turn(operand.layout))


def _unsqueeze(layout: Layout, axis: int) -> Layout:
    at = axis % (len(layout.size) + 1)
    size, stride = ((*of[:at], fill, *of[at:]) for of, fill in ((layout.size, 1), (layout.stride, 0)))
    return replace(layout, size=size, stride=stride)


def _unsqueezed(operand: Operand, axis: int) -> Operand:
    return Operand(operand.value, _unsqueeze(operand.layout, axis))


def _expanded(layout: Layout, size: tuple[int, ...]) -> Layout:
    """``layout`` as it is read for results of ``size``."""
    new = len(size) - len(layout.size)
    stride = (0 if one == 1 else step for one, step in zip(layout.size, layout.stride))
    return replace(layout, size=size, stride=(*[0] * new, *stride))


def _choose(layout: Layout, axis: int, number: int, keep: bool = False) -> Layout:
    """The ``number``-th along ``axis``, which stays with one element if ``keep``."""
    at, kept = axis % len(layout.size), (1,) if keep else ()
    size, stride = ((*of[:at], *kept, *of[at + 1 :]) for of in (layout.size, layout.stride))
    return replace(layout, size=size, stride=stride, offset=layout.offset + number * layout.stride[at])


def _chosen(operand: Operand, axis: int, number: int, keep: bool = False) -> Operand:
    return Operand(operand.value, _choose(operand.layout, axis, number, keep))
