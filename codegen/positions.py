"""Lowers ops whose elements depend on where they stand: triangles, ranges, rolls. Imports torch and codegen modules."""

from __future__ import annotations

from dataclasses import replace

import torch

from codegen import bounds
from codegen.expressions import Unsupported, function
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import TRITON_TYPES
from codegen.reductions import operand_of
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand


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


def lower_linspace(node: Node) -> list[Part]:
    """linspace of floats, counted from the nearer end as ATen does."""
    args, out = arguments(node), node.writes[0].layout
    dtype = out.dtype
    if dtype not in (torch.float32, torch.float64) or any(isinstance(args[name], Operand) for name in ("start", "end")):
        raise Unsupported("numbers between ends that are tensors, integers or 16-bit floats, which ATen rounds in its own way")
    lowering, count = Lowering(node, out.size), out.numel
    start, end = (lowering.read(args[name], dtype) for name in ("start", "end"))
    place = lowering.expr(f"{{0}}.to({TRITON_TYPES[dtype]})", lowering.coord(0), dtype=dtype)
    gaps, half = lowering.size(max(count - 1, 1), dtype), lowering.size(count // 2, dtype)
    step = lowering.expr(f"{function('div', dtype, False)}({{1}} - {{0}}, {{2}})", start, end, gaps, dtype=dtype)
    near = lowering.expr("{0} + {1} * {2}", start, step, place, dtype=dtype)
    far = lowering.expr("{0} - {1} * ({2} - {3})", end, step, gaps, place, dtype=dtype)
    lowering.write(0, near if count == 1 else lowering.expr("tl.where({0} < {1}, {2}, {3})", place, half, near, far, dtype=dtype))
    return [lowering.part]


def lower_roll(node: Node) -> list[Part]:
    """roll along dimensions."""
    args = arguments(node)
    source = operand_of(args["self"])
    size = source.layout.size
    dims = args["dims"] or (0,)
    if not args["dims"] and len(size) != 1:
        raise Unsupported("all dimensions are rolled as if they were one")
    by = dict.fromkeys((dim % len(size) for dim in dims), 0)
    for dim, shift in zip(dims, args["shifts"]):
        by[dim % len(size)] += shift
    by = {dim: shift % size[dim] for dim, shift in by.items() if shift % max(size[dim], 1)}
    lowering = Lowering(node, size)
    places = {dim: _places_before(lowering, dim, shift) for dim, shift in by.items()}
    lowering.write(0, lowering.take_at(source, places) if by else lowering.load(source))
    return [lowering.part]


def _places_before(lowering: Lowering, dim: int, shift: int) -> Instr:
    """The element ``shift`` places before each along ``dim``, where the last one stands before the first."""
    first, rest = (lowering.size(number, torch.int32) for number in (shift, lowering.shape[dim] - shift))
    return lowering.expr("tl.where({0} < {1}, {0} + {2}, {0} - {1})", lowering.coord(dim), first, rest, dtype=torch.int32)


def lower_pixel_shuffle(node: Node) -> list[Part]:
    """pixel_shuffle: channels become the pixels of a larger image."""
    args, out = arguments(node), node.writes[0].layout
    source, by = operand_of(args["self"]), args["upscale_factor"]
    lowering = Lowering(node, _cut(out, by).size)
    lowering.store(node.writes[0].value, _cut(out, by), lowering.load(Operand(source.value, _channels(source.layout, by))))
    return [lowering.part]


def lower_pixel_unshuffle(node: Node) -> list[Part]:
    """pixel_unshuffle: `lower_pixel_shuffle` the other way."""
    args, write = arguments(node), node.writes[0]
    source, by = operand_of(args["self"]), args["downscale_factor"]
    lowering = Lowering(node, _cut(source.layout, by).size)
    lowering.store(write.value, _channels(write.layout, by), lowering.load(Operand(source.value, _cut(source.layout, by))))
    return [lowering.part]


def lower_channel_shuffle(node: Node) -> list[Part]:
    """channel_shuffle: the first channels of all groups, then the second ones."""
    args, write = arguments(node), node.writes[0]
    source, groups = operand_of(args["self"]), args["groups"]
    shuffled = write.layout.in_runs(1, groups)
    lowering = Lowering(node, shuffled.size)
    grouped = source.layout.in_runs(1, source.layout.size[1] // groups)
    order = (0, 2, 1, *range(3, len(grouped.size)))
    size, stride = (tuple(of[dim] for dim in order) for of in (grouped.size, grouped.stride))
    lowering.store(write.value, shuffled, lowering.load(Operand(source.value, replace(grouped, size=size, stride=stride))))
    return [lowering.part]


def lower_cross(node: Node) -> list[Part]:
    """linalg_cross: each component of a cross product is made of the two others."""
    args = arguments(node)
    one, other, write = operand_of(args["self"]), operand_of(args["other"]), node.writes[0]
    if write.layout.dtype not in (torch.float32, torch.float64):
        raise Unsupported("cross products of integers or 16-bit floats, which ATen rounds in its own way")
    lowering = Lowering(node, write.layout.size)
    dim = args["dim"] % len(lowering.shape)
    places = [bounds.rest(lowering, bounds.add(lowering, lowering.coord(dim), step), 3) for step in (1, 2)]
    (a, b), (c, d) = ([lowering.take_at(operand, {dim: place}) for place in places] for operand in (one, other))
    lowering.write(0, lowering.expr("{0} * {3} - {1} * {2}", a, b, c, d, dtype=a.dtype))
    return [lowering.part]


def _cut(layout: Layout, by: int) -> Layout:
    """Each of the last two dimensions in two, the inner one of ``by`` elements."""
    rank = len(layout.size)
    return layout.in_runs(rank - 1, by).in_runs(rank - 2, by)


def _channels(layout: Layout, by: int) -> Layout:
    """(..., channels, height, width) as (..., channels / by / by, height, by, width, by)."""
    *outer, (channels, step), (height, down), (width, along) = zip(layout.size, layout.stride)
    pairs = [*outer, (channels // by // by, step * by * by), (height, down), (by, step * by), (width, along), (by, step)]
    size, stride = zip(*pairs)
    return replace(layout, size=size, stride=stride)
