"""Lets an op that writes in place into a part of what another has just made write the whole, so that both are one kernel and
whoever reads the result finds it in registers. Imports `ir_nodes` and codegen's lowering modules.

Eager mode writes a fill, or a copy of a gradient, and then writes a part of it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen import forms
from codegen.expressions import Unsupported
from codegen.index_maps import Window
from codegen.instructions import Instr, Part
from codegen.joining import MOST_SOURCES, choose, shares_loads, within
from codegen.limits import check_part
from codegen.lowering import Lowering, fill_of
from codegen.pulled import Known, Mapper, Puller, identity_mapper, window_mapper
from codegen.reordering import stores
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand, Value

MOST_BETWEEN = 8
"""How many nodes are looked at that may lie between a value and a write into a part of it."""


def over_whole(part: Part, known: Known) -> Part:
    """``part``, or where it writes a run of each row, or every so many elements or rows, of what was only filled with a number,
    or of what another elementwise op has just made, one that writes the whole. A fill then has no reader, and a maker shares a
    kernel with the write."""
    node, grid = part.node, _grid_of(part)
    if grid is None or not _are_alone(grid.whole.value, node):
        return part
    filled, maker = fill_of(grid.whole) is not None, grid.whole.value.producer
    if maker is None or not filled and (maker.stage != node.stage or not _made_whole(known, grid.whole)):
        return part
    lowering = Lowering(node, grid.whole.layout.size)
    try:
        other = lowering.load(grid.whole)
        mapper, valid, guard = _through(grid, part.numel, lowering)
        held = {grid.whole.value: (lowering.access(grid.whole.value, grid.whole.layout), other)}
        value = Puller(lowering, known, guard, held).part(part, mapper, 0, True)
        lowering.store(node.writes[0].value, grid.whole.layout, choose(lowering, valid, value, other))
        check_part(lowering.part)
    except Unsupported:
        return part
    return lowering.part if filled or not _waits(lowering.part, maker) else part


@dataclass(frozen=True, slots=True)
class Grid:
    """Where an elementwise part writes: in each dimension of the ``whole``, outermost first, so many elements (``extents``) from
    ``starts`` on."""

    extents: tuple[int, ...]
    starts: tuple[int, ...]
    whole: Operand


def _through(grid: Grid, numel: int, lowering: Lowering) -> tuple[Mapper, Instr, Instr | None]:
    """How operands over the ``numel`` elements that are written are seen from the whole, where these lie in it, and where alone
    they may be read (None: anywhere)."""
    mapper, valid, guard, inner = identity_mapper, None, None, 1
    for dim in reversed(range(len(grid.extents))):
        extent, whole, start = grid.extents[dim], grid.whole.layout.size[dim], grid.starts[dim]
        if extent != whole:
            mapper = window_mapper(Window(inner, extent, whole, start), numel, mapper)
            numel = numel // extent * whole
            here = within(lowering, start, extent, whole, lowering.coord(dim))
            valid = lowering.both(valid, here)
            guard = guard if shares_loads(extent, whole) else lowering.both(guard, here)
        inner *= whole
    assert valid is not None, "a part that writes everything"
    return mapper, valid, guard


def _waits(part: Part, maker: Node) -> bool:
    """Does it read what was computed after its ``maker``, out of what kernels make? That may be the maker's kernel, which would
    have to end before."""
    read = [access.value.producer for mode, access in part.accesses() if mode == "r"]
    late = [node for node in read if node is not None and node.index > maker.index]
    return any(value.producer is not None for node in late for value in node.inputs())


def _grid_of(part: Part) -> Grid | None:
    """The elements of what was there before that an elementwise part writes; None where it writes all of them, or where these lie
    in no grid."""
    base, store = part.node.writes[0].base, stores(part).get(part.node.writes[0].value)
    if len(part.node.writes) != 1 or part.reduced is not None or store is None or base is None:
        return None
    if store.byte_offset % store.dtype.itemsize:
        return None
    rest, unit = store.byte_offset // store.dtype.itemsize, base.buffer.nbytes // store.dtype.itemsize
    sizes, extents, starts = list[int](), list[int](), list[int]()
    for extent, stride in (*store.form, *([(1, 1)] if not store.form or store.form[-1][1] != 1 else [])):
        if stride < 1 or unit % stride:
            return None
        sizes.append(unit // stride)
        extents.append(extent)
        starts.append(rest // stride)
        if starts[-1] + extent > sizes[-1]:
            return None
        rest, unit = rest % stride, stride
    if sizes == extents:
        return None
    return Grid(tuple(extents), tuple(starts), Operand(base, Layout.contiguous(store.dtype, tuple(sizes))))


def _are_alone(base: Value, writer: Node) -> bool:
    """Do others read ``base`` at most for its ``writer``, as in gradients of writes in place?"""
    found: dict[Node, None] = {}
    waiting = [node for node in base.users if node is not writer]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = None
        if len(found) > MOST_BETWEEN or any(write.base is not None or write.value.buffer.live for write in node.all_writes()):
            return False
        waiting += [user for write in node.all_writes() for user in write.value.users if user is not writer]
    return True


def _made_whole(known: Known, whole: Operand) -> bool:
    """Has an elementwise op made all of the value, element by element as it lies in memory? So has one that wrote a part of it
    and does as `over_whole` says; after a few such, elements would have too many parts to ask for."""
    value, lies = whole.value, (forms.collapse(whole.layout.size, whole.layout.stride), whole.layout.dtype)
    for _ in range(MOST_SOURCES):
        part, maker = known.parts.get(value), value.producer
        store = stores(part).get(value) if part is not None else None
        if part is None or maker is None or store is None or (store.form, store.dtype) != lies:
            return False
        write = maker.writes[0]
        if write.base is None or part.numel == write.layout.numel:
            return True
        value = write.base
    return False
