"""Lowers matrix products to instructions, so that what follows can share their kernel. Imports torch, `ir_nodes` and codegen's
leaf modules.

Nothing is lowered so unless `codegen.templates` has measured that it pays: libraries multiply faster than a template does, and
only what a fused epilogue saves can make up for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from codegen.expressions import Unsupported
from codegen.forms import Form, collapse
from codegen.instructions import FULL, UNIFORM, Instr, MemAccess, Part
from codegen.lowering import Lowering, arguments, byte_span
from codegen.promotion import HALF
from ir_nodes.node import Node, Operand

SMALLEST = 16  # the least extent that tensor cores take


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times columns, each a sum over ``inner`` products. ``left`` and ``right``: strides of the operands (rows, inner) and
    (inner, columns), in elements."""

    rows: int
    columns: int
    inner: int
    left: tuple[int, int]
    right: tuple[int, int]

    @property
    def pattern(self) -> Form:
        """A form that tells rows from columns: stride 1 along these, another stride along those."""
        return collapse((self.rows, self.columns), (self.columns + 1, 1))


def is_product(node: Node) -> bool:
    return node.target in ("aten::mm.out", "aten::addmm.out", "aten::mm", "aten::addmm")


def lower_product(node: Node) -> Part:
    """The part of ``mm`` or ``addmm`` in 16 bits; sums are held in float32 and rounded once, as the libraries do.

    Raises Unsupported.
    """
    if not is_product(node) or len(node.writes) != 1:
        raise Unsupported(f"{node.target} is no matrix product")
    args, out = arguments(node), node.writes[0].layout
    left, right = (args["self"], args["mat2"]) if "mat1" not in args else (args["mat1"], args["mat2"])
    dtypes = {operand.layout.dtype for operand in (left, right)} | {out.dtype}
    if len(dtypes) > 1 or out.dtype not in HALF:
        raise Unsupported("a matrix product that is not in 16 bits")
    (rows, inner), columns = left.layout.size, right.layout.size[1]
    if min(rows, inner, columns) < SMALLEST:
        raise Unsupported(f"a matrix product with fewer than {SMALLEST} rows, columns or summands")
    lowering = Lowering(node, (rows, columns))
    product = Product(rows, columns, inner, left.layout.stride, right.layout.stride)
    factors = tuple(factor(lowering, operand) for operand in (left, right))
    total = lowering.add(Instr("dot", torch.float32, FULL, factors, payload=product))
    if "mat1" in args:
        beta, alpha = (lowering.read(args[name], torch.float32) for name in ("beta", "alpha"))
        bias = lowering.load(args["self"])
        total = lowering.expr("tl.where({3} == 0, 0.0, {3} * {2}) + {1} * {0}", total, alpha, bias, beta, dtype=torch.float32)
    lowering.write(0, total)
    return lowering.part


def factor(lowering: Lowering, operand: Operand) -> Instr:
    """An operand whose elements the product itself walks."""
    layout = operand.layout
    if layout.flipped:
        raise Unsupported("a conjugate or negative view")
    start = layout.offset * layout.itemsize
    access = MemAccess(operand.value, (), layout.dtype, start, UNIFORM, *byte_span(layout), scattered=True)
    return lowering.add(Instr("factor", layout.dtype, UNIFORM, access=access))


def product_lines(name: str, pointers: tuple[str, str], strides: list[str], inner: str) -> list[str]:
    """Lines that define ``name`` as this program's block of the product; ``strides`` as four arguments, "" where
    elements are neighbours: only then are they loaded side by side. ``inner`` as one."""
    left, right = pointers
    down, along, across, beside = (f" * {stride}" if stride else "" for stride in strides)
    return [
        f"{name} = tl.full([B0, B1], 0.0, tl.float32)",
        f"for k in tl.range(0, {inner}, BK):",
        f"    {name}_k = k + tl.arange(0, BK)",
        f"    {name}_left = tl.load({left} + i0{down} + {name}_k[None, :]{along}, "
        f"mask=m0 & ({name}_k[None, :] < {inner}), other=0.0)",
        f"    {name}_right = tl.load({right} + {name}_k[:, None]{across} + i1{beside}, "
        f"mask=({name}_k[:, None] < {inner}) & m1, other=0.0)",
        f"    {name} = tl.dot({name}_left, {name}_right, {name})",
    ]
