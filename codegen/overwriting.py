"""Lets an op that writes in place into a part of what another has just made write the whole, so that both are one kernel and
whoever reads the result finds it in registers. Imports `ir_nodes` and codegen's lowering modules.

Eager mode writes a fill, or a copy of a gradient, and then writes a part of it again.
"""

from __future__ import annotations

from codegen import forms
from codegen.expressions import Unsupported
from codegen.index_maps import Window
from codegen.instructions import MemAccess, Part
from codegen.joining import MOST_SOURCES, choose, within
from codegen.limits import check_part
from codegen.lowering import Lowering, fill_of
from codegen.pulled import Known, Puller, window_mapper
from codegen.reordering import stores
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand, Value

MOST_BETWEEN = 8
"""How many nodes are looked at that may lie between a value and a write into a part of it."""


def over_whole(part: Part, known: Known) -> Part:
    """``part``, or where it writes a run of each row of what was only filled with a number, or of what another elementwise op has
    just made, one that writes the whole. A fill then has no reader, and a maker shares a kernel with the write."""
    node, place = part.node, _place_of(part)
    if place is None or not _are_alone(place[1].value, node):
        return part
    window, whole = place
    filled, maker = fill_of(whole) is not None, whole.value.producer
    if maker is None or not filled and (maker.stage != node.stage or not _made_whole(known, whole)):
        return part
    lowering = Lowering(node, whole.layout.size)
    try:
        other = lowering.load(whole)
        valid = within(lowering, window.start, window.extent, window.whole, lowering.coord(1))
        held = {whole.value: (lowering.access(whole.value, whole.layout), other)}
        guard = valid if window.extent > 1 else None  # one of so many elements is what all of these read
        value = Puller(lowering, known, guard, held).part(part, window_mapper(window, part.numel), 0, True)
        lowering.store(node.writes[0].value, whole.layout, choose(lowering, valid, value, other))
        check_part(lowering.part)
    except Unsupported:
        return part
    return lowering.part if filled or not _waits(lowering.part, maker) else part


def _waits(part: Part, maker: Node) -> bool:
    """Does it read what was computed after its ``maker``, out of what kernels make? That may be the maker's kernel, which would
    have to end before."""
    read = [access.value.producer for mode, access in part.accesses() if mode == "r"]
    late = [node for node in read if node is not None and node.index > maker.index]
    return any(value.producer is not None for node in late for value in node.inputs())


def _place_of(part: Part) -> tuple[Window, Operand] | None:
    """The run of each row that an elementwise part writes, and the rows, which are all that was there before; None where it
    writes something else."""
    base, store = part.node.writes[0].base, stores(part).get(part.node.writes[0].value)
    if len(part.node.writes) != 1 or part.reduced is not None or store is None or base is None:
        return None
    numel = base.buffer.nbytes // store.dtype.itemsize
    window = _row_window(store, numel)
    if window is None:
        return None
    return window, Operand(base, Layout.contiguous(store.dtype, (numel // window.whole, window.whole)))


def _row_window(store: MemAccess, numel: int) -> Window | None:
    """The window of rows that together make the whole buffer; None where it is all of them."""
    run, rest = (store.form[-1][0], store.form[:-1]) if store.form and store.form[-1][1] == 1 else (1, store.form)
    if len(rest) > 1 or store.byte_offset % store.dtype.itemsize:
        return None
    outer, row = rest[0] if rest else (1, numel)
    start = store.byte_offset // store.dtype.itemsize
    return Window(1, run, row, start) if run < row and outer * row == numel and start + run <= row else None


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
