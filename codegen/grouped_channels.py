"""Norms over groups of channels that lie side by side for each pixel. Imports `ir_nodes` and codegen's leaf modules.

A group's row lies in pieces of a few channels then, each with others between, of which a program would fetch whole sectors. Sums
for each channel read rows of all channels; a group's numbers follow from its channels'. What is done to each element takes
numbers of its channel, of which neighbours' lie side by side, too, as ATen's CUDA kernels have it: a * x + b.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Iterator, Sequence

import torch

from codegen import forms, moments
from codegen.behind_norms import Behind
from codegen.expressions import Unsupported
from codegen.instructions import FULL, KEPT, Instr, Part, scratch_value
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF, compute_dtype
from codegen.pulled import Known, Puller, identity_mapper
from codegen.reductions import by_columns, operand_of, reduction, spread_of
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

WITHIN = (2, 3)
"""A group's dimensions among (samples, groups, channels of a group, places)."""
MANY = 1 << 21
"""Elements from which on several kernels take less time than one whose operands lie in pieces. On an H200, 15 norms of ResNet-50
behind sums took 8.8 ms in pieces, whose bytes take 1.6."""


def beside(layout: Layout) -> bool:
    """Do channels of several groups, seen as `grouped` sees them, lie side by side, in many pixels?"""
    several = layout.size[1] > 1 and math.prod(layout.size) >= MANY
    return several and by_columns(layout, (3,)) and settings.enabled("long_norms")


def by_channels(node: Node, source: Operand, scratch: int, known: Known) -> Iterator[Part]:
    """The norm: each channel's mean and its elements' squared differences from that; a group's, to which the former add what
    channels' means differ by (Chan, Golub, LeVeque, see `codegen.moments`); the numbers of each channel; the elements."""
    args = arguments(node)
    lowering, dims = reduction(node, source, (3,))
    lowering.part.apart = True
    means, within = (moments.keep(lowering, scratch + index, number)
                     for index, number in enumerate(moments.moments(lowering, source, dims, partial(_made_of, lowering, known))))
    yield lowering.part
    lowering, dims = reduction(node, means, (2,))
    mean, _, between = spread_of(lowering, lowering.load(means))
    total = lowering.reduce("add", lowering.load(within))
    places, channels = (lowering.size(source.layout.size[dim], mean.dtype) for dim in (3, 2))
    variance = lowering.expr("({0} + {1} * {2}) / ({2} * {3})", total, between, places, channels, dtype=mean.dtype)
    scale = lowering.expr("tl.rsqrt({0} + {1})", variance, lowering.read(args["eps"], mean.dtype), dtype=mean.dtype)
    numbers = moments.written(lowering, scratch + 4, (1, 2), (mean, scale), dims)
    yield lowering.part
    lowering = Lowering(node, means.layout.size)
    line = factors(lowering, args, *(lowering.load(moments.spread(number, (2,), 3)) for number in numbers))
    tables = [_table(lowering, scratch + 2 + index, number) for index, number in enumerate(line)]
    yield lowering.part
    lowering = Lowering(node, source.layout.size)
    value, factor, more = (lowering.load(one) for one in (source, *tables))
    write_grouped(lowering, 0, along(lowering, value, factor, more), args["group"])
    yield lowering.part


def factors(lowering: Lowering, args: dict[str, Any], mean: Instr, scale: Instr, level: int = FULL) -> tuple[Instr, Instr]:
    """What the norm multiplies a channel's elements by and adds to them."""
    factor = scale
    if args.get("weight") is not None:
        factor = lowering.expr("{0} * {1}", factor, per_channel(lowering, args["weight"], mean.dtype, level), dtype=mean.dtype)
    more = lowering.expr("0.0 - {0} * {1}", mean, factor, dtype=mean.dtype)
    if args.get("bias") is not None:
        more = lowering.expr("{0} + {1}", more, per_channel(lowering, args["bias"], mean.dtype, level), dtype=mean.dtype)
    return factor, more


def along(lowering: Lowering, value: Instr, factor: Instr, more: Instr) -> Instr:
    return lowering.expr("{0} * {1} + {2}", value, factor, more, dtype=value.dtype)


def _made_of(lowering: Lowering, known: Known, sample: Operand) -> Instr:
    """A number of each result, or what makes it, where that is cheap: then the kernel that makes what is summed may sum it."""
    instrs, dtype = lowering.part.instrs, sample.layout.dtype
    before, access = len(instrs), lowering.access(sample.value, sample.layout, KEPT)
    rounded = dtype if dtype in HALF else None
    made = Puller(lowering, known, None).operand(access, compute_dtype(dtype), rounded, identity_mapper, alone=False)
    if not all(map(_is_plain, instrs[before:])) or not _nest(lowering.part, instrs):
        del instrs[before:]
        return lowering.load(sample, KEPT)
    for instr in instrs[before:]:
        instr.level = min(instr.level, KEPT)
        instr.access = replace(instr.access, level=KEPT) if instr.access is not None else None
    return made


def _is_plain(instr: Instr) -> bool:
    """Does it load no part or another by position, nor compute with that?"""
    return instr.kind in ("expr", "scalar", "size") or instr.kind == "load" and not instr.args


def _nest(part: Part, instrs: Sequence[Instr]) -> bool:
    """Do all operands, the first of which has every element and the others a number of each result, have dimensions that nest?"""
    cuts: tuple[int, ...] | None = forms.reduced_cuts(part.reduced or (), part.numel)
    for place, access in enumerate(instr.access for instr in instrs if instr.access is not None):
        form = forms.embed(access.form, part.reduced or (), part.numel) if place else access.form
        cuts = forms.merge_cuts(cuts, forms.cuts(form)) if cuts is not None and form is not None else None
    return cuts is not None


def gradient_by_channels(node: Node, place: int, source: Operand, given: Behind, shares: Sequence[Operand],
                         scratch: int) -> Iterator[Part]:
    """The gradient of each element, which the node's result at ``place`` is: a * gradient + b * x + c. ``shares``: for each group
    the means of the gradient times weight, and of that times the normalised input."""
    args = arguments(node)
    samples, groups, channels, _ = source.layout.size
    lowering = Lowering(node, (samples, groups, channels))
    plain, skewed = (lowering.load(_of_channels(share)) for share in shares)
    mean, scale = (lowering.load(moments.spread(operand_of(args[name]), (2,), 3)) for name in ("mean", "rstd"))
    mean, scale = (lowering.cast(one, plain.dtype) for one in (mean, scale))
    factor = scale
    if args.get("weight") is not None:
        factor = lowering.expr("{0} * {1}", scale, per_channel(lowering, args["weight"], plain.dtype), dtype=plain.dtype)
    slope = lowering.expr("0.0 - {0} * {1} * {1}", skewed, scale, dtype=plain.dtype)
    more = lowering.expr("0.0 - {0} * {1} - {2} * {3}", plain, scale, slope, mean, dtype=plain.dtype)
    line = factors(lowering, given.args, mean, scale) if given.out is not None else ()
    tables = [_table(lowering, scratch + index, number) for index, number in enumerate((factor, slope, more, *line))]
    yield lowering.part
    lowering = Lowering(node, source.layout.size)
    value, factor, slope, more = (lowering.load(one) for one in (source, *tables[:3]))
    grad = given.load(lowering, layout_of(given.grad.layout, groups),
                      lambda: along(lowering, value, *(lowering.load(one) for one in tables[3:])))
    text = "{0} * {1} + ({2} * {3} + {4})"
    write_grouped(lowering, place, lowering.expr(text, grad, factor, value, slope, more, dtype=value.dtype), groups)
    yield lowering.part


def _of_channels(number: Operand) -> Operand:
    """A number of each group over (samples, groups, channels of a group, places), without the places."""
    layout = number.layout
    return Operand(number.value, replace(layout, size=layout.size[:3], stride=layout.stride[:3]))


def _table(lowering: Lowering, scratch: int, number: Instr) -> Operand:
    """Hand a ``number`` of each channel of each sample to the part that works on all places."""
    layout = Layout.contiguous(number.dtype, lowering.shape)
    value = scratch_value(scratch, layout.nbytes, lowering.part.node)
    lowering.store(value, layout, number)
    return Operand(value, replace(layout, size=(*layout.size, 1), stride=(*layout.stride, 0)))


def write_grouped(lowering: Lowering, place: int, result: Instr, groups: int) -> None:
    write = lowering.part.node.writes[place]
    lowering.store(write.value, layout_of(write.layout, groups), result)


def grouped(arg: Any, groups: int) -> Operand:
    operand = operand_of(arg)
    return Operand(operand.value, layout_of(operand.layout, groups))


def layout_of(layout: Layout, groups: int) -> Layout:
    """A batch of channels seen as (samples, groups, channels of a group, places)."""
    samples, channels, *places = layout.size
    flat = forms.collapse(tuple(places), layout.stride[2:])
    if len(flat) > 1:
        raise Unsupported("places that do not merge")
    extent, step = flat[0] if flat else (1, 0)
    first, along = layout.stride[:2]
    size = (samples, groups, channels // groups, extent)
    return replace(layout, size=size, stride=(first, along * (channels // groups), along, step))


def per_channel(lowering: Lowering, arg: Any, dtype: torch.dtype, level: int = FULL) -> Instr:
    """A number of each channel over (samples, groups, channels of a group) and, where they are there, places."""
    operand = operand_of(arg)
    _, groups, channels, *places = lowering.shape if level == FULL else lowering.kept_shape
    step = operand.layout.stride[0]
    layout = replace(operand.layout, size=(1, groups, channels, *(1 for _ in places)),
                     stride=(0, step * channels, step, *(0 for _ in places)))
    return lowering.cast(lowering.load(Operand(operand.value, layout), level), compute_dtype(dtype))
