"""Lets an elementwise part walk its elements in the order in which the part before it walks them, so that both fit into one
kernel although one reads transposed what the other wrote. Imports `ir_nodes` and codegen's leaf modules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Mapping

from codegen.expressions import Unsupported
from codegen.forms import Form
from codegen.index_maps import in_memory_order, through
from codegen.instructions import FULL, Instr, MemAccess, Part
from codegen.limits import check_part
from ir_nodes.node import Value


def follow(part: Part, makers: Mapping[Value, MemAccess]) -> Part:
    """``part``, in another order where it reads only in other orders than the values it reads were stored in.

    ``makers``: how values were stored, by parts over as many elements.
    """
    if part.reduced is not None or part.draws:
        return part
    loads = [i.access for i in part.instrs if i.kind == "load" and not i.args and i.access is not None]
    made = [(load, makers[load.value]) for load in loads if load.value in makers]
    if any(load.form == store.form for load, store in made):
        return part
    for load, store in made:
        count = math.prod(size for size, _ in store.form)
        if load.dtype is store.dtype and (load.low, load.high, part.numel) == (store.low, store.high, count):
            moved = _reordered(part, load.form, store.form)
            if moved is not None:
                return moved
    return part


def stores(part: Part) -> dict[Value, MemAccess]:
    """How the part stores each value, for what follows it."""
    return {i.access.value: i.access for i in part.instrs if i.kind == "store" and i.access is not None and i.level == FULL}


def _reordered(part: Part, seen: Form, wanted: Form) -> Part | None:
    """The part over its elements in the order that turns ``seen`` into ``wanted``; None where dimensions do not fit."""

    def turn(form: Form) -> Form | None:
        dense = in_memory_order(form, seen, part.numel)
        turned = through(dense, wanted, 0) if dense is not None else None
        return turned[0] if turned is not None and turned[1] == 0 else None

    if turn(seen) != wanted:
        return None
    made: dict[int, Instr] = {}
    out = replace(part, instrs=[])
    for instr in part.instrs:
        new = replace(instr, args=tuple(made[id(arg)] for arg in instr.args))
        if instr.access is not None or instr.kind == "coord":
            form = turn(instr.access.form if instr.access is not None else instr.payload)  # type: ignore[arg-type]
            if form is None:
                return None
            if instr.access is not None:
                new.access = replace(instr.access, form=form)
            else:
                new.payload = form
        made[id(instr)] = new
        out.instrs.append(new)
    try:
        check_part(out)
    except Unsupported:
        return None
    return out
