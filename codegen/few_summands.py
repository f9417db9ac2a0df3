"""Sums of two to four parts that are left in another order than they lie in: elementwise, over squares of memory. Imports
`ir_nodes` and codegen's lowering modules.

A convolution of groups leaves channels as planes, two of which are added up for one with a window of a pixel, which wants them
side by side. A reduction walks along the one or the other, and stores or loads an element in each sector.
"""

from __future__ import annotations

from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import compute_dtype
from codegen.pulled import Known, sum_through
from codegen.reductions import dims_of, kept_layout, operand_of
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

MOST = 4
"""Of more summands, each would be loaded far from the next."""


def lower_few(node: Node, known: Known) -> list[Part]:
    """The part of a sum over one short dimension; none where it had better be reduced."""
    args = arguments(node)
    source = operand_of(args["self"])
    layout, write, dims = source.layout, node.writes[0], dims_of(source.layout.size, args.get("dim"))
    allowed = settings.enabled("tiling") and settings.enabled("windows")
    if len(dims) != 1 or len(layout.size) < 2 or not allowed or not layout.dtype.is_floating_point:
        return []
    (dim,) = dims
    kept = kept_layout(write.layout, dims) if len(write.layout.size) == len(layout.size) else write.layout
    one = kept_layout(layout, dims)
    if not 2 <= layout.size[dim] <= MOST or layout.stride[dim] == 1 or kept.size != one.size or not _turns(node, one, kept):
        return []
    lowering = Lowering(node, one.size)
    parts = (layout.selected(dim, number) for number in range(layout.size[dim]))
    total = sum_through(lowering, known, (Operand(source.value, part) for part in parts), compute_dtype(write.layout.dtype))
    if _stores_for_it(lowering.part.instrs, source, known):
        return []
    lowering.store(write.value, kept, total)
    return [lowering.part]


def _turns(node: Node, source: Layout, result: Layout) -> bool:
    """Does the result, or what an op after it makes of that, lie in another order than the ``source``?"""
    made = [write.layout for user in node.writes[0].value.users for write in user.writes if write.layout.size == result.size]
    along = _fastest(source)
    return along is not None and any(_fastest(layout) not in (None, along) for layout in (result, *made))


def _fastest(layout: Layout) -> int | None:
    """The dimension along which neighbours lie next to one another."""
    return next((dim for dim, (size, stride) in enumerate(zip(layout.size, layout.stride)) if size > 1 and stride == 1), None)


def _stores_for_it(instrs: list[Instr], source: Operand, known: Known) -> bool:
    """Would a kernel store what only the sum reads, which makes it as it reduces?"""
    loaded = any(instr.access is not None and instr.access.value is source.value for instr in instrs)
    return loaded and source.value in known.parts and len(source.value.users) == 1 and not source.value.buffer.live
