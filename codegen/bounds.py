"""What is known of an index from how it is computed: between which numbers it lies, what it adds at the end. Imports torch and
codegen's leaf modules.

Windows' places are an element's own plus a few numbers. What can't lie outside is not asked about, and a number behind an address
costs no instruction: of 9 addresses and 36 comparisons for each average of 3 x 3, 3 and 4 are left.
"""

from __future__ import annotations

import operator
import re
from typing import Callable

import torch

from codegen.body import Step
from codegen.forms import reach
from codegen.instructions import Instr
from codegen.lowering import Lowering
from codegen.source_args import SMALL

_STEP = re.compile(r"\{0\} (\+|-|\*|//|%) (\d+)")
_CLAMPED = re.compile(r"tl\.minimum\(tl\.maximum\(.*, 0\), \{(\d+)\}\)")
_CAST = re.compile(r"\{0\}\.to\(tl\.int\d+\)")
_DO: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}
"""None of them reverses an order, as their numbers are not negative."""


def add(lowering: Lowering, index: Instr, number: int) -> Instr:
    """``index`` plus a number, which is one of the source where it is small."""
    sign = "-" if number < 0 else "+"
    return _with(lowering, index, sign, abs(number)) if number else index


def times(lowering: Lowering, index: Instr, number: int) -> Instr:
    return _with(lowering, index, "*", number) if number != 1 else index


def over(lowering: Lowering, index: Instr, number: int) -> Instr:
    """``index`` // ``number``."""
    return _with(lowering, index, "//", number) if number != 1 else index


def rest(lowering: Lowering, index: Instr, number: int) -> Instr:
    """``index`` % ``number``; the index is not negative."""
    return _with(lowering, index, "%", number)


def _with(lowering: Lowering, index: Instr, sign: str, number: int) -> Instr:
    if number <= SMALL:
        return lowering.expr(f"{{0}} {sign} {number}", index, dtype=index.dtype)
    return lowering.expr(f"{{0}} {sign} {{1}}", index, lowering.size(number, index.dtype), dtype=index.dtype)


def clamped(lowering: Lowering, text: str, *args: Instr, extent: int) -> Instr:
    """The index that ``text`` makes of ``args``, or the nearest one from 0 to below ``extent``."""
    last = lowering.size(extent - 1, torch.int32)
    return lowering.expr(f"tl.minimum(tl.maximum({text}, 0), {{{len(args)}}})", *args, last, dtype=torch.int32)


def parted(index: Step) -> tuple[Step, int]:
    """The ``index`` without the number that it adds last, and that number."""
    found = _STEP.fullmatch(index.text) if index.stage == "expr" else None
    if found is None or found[1] not in "+-":
        return index, 0
    return index.args[0], _DO[found[1]](0, int(found[2]))


def span(index: Step) -> tuple[int, int] | None:
    """The least and the largest that ``index`` can be; None where that is not known."""
    if index.stage == "coord":
        return 0, reach(index.form) - 1
    found = _STEP.fullmatch(index.text) if index.stage == "expr" else None
    known = span(index.args[0]) if found is not None else None
    if found is None or known is None:
        return None
    if found[1] == "%":
        return 0, int(found[2]) - 1
    low, high = (_DO[found[1]](end, int(found[2])) for end in known)
    return low, high


def growth(index: Step) -> int:
    """By how much ``index`` grows from one of the elements that it is computed from to the next."""
    found = _STEP.fullmatch(index.text) if index.stage == "expr" else None
    if found is None:
        return 1
    return growth(index.args[0]) * (int(found[2]) if found[1] == "*" else 1)


def checks(index: Step, name: str, extent: int, bound: str) -> list[str]:
    """What tells whether ``index``, written as ``name``, lies from 0 to below ``extent``, written as ``bound``, as far as that is
    not known."""
    if _limit(index) == extent - 1:
        return []
    low, high = span(index) or (-1, extent)
    return [f"({name} >= 0)"] * (low < 0) + [f"({name} < {bound})"] * (high >= extent)


def _limit(index: Step) -> int | None:
    """The largest that ``index`` can be, if `clamped` has seen to that, or text like its own."""
    found = _CLAMPED.fullmatch(index.text) if index.stage == "expr" else None
    last = index.args[int(found[1])] if found is not None else None
    while last is not None and last.stage == "expr" and _CAST.fullmatch(last.text):
        last = last.args[0]
    return last.payload if last is not None and last.stage == "size" and isinstance(last.payload, int) else None
