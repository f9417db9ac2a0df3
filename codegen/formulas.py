"""Lets parts compute what takes no memory: numbers that are the same everywhere, or follow from where an element stands.

A gradient's seed over the number of elements, a range of positions, a mask of ones: whoever reads them computes them, so that
they cost neither a kernel nor memory. Imports torch, `ir_nodes` and codegen's leaves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Callable, Sequence

import torch

from codegen.expressions import Unsupported
from codegen.forms import Form
from codegen.index_maps import in_memory_order, through
from codegen.instructions import FULL, UNIFORM, Instr, MemAccess, Part, place, rewritten
from codegen.limits import check_part
from ir_nodes.node import Node, Value

LONGEST = 12
"""Instructions of a formula for each element: more are computed once and read."""
_KINDS = frozenset(("expr", "scalar", "size", "coord", "store"))
_CALL = re.compile(r"[\w.]+(?=\()")
_CHEAP = frozenset(("to", "tl.where", "tl.abs"))
"""What is called for each element; what is the same everywhere may call anything, as it is computed once per program."""
_DIVISION = re.compile(r" (?:%|//) ")
"""Of integers by a number that is known when the kernel runs: some hundred instructions for 64 bits. On an H200, sums of
511 rows of 32,835 elements times their places' remainders take 196 us so."""


@dataclass(frozen=True, slots=True)
class Formula:
    """``steps`` end in the element, held as a load of ``dtype`` would hold it. Their coords run over the buffer's elements."""

    steps: tuple[Instr, ...]
    dtype: torch.dtype


Formulas = dict[Value, Formula]


def remember(node: Node, parts: list[Part], formulas: Formulas) -> None:
    """Note how to compute what ``node`` writes, where no memory is needed for it and few instructions are."""
    if len(parts) != 1 or len(node.writes) != 1 or node.effects or sum(one.level == FULL for one in parts[0].instrs) > LONGEST:
        return
    *steps, store = parts[0].instrs
    if parts[0].facts.kinds <= _KINDS and store.kind == "store" and _whole(store, node) and all(map(_is_cheap, steps)):
        assert store.access is not None
        order, numel = store.access.form, parts[0].numel

        def laid(form: Form) -> tuple[Form, int] | None:
            dense = in_memory_order(form, order, numel)
            return None if dense is None else (dense, 0)

        found = _replaced(steps[: steps.index(store.args[0]) + 1], laid)
        if found is not None:
            formulas[node.writes[0].value] = Formula((*found,), node.writes[0].layout.dtype)


def _whole(store: Instr, node: Node) -> bool:
    access = store.access
    whole = access is not None and access.covers and access.value is node.writes[0].value and access.level == FULL
    return whole and node.writes[0].layout.numel < 2**31  # an element's number is held in 32 bits


def _is_cheap(step: Instr) -> bool:
    called = (name.lstrip(".") for name in _CALL.findall(step.text))
    light = all(name in _CHEAP for name in called) and not _DIVISION.search(step.text)
    return step.kind != "store" and (step.level == UNIFORM or light)


def compute(part: Part, formulas: Formulas) -> Part:
    """The part with reads of values that ``formulas`` knows replaced; the same part where there are none.

    Not indices that depend on a number: kernels are timed with any number, and stop at an index that is out of range.
    """
    if not any(access.value in formulas for _, access in part.accesses()):
        return part
    checks = "check" in part.facts.kinds

    def computed_again(instr: Instr) -> list[Instr] | None:
        formula = formulas.get(instr.access.value) if instr.kind == "load" and instr.access is not None else None
        if instr.access is None or formula is None or checks and any(step.kind == "scalar" for step in formula.steps):
            return None
        return _seen_through(instr.access, formula)

    computed = rewritten(part, computed_again)
    try:
        check_part(computed)
    except Unsupported:
        return part
    return computed


def _seen_through(access: MemAccess, formula: Formula) -> list[Instr] | None:
    """The formula's steps for the elements that ``access`` walks; None where its dimensions do not fit. What lies outside of a
    window is computed, too, and not looked at."""
    if access.level != FULL or access.dtype is not formula.dtype or access.scattered:
        return None
    first = access.byte_offset // access.dtype.itemsize

    def seen(form: Form) -> tuple[Form, int] | None:
        if len(form) == 1 and form[0][1] == 1 or not form:  # an element's number in memory, or the first
            return (access.form, first) if form else ((), 0)
        return through(form, access.form, first) if not access.shift else None

    return _replaced(formula.steps, seen)


def _replaced(steps: Sequence[Instr], seen: Callable[[Form], tuple[Form, int] | None]) -> list[Instr] | None:
    """``steps`` with coords of other forms, to which a number is added; None where there is no such form."""
    out: list[Instr] = []
    made: dict[Instr, Instr] = {}
    for step in steps:
        if step.kind == "coord":
            found = seen(step.payload)  # type: ignore[arg-type]
            if found is None:
                return None
            out += place(*found)
        else:
            out.append(replace(step, args=tuple([made[arg] for arg in step.args])))
        made[step] = out[-1]
    return out
