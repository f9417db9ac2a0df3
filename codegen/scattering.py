"""Lowers scatter and its like: numbers stored at, or added to, the places that an index tensor names. Imports `ir_nodes` and
codegen's lowering modules.

Where several numbers go to one place, which of them stays is left open, and the order of sums differs from run to run, as in
ATen's kernels, which round 16-bit sums after each number, too. GPUs add 16-bit numbers several at a time where rows lie on
boundaries; others are summed in float32 (`codegen.widened`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from codegen.aligned import KNOWN
from codegen.expressions import Unsupported
from codegen.indexing import check_order, index_of, spread, without
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF
from codegen.reductions import operand_of
from codegen.widened import in_place, sums_for
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

_SUMMED = (torch.float32, torch.float64, *HALF, torch.int32, torch.int64)
"""What GPUs add to memory at once."""


def lower_scatter(node: Node, scratch: int) -> list[Part]:
    """scatter with a number or with a tensor, scatter_add, and scatter_reduce where that is the same."""
    args, write = arguments(node), node.writes[0]
    sums = node.name.startswith("scatter_reduce") and args["reduce"] == "sum" and args["include_self"]
    if "reduce" in args and not sums:
        raise Unsupported(f"no kernel for {node.target} by {args['reduce']}")
    index = operand_of(args["index"])
    if not write.layout.size or len(index.layout.size) != len(write.layout.size):
        raise Unsupported("a scatter without dimensions")
    adds = sums or node.name.startswith("scatter_add")
    lowering = Lowering(node, index.layout.size)
    if "value" in args:
        value = lowering.read(args["value"], write.layout.dtype)
    else:
        source = operand_of(args["src"])
        value = lowering.load(Operand(source.value, replace(source.layout, size=index.layout.size)))
    return _into(node, args, lowering, index, index.layout, lowering.cast(value, write.layout.dtype), adds, scratch)


def lower_index_add(node: Node, scratch: int) -> list[Part]:
    """index_add: sums of slices."""
    args, write = arguments(node), node.writes[0]
    index, source = operand_of(args["index"]), operand_of(args["source"])
    rank = len(write.layout.size)
    if rank == 0 or len(index.layout.size) != 1 or len(source.layout.size) != rank:
        raise Unsupported("an index of no dimension")
    lowering = Lowering(node, source.layout.size)
    value, alpha = lowering.load(source), lowering.read(args.get("alpha", 1), write.layout.dtype)
    scaled = lowering.expr("{0} * {1}", value, alpha, dtype=value.dtype)
    return _into(node, args, lowering, index, spread(index.layout, 0, rank - args["dim"] % rank - 1), scaled, True, scratch)


def lower_index_fill(node: Node, scratch: int) -> list[Part]:
    """index_fill: a number in slices."""
    args, write = arguments(node), node.writes[0]
    index, rank = operand_of(args["index"]), len(write.layout.size)
    if rank == 0 or len(index.layout.size) != 1:
        raise Unsupported("an index of no dimension")
    dim = args["dim"] % rank
    size = write.layout.size
    lowering = Lowering(node, (*size[:dim], index.layout.size[0], *size[dim + 1 :]))
    value = lowering.cast(lowering.read(args["value"], write.layout.dtype), write.layout.dtype)
    return _into(node, args, lowering, index, spread(index.layout, 0, rank - dim - 1), value, False, scratch)


def _into(node: Node, args: dict[str, Any], lowering: Lowering, index: Operand, seen: Layout, value: Instr,
          adds: bool, scratch: int) -> list[Part]:
    """``value`` at the places along ``dim`` that ``index``, seen through ``seen``, names; elsewhere stays what there was."""
    write, source = node.writes[0], operand_of(args["self"])
    dim = args["dim"] % len(write.layout.size)
    if adds:
        check_order(write.layout.dtype, _SUMMED)
    together = node.name.startswith("index_add") and _in_whole_rows(write.layout, dim)
    into = (adds and sums_for(node, source, scratch, lowering.part.numel, together)) or in_place(node, source)
    at = index_of(lowering, index, seen, write.layout.size[dim])
    rest = without(replace(into.layout, size=lowering.shape), (dim,))
    places = [*into.turns(lowering, seen), (at, into.layout.stride[dim], into.layout.size[dim])]
    lowering.put(into.target, rest, places, value, "add" if adds else "set")
    return into.around(lowering.part)


def _in_whole_rows(layout: Layout, dim: int) -> bool:
    """Are rows of whole vectors, each of which begins on a boundary, indexed along ``dim``?"""
    rest = [(size, stride) for at, (size, stride) in enumerate(zip(layout.size, layout.stride)) if at != dim]
    starts = [stride for size, stride in rest if size > 1 and stride != 1]
    along = any(stride == 1 and size % KNOWN == 0 for size, stride in rest)
    return along and not any(stride % KNOWN for stride in (*starts, layout.stride[dim], layout.offset))
