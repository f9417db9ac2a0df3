"""Lowers matrix products of a few summands to elementwise instructions, which share a kernel with what is around them. Imports
torch, `ir_nodes` and codegen's leaf modules.

Rotations of many points, a network's first layer over two or three coordinates, attention over the nine pixels of a window:
libraries multiply such in tiles of 16 and more, most of which is padding.
"""

from __future__ import annotations

import math

import torch

from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF
from codegen.reductions import operand_of
from ir_nodes import settings
from ir_nodes.node import Node, Operand

FEW, SOME, AREA = 7, 16, 512
"""Summands at most; and of each of a batch, if it has so many results at most. On an H200, a layer over 2 to 7 coordinates with
its activation, 2^26 results in bfloat16: 42 to 110 us, the library's product and a kernel 153 to 238; over 8, 106, the library
with the activation 64. 2^20 rotations by 3 x 3: 29 us, 3,000; 75,264 products of 9 x 9 x 32: 56 us, 221; 8,192 of 32 x 16 x 32:
36 us, 29."""
LEAST = 1 << 16
"""Elements of the result; a library's kernel for fewer takes no longer than a launch."""
FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}
NAMES = frozenset(FACTORS)


def lower_small_product(node: Node) -> list[Part]:
    """mm, addmm, bmm and baddbmm; sums are held in float32, or float64, and rounded once. Raises Unsupported where a library
    had better multiply."""
    if not settings.enabled("small_products"):
        raise Unsupported("small_products is switched off")
    args, out = arguments(node), node.writes[0].layout
    left, right = (operand_of(args[name]) for name in FACTORS[node.name])
    refuse_dtypes(node, left, right)
    inner, batched = left.layout.size[-1], len(out.size) == 3
    each = batched and inner <= SOME and math.prod(out.size[1:]) <= AREA
    if not 0 < inner or inner > FEW and not each:
        raise Unsupported(f"no kernel for {node.target}: a library multiplies matrices of this size")
    if math.prod(out.size) < LEAST:
        raise Unsupported(f"no kernel for {node.target}: a library's kernel for less than {LEAST} results takes no longer")
    lowering = Lowering(node, out.size)
    total: Instr | None = None
    for number in range(inner):
        one, other = (lowering.load(_slice(operand, dim, number)) for operand, dim in ((left, -1), (right, -2)))
        text = "{0} * {1}" if total is None else "{2} + {0} * {1}"
        total = lowering.expr(text, one, other, *([total] if total is not None else []), dtype=one.dtype)
    assert total is not None
    if node.name not in ("mm", "bmm"):
        total = added(lowering, lowering.load(operand_of(args["self"])), total)
    lowering.write(0, total)
    return [lowering.part]


def refuse_dtypes(node: Node, left: Operand, right: Operand) -> None:
    """Raises Unsupported where a product is not of one dtype that kernels add up."""
    out = node.writes[0].layout.dtype
    if {left.layout.dtype, right.layout.dtype} != {out} or out not in (torch.float32, torch.float64, *HALF):
        raise Unsupported(f"no kernel for {node.target} of {str(out).removeprefix('torch.')}")


def added(lowering: Lowering, bias: Instr, total: Instr) -> Instr:
    """The op's beta times what is added, unless that is nought, plus its alpha times the product."""
    args = arguments(lowering.part.node)
    beta, alpha = (lowering.read(args[name], total.dtype) for name in ("beta", "alpha"))
    return lowering.expr("tl.where({3} == 0, 0.0, {3} * {2}) + {1} * {0}", total, alpha, bias, beta, dtype=total.dtype)


def _slice(operand: Operand, dim: int, number: int) -> Operand:
    """The ``number``-th row, or column, which stands for all."""
    return Operand(operand.value, operand.layout.selected(dim, number).unsqueezed(dim))
