"""Lets parts compute what takes no memory: numbers that are the same everywhere, or follow from where an element stands.

A gradient's seed over the number of elements, a range of positions, a mask of ones: whoever reads them computes them, so that
they cost neither a kernel nor memory. Imports torch, `ir_nodes` and codegen's leaves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from codegen.instructions import FULL, UNIFORM, Instr, MemAccess, Part
from ir_nodes.node import Node, Value

LONGEST = 12
"""Instructions of a formula: more are computed once and read."""
_KINDS = frozenset(("expr", "scalar", "size", "coord", "store"))
_CALL = re.compile(r"[\w.]+(?=\()")
_CHEAP = frozenset(("to", "tl.where", "tl.abs"))
"""What is called for each element; what is the same everywhere may call anything, as it is computed once per program."""


@dataclass(frozen=True, slots=True)
class Formula:
    """``steps`` end in the element, held as a load of ``dtype`` would hold it. Their coords are its number in memory."""

    steps: tuple[Instr, ...]
    dtype: torch.dtype


Formulas = dict[Value, Formula]


def remember(node: Node, parts: list[Part], formulas: Formulas) -> None:
    """Note how to compute what ``node`` writes, where no memory is needed for it and few instructions are."""
    if len(parts) != 1 or len(node.writes) != 1 or node.effects or len(parts[0].instrs) > LONGEST + 1:
        return
    *steps, store = parts[0].instrs
    if parts[0].facts.kinds <= _KINDS and store.kind == "store" and _whole(store, node) and all(
            _is_cheap(step, store) for step in steps):
        formulas[node.writes[0].value] = Formula((*steps[: steps.index(store.args[0]) + 1],), node.writes[0].layout.dtype)


def _whole(store: Instr, node: Node) -> bool:
    access = store.access
    whole = access is not None and access.covers and access.value is node.writes[0].value and access.level == FULL
    return whole and node.writes[0].layout.numel < 2**31  # an element's number is held in 32 bits


def _is_cheap(step: Instr, store: Instr) -> bool:
    assert store.access is not None
    if step.kind == "store" or step.kind == "coord" and step.payload != store.access.form:
        return False
    called = (name.lstrip(".") for name in _CALL.findall(step.text))
    return step.level == UNIFORM or all(name.rpartition("}.")[2] in _CHEAP for name in called)


def compute(part: Part, formulas: Formulas) -> Part:
    """The part with reads of values that ``formulas`` knows replaced; the same part where there are none."""
    if not any(access.value in formulas for _, access in part.accesses()):
        return part
    out: list[Instr] = []
    made: dict[Instr, Instr] = {}
    for instr in part.instrs:
        args = tuple([made[arg] for arg in instr.args])
        formula = formulas.get(instr.access.value) if instr.kind == "load" and instr.access is not None else None
        if formula is not None and instr.access is not None and _fits(instr, instr.access, formula):
            out += _steps(instr.access, formula)
        else:
            level = max(arg.level for arg in args) if instr.kind == "expr" and args else instr.level
            out.append(replace(instr, args=args, level=level))
        made[instr] = out[-1]
    return replace(part, instrs=out)


def _fits(instr: Instr, access: MemAccess, formula: Formula) -> bool:
    return not instr.args and access.level == FULL and access.dtype is formula.dtype and not access.shift and not access.scattered


def _steps(access: MemAccess, formula: Formula) -> list[Instr]:
    """The formula's steps for the elements that ``access`` walks."""
    out: list[Instr] = []
    made: dict[Instr, Instr] = {}
    first = access.byte_offset // access.dtype.itemsize
    for step in formula.steps:
        if step.kind == "coord":
            out.append(replace(step, payload=access.form))
            if first:
                start = Instr("size", torch.int64, UNIFORM, payload=first)
                start32 = Instr("expr", step.dtype, UNIFORM, (start,), "{0}.to(tl.int32)")
                out += [start, start32, Instr("expr", step.dtype, FULL, (out[-1], start32), "({0} + {1})")]
        else:
            out.append(replace(step, args=tuple([made[arg] for arg in step.args])))
        made[step] = out[-1]
    return out
