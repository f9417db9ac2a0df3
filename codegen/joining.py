"""Lowers concatenation, pads and gradients of slices to index arithmetic. Imports torch, `ir_nodes` and codegen's lowering
modules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Sequence

import torch

from codegen import forms
from codegen.expressions import Unsupported
from codegen.index_maps import Window
from codegen.instructions import FULL, Instr, Part
from codegen.limits import check_part
from codegen.lowering import Lowering, arguments, fill_of
from codegen.promotion import HALF, compute_dtype
from codegen.pulled import Known, Puller, identity_mapper, spread_mapper, window_mapper
from codegen.reductions import operand_of
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand
from ir_nodes.ops import info

Size = tuple[int, ...]

MOST_SOURCES = 4
"""More than so many tensors are copied into place one by one: every element of one kernel would ask which it belongs to."""

SHORT_RUN = 32
"""Bytes of a run in the result that are too few to be stored apart from what lies between them."""

_MAKERS = ("pointwise", "normalization", "softmax", "reduction")
_READERS = ("pointwise", "copy", "normalization", "softmax", "loss")

def lower_cat(node: Node, known: Known) -> list[Part]:
    """cat and stack: a choice by index where there are a few sources, else a store into its part of the result for each."""
    args = arguments(node)
    write = node.writes[0]
    rank = len(write.layout.size)
    sources = [operand_of(item) for item in args["tensors"]]
    if node.name == "stack":
        sources = [Operand(source.value, source.layout.unsqueezed(args["dim"] % rank)) for source in sources]
    sources = [source for source in sources if len(source.layout.size) == rank and source.layout.numel]
    dim = args["dim"] % rank if rank else 0
    if sum(source.layout.size[dim] for source in sources) != write.layout.size[dim]:
        raise Unsupported("a concatenation of another shape than its result")
    if len(sources) <= MOST_SOURCES and not _stored_by_makers(node, sources, dim):
        try:
            return [_best(node, sources, dim, known)]
        except Unsupported:
            pass
    return _copied(node, sources, dim)


def _stored_by_makers(node: Node, sources: Sequence[Operand], dim: int) -> bool:
    """Had each source better be stored into its place by what makes it? They are of one shape and made here, as gradients of
    chunks are, so that one kernel makes all of them, and nobody reads the result element by element, in whose kernel it would
    be."""
    write = node.writes[0]
    run = math.prod(sources[0].layout.size[dim:]) * write.layout.itemsize if sources else 0
    return (settings.enabled("stored_by_makers") and run >= SHORT_RUN and len({source.layout.size for source in sources}) == 1
            and all(map(_is_made, sources)) and not any(info(user.target).kind in _READERS for user in write.value.users))


def _is_made(source: Operand) -> bool:
    """Is all that a kernel makes joined, and not a part of it, whose elements another kernel would copy?"""
    maker, whole = source.value.producer, source.layout.covers(source.value.buffer.nbytes)
    return whole and maker is not None and info(maker.target).kind in _MAKERS


def _copied(node: Node, sources: Sequence[Operand], dim: int) -> list[Part]:
    write, start, parts = node.writes[0], 0, []
    for source in sources:
        size = source.layout.size
        place = Layout(write.layout.dtype, size, write.layout.stride, write.layout.offset + start * write.layout.stride[dim])
        lowering = Lowering(node, size)
        lowering.store(write.value, place, lowering.load(source))
        parts.append(lowering.part)
        start += size[dim]
    return parts


def _best(node: Node, sources: Sequence[Operand], dim: int, known: Known) -> Part:
    """The choice by the index along ``dim``, or, among sources of one size, by which of them it lies in, where each element then
    reads less although it reads what all of them are made of, as halves that are turned with one another."""
    part = _chosen(node, node.writes[0].layout, sources, dim, known)
    check_part(part)
    extent, count = sources[0].layout.size[dim], len(sources)
    if count < 2 or extent < 2 or any(source.layout.size[dim] != extent for source in sources):
        return part
    alike = [Operand(source.value, source.layout.in_runs(dim, extent)) for source in sources]
    try:
        other = _chosen(node, node.writes[0].layout.in_runs(dim, extent), alike, dim, known)
        check_part(other)
    except Unsupported:
        return part
    return other if count * _loads(other) <= _loads(part) else part


def _loads(part: Part) -> int:
    return len({(access.value, access.form, access.byte_offset, access.shift, load.args) for load in part.instrs
                if load.kind == "load" and load.level == FULL and (access := load.access) is not None})  # fmt: skip


def _chosen(node: Node, out: Layout, sources: Sequence[Operand], dim: int, known: Known) -> Part:
    lowering = Lowering(node, out.size)
    start, values, bounds, coordinate = 0, [], [], lowering.coord(dim)
    for source in sources:
        extent = source.layout.size[dim]
        values.append(_placed(lowering, source, source.layout.size, {dim: start}, known))
        start += extent
        bounds.append(lowering.size(start, coordinate.dtype))
    result = values[-1]
    for value, bound in zip(reversed(values[:-1]), reversed(bounds[:-1])):
        result = choose(lowering, lowering.expr("({0} < {1})", coordinate, bound, dtype=torch.bool), value, result)
    lowering.store(node.writes[0].value, out, result)
    return lowering.part


def lower_padding(node: Node, known: Known) -> list[Part]:
    """constant_pad_nd, slice_backward and select_backward: the operand at its place among copies of one number."""
    args = arguments(node)
    out = node.writes[0].layout
    source = _cut(operand_of(args["self"]), args["pad"]) if "pad" in args else operand_of(args["grad_output"])
    if args.get("step", 1) != 1:
        return [_every_so_many(node, source, args, known)]
    size, starts = _place_of(node, args, source.layout.size, out.size)
    lowering = Lowering(node, out.size)
    value = _placed(lowering, source, size, starts, known)
    other = lowering.cast(lowering.read(args.get("value", 0), compute_dtype(out.dtype)), out.dtype)
    valid = _inside(lowering, size, starts)
    lowering.write(0, value if valid is None else choose(lowering, valid, value, other))
    return [lowering.part]


def _cut(source: Operand, pads: Sequence[int]) -> Operand:
    """``source`` without what negative pads, the last dimension's first, take off its ends, as gradients of pads do."""
    layout = source.layout
    for number, pad in enumerate(pads):
        dim, off = len(layout.size) - 1 - number // 2, min(pad, 0)
        size = (*layout.size[:dim], layout.size[dim] + off, *layout.size[dim + 1 :])
        layout = replace(layout, size=size, offset=layout.offset - (off * layout.stride[dim] if number % 2 == 0 else 0))
    return replace(source, layout=layout)


def _every_so_many(node: Node, source: Operand, args: dict[str, Any], known: Known) -> Part:
    """The elements of ``source`` at every so many places along a dimension from a first one on, zeros between them."""
    out, size, step = node.writes[0].layout, source.layout.size, args["step"]
    dim = args["dim"] % len(out.size)
    inner, whole, start = math.prod(out.size[dim + 1 :]), out.size[dim], _first(args["start"], out.size[dim])
    lowering = Lowering(node, out.size)
    zero = lowering.read(0, compute_dtype(out.dtype))
    if whole != size[dim] * step or start >= step:
        at = lowering.expr("({0} - {1})", lowering.coord(dim), lowering.size(start, torch.int32), dtype=torch.int32)
        by = lowering.size(step, torch.int32)
        here = lowering.expr("(({0} >= 0) & ({0} % {1} == 0))", at, by, dtype=torch.bool)
        place = lowering.expr("tl.where({0}, {1} // {2}, -1)", here, at, by, dtype=torch.int32)
        lowering.write(0, lowering.take_at(source, {dim: place}))
        return lowering.part
    turn = lowering.place(forms.collapse((out.numel // inner // step, step, inner), (0, 1, 0)))
    valid = lowering.expr("({0} == {1})", turn, lowering.size(start, torch.int32), dtype=torch.bool)
    plain = Lowering(node, size).access(source.value, source.layout)
    rounded = source.layout.dtype if source.layout.dtype in HALF else None
    value = Puller(lowering, known, None).operand(plain, zero.dtype, rounded, spread_mapper(inner, step, source.layout.numel))
    lowering.write(0, choose(lowering, valid, lowering.cast(value, out.dtype), lowering.cast(zero, out.dtype)))
    return lowering.part


def _place_of(node: Node, args: dict[str, Any], size: Size, whole: Size) -> tuple[Size, dict[int, int]]:
    """The operand's size in the result's rank, and where it begins in each dimension that it does not fill."""
    if node.name == "constant_pad_nd":
        pads = args["pad"]
        return size, {len(size) - 1 - number // 2: max(pads[number], 0) for number in range(0, len(pads), 2)}
    dim = args["dim"] % len(whole)
    if node.name == "select_backward":
        return (*size[:dim], 1, *size[dim:]), {dim: args["index"] % whole[dim]}
    return size, {dim: _first(args["start"], whole[dim])}


def _first(start: int | None, extent: int) -> int:
    """Where a slice of so many elements starts."""
    start = start or 0
    return max(start + extent, 0) if start < 0 else min(start, extent)


def _placed(lowering: Lowering, source: Operand, size: Size, starts: dict[int, int], known: Known) -> Instr:
    """The elements of ``source``, seen with ``size``, at their places in the full space, rounded to the result's dtype."""
    out = lowering.part.node.writes[0].layout.dtype
    filled, layout = fill_of(source), source.layout
    if filled is not None:
        return lowering.cast(lowering.cast(lowering.read(filled, compute_dtype(layout.dtype)), layout.dtype), out)
    if all(size[dim] == lowering.shape[dim] for dim in starts):
        return lowering.cast(lowering.load(source), out)
    mapper, wide = identity_mapper, list(size)
    for dim, start in starts.items():
        window = Window(math.prod(wide[dim + 1 :]), wide[dim], lowering.shape[dim], start)
        mapper = window_mapper(window, math.prod(wide), mapper)
        wide[dim] = lowering.shape[dim]
    plain = Lowering(lowering.part.node, layout.size).access(source.value, layout)
    rounded = layout.dtype if layout.dtype in HALF else None
    asked = {dim: start for dim, start in starts.items() if not shares_loads(size[dim], lowering.shape[dim])}
    guard = _inside(lowering, size, asked)
    return lowering.cast(Puller(lowering, known, guard).operand(plain, compute_dtype(layout.dtype), rounded, mapper), out)


def _inside(lowering: Lowering, size: Size, starts: dict[int, int]) -> Instr | None:
    """True where an operand of ``size`` that begins at ``starts`` lies; None where it fills the full space."""
    valid: Instr | None = None
    for dim, start in starts.items():
        if size[dim] != lowering.shape[dim]:
            here = within(lowering, start, size[dim], lowering.shape[dim], lowering.coord(dim))
            valid = lowering.both(valid, here)
    return valid


def shares_loads(extent: int, whole: int) -> bool:
    """Is one element of a few read, so that all of these may read it, and share the load with who asks for it in their place?"""
    return extent == 1 and whole <= MOST_SOURCES


def within(lowering: Lowering, start: int, extent: int, whole: int, coordinate: Instr) -> Instr:
    """True where the coordinate along a dimension of ``whole`` elements lies in the ``extent`` elements from ``start`` on."""
    first, end = (lowering.size(place, coordinate.dtype) for place in (start, start + extent))
    if start == 0:
        return lowering.expr("({0} < {1})", coordinate, end, dtype=torch.bool)
    if start + extent == whole:
        return lowering.expr("({0} >= {1})", coordinate, first, dtype=torch.bool)
    return lowering.expr("(({0} >= {1}) & ({0} < {2}))", coordinate, first, end, dtype=torch.bool)


def choose(lowering: Lowering, condition: Instr, left: Instr, right: Instr) -> Instr:
    """``left`` where the condition holds, else ``right``; both are representable in one dtype."""
    chosen = lowering.expr("tl.where({0}, {1}, {2})", condition, left, right, dtype=left.dtype)
    chosen.rounded = left.rounded if left.rounded is right.rounded else None
    return chosen
