"""Lowers ops whose elements depend on where they stand: triangles and ranges. Imports torch and codegen's lowering modules."""

from __future__ import annotations

import torch

from codegen.expressions import Unsupported
from codegen.instructions import Part
from codegen.lowering import Lowering, arguments
from codegen.reductions import operand_of
from ir_nodes.node import Node


def lower_triangle(node: Node) -> list[Part]:
    """tril and triu: zero above or below a diagonal of the last two dimensions."""
    args, out = arguments(node), node.writes[0].layout
    source, rank = operand_of(args["self"]), len(out.size)
    lowering = Lowering(node, out.size)
    value = lowering.load(source)
    row, column = lowering.coord(rank - 2), lowering.coord(rank - 1)
    diagonal = lowering.read(args["diagonal"], torch.int32)
    relation = "<=" if node.name.startswith("tril") else ">="
    kept = lowering.expr(f"({{1}} - {{0}} {relation} {{2}})", row, column, diagonal, dtype=torch.bool)
    zero = lowering.read(0, value.dtype)
    chosen = lowering.expr("tl.where({0}, {1}, {2})", kept, value, zero, dtype=value.dtype)
    chosen.rounded = value.rounded
    lowering.write(0, chosen)
    return [lowering.part]


def lower_arange(node: Node) -> list[Part]:
    """arange of integers."""
    args, out = arguments(node), node.writes[0].layout
    if out.dtype.is_floating_point or len(out.size) != 1:
        raise Unsupported("a range of floats, which devices round in ways of their own")
    lowering = Lowering(node, out.size)
    start, step = (lowering.read(args.get(name, default), torch.int64) for name, default in (("start", 0), ("step", 1)))
    place = lowering.expr("{0}.to(tl.int64)", lowering.coord(0), dtype=torch.int64)
    lowering.write(0, lowering.expr("{0} + {1} * {2}", start, place, step, dtype=torch.int64))
    return [lowering.part]
