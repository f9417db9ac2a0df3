"""Takes sums of everything row by row, where rows were reduced before. Imports torch and codegen's leaf modules.

`(p * p.log()).sum()` behind a softmax reduces rows, then all of them: two iteration spaces, so that the product would lie in
memory between two kernels. Taken apart, the sum of each row belongs to the softmax's kernel, and a small kernel adds these up. It
is what losses over classes do from the start (`codegen.cross_entropy`). So are sums of what there is one number of for each row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable, Sequence

import torch

from codegen.forms import Form
from codegen.group import Unit
from codegen.instructions import FULL, KEPT, UNIFORM, Instr, MemAccess, Part, scratch_value
from ir_nodes.node import Value

SHORT = 16
"""Elements of a row from which its sum is little beside what it saves."""
LONG = 64
"""The shortest rows with one number each that sums of everything follow, or each element's row would have to be divided for: sums
of squares of a matrix times a number for each of its rows and columns, 8,192 and 4,096, take 190 us on an H200 otherwise."""
HELD = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
APART = {"scan", "dot", "offset", "check", "put"}
"""What a part is left alone for: it needs its elements in order, or does more than to sum them."""


def by_rows(units: Sequence[Unit]) -> list[Unit]:
    """``units``, of which sums of what was made of rows are two: of each row, and of these."""
    lengths, found = _Lengths(), []
    free = 1 + max((-1 - value.buffer.index for unit in units for value in unit.makes if value.buffer.index < 0), default=-1)
    for unit in units:
        length = lengths.of(unit.part) if unit.part is not None else 0
        if unit.part is not None and length:
            lengths.remember(unit.part, length)
        if unit.part is not None and _divides(unit.part, length):
            found += _divided(unit, unit.part, length, free)
            free += 1
        else:
            found.append(unit)
    for position, unit in enumerate(found):
        unit.position = position
    return found


class _Lengths:
    """How long the rows are of which values were made that lie row behind row, and what there is one of for each row."""

    def __init__(self) -> None:
        self._whole: dict[Value, int] = {}
        self._of_rows: dict[Value, int] = {}

    def of(self, part: Part) -> int:
        """Elements of a row that is reduced by the part or by what it reads; 0: there are none."""
        if part.reduced and part.kept > 1:
            (low, high), *more = part.reduced
            return high if low == 1 and not more else 0
        reads = (access for mode, access in part.accesses() if mode == "r")
        return next(filter(None, (self._told(access, part.numel) for access in reads)), 0)

    def remember(self, part: Part, length: int) -> None:
        """What the part makes of rows of ``length``."""
        if part.reduced is None and part.numel in (1, length):
            return
        for mode, access in part.accesses():
            if mode == "w" and access.form == _whole(part.numel):
                self._whole[access.value] = length
            elif mode == "w" and access.form == _whole(part.numel // length):
                self._of_rows[access.value] = length

    def _told(self, access: MemAccess, numel: int) -> int:
        if access.form == _whole(numel):
            return self._whole.get(access.value, 0)
        length = access.form[-1][0] if access.form else 0
        one_each = length and access.form == ((numel // length, 1), (length, 0))
        return length if one_each and (length >= LONG or self._of_rows.get(access.value) == length) else 0


def _whole(numel: int) -> Form:
    return ((numel, 1),)


def _divides(part: Part, length: int) -> bool:
    """Does the part sum everything, and nothing else, and is a row long enough?"""
    if part.kept > 1 or part.reduced is None or length < SHORT or part.numel <= length or part.waits:
        return False
    sums = [instr for instr in part.instrs if instr.kind == "reduce"]
    if len(sums) != 1 or sums[0].dtype not in HELD or part.after or any(write.base is not None for write in part.node.writes):
        return False
    summed = _behind(part, sums[0])
    return APART.isdisjoint(part.facts.kinds) and all(instr in summed for instr in part.instrs if instr.level == FULL)


def _behind(part: Part, last: Instr) -> dict[Instr, None]:
    """``last`` and all that it is made of, in the part's order."""
    needed = {last}
    for instr in reversed(part.instrs):
        if instr in needed:
            needed.update(instr.args)
    return dict.fromkeys(instr for instr in part.instrs if instr in needed)


def _divided(unit: Unit, part: Part, length: int, scratch: int) -> tuple[Unit, Unit]:
    """Sums of rows, and the sum of these with what the unit makes of it."""
    total = next(instr for instr in part.instrs if instr.kind == "reduce")
    rows, dtype = part.numel // length, total.dtype
    value = scratch_value(scratch, rows * dtype.itemsize, unit.node)

    def access(level: int) -> MemAccess:
        return MemAccess(value, _whole(rows), dtype, 0, level, 0, rows * dtype.itemsize)

    made = _copied(_behind(part, total), {})
    store = Instr("store", dtype, KEPT, (made[total],), access=access(KEPT))
    first = Part(part.node, part.numel, ((1, length),), [*made.values(), store])
    load = Instr("load", dtype, FULL, access=access(FULL))
    added = replace(total, args=(load,))
    rest = _copied((instr for instr in part.instrs if instr.level != FULL and instr is not total), {total: added})
    ahead = [instr for instr in rest.values() if instr.level == UNIFORM and instr is not added]
    behind = [instr for instr in rest.values() if instr.level != UNIFORM and instr is not added]
    second = Part(part.node, rows, ((1, rows),), [*ahead, load, added, *behind], later=1)
    reads = tuple(access.value for mode, access in first.accesses() if mode == "r")
    others = tuple(access.value for mode, access in second.accesses() if mode == "r")
    return (Unit(unit.position, unit.node, first, "", reads, (value,), unit.made_by_aten),
            Unit(unit.position, unit.node, second, "", others, unit.makes, unit.made_by_aten))


def _copied(instrs: Iterable[Instr], made: dict[Instr, Instr]) -> dict[Instr, Instr]:
    """Each with its copy; ``made``: copies that there are."""
    for instr in instrs:
        made[instr] = replace(instr, args=tuple(made[arg] for arg in instr.args))
    return made
