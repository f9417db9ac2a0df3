"""Says where rows and columns of one space are reduced in one kernel: one pass over what both read. Imports codegen's leaves.

Programs walk the rows. Each row is reduced in registers; columns are summed beside, and what every program has of them is
combined by a small second kernel. So nothing of the first kernel may need a column's result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from codegen import forms
from codegen.forms import Reduced
from codegen.instructions import FULL, KEPT, Part
from codegen.tuning import Tuning
from ir_nodes import settings

if TYPE_CHECKING:
    from codegen.group import Group, Unit

MAX_COLUMN_SUMS = 4


def row_length(reduced: Reduced | None, numel: int) -> int:
    """Elements of a row where ``reduced`` are the rows of a matrix of ``numel`` elements, or its columns; else 0."""
    if not reduced or len(reduced) != 1:
        return 0
    lower, upper = reduced[0]
    return upper if lower == 1 and upper < numel else lower if upper == numel and lower > 1 else 0


def across(reduced: Reduced, numel: int) -> Reduced:
    """The columns of a matrix whose rows are ``reduced``, or the other way round."""
    lower, upper = reduced[0]
    return ((upper, numel),) if lower == 1 else ((1, lower),)


def mixes(part: Part, tuning: Tuning) -> bool:
    """True where the part's reduction may share a pass with one across it."""
    length = row_length(part.reduced, part.numel)
    rows = bool(part.reduced and part.reduced[0][0] == 1)
    if not length or not (part.reduces or rows) or not settings.enabled("mix_order"):
        return False
    large = part.numel > tuning.split_numel and part.numel // length >= tuning.mixed_rows
    return large and length <= tuning.mixed_row and (rows or not part.waits)


def can_mix(left: Group, right: Group) -> bool:
    """True where one reduces the rows and the other the columns of one matrix."""
    if left.numel != right.numel or not left.reduced or not right.reduced or not (left.mixes and right.mixes):
        return False
    if left.reduced == right.reduced or row_length(left.reduced, left.numel) != row_length(right.reduced, right.numel):
        return False
    rows = left if left.reduced[0][0] == 1 else right
    return not rows.split


def column_units(group: Group) -> tuple[Unit, ...]:
    """What of ``group`` becomes the columns' side: its reductions and what follows them."""
    return (*(unit for unit in group.units if unit.part is not None and unit.part.reduced is not None), *group.kept_units)


def refused(units: list[Unit], crossed: dict[Unit, None], kept: dict[Unit, None]) -> str | None:
    """Why ``units``, of which ``crossed`` are the columns' side and ``kept`` lie over the rows' results, cannot share a pass."""
    late = {access.value for unit in crossed if unit.part is not None for mode, access in unit.part.accesses()
            if mode == "w" and (access.level == KEPT or unit.part.reduced is None)}
    sums = 0
    for unit in units:
        if unit.part is None:
            continue
        reads = {access.value for mode, access in unit.part.accesses() if mode == "r"}
        follows = unit in crossed and unit.part.reduced is None
        sums += sum(instr.kind == "reduce" for instr in unit.part.instrs) if unit in crossed else 0
        if unit in crossed and unit.part.draws:
            return "random numbers are drawn on one side of it"
        if follows and not reads & late and not _only_columns(unit.part):
            return "the columns' results are combined by another kernel, which does nothing else than work per column"
        if not follows and reads & late:
            return "columns are reduced over all programs, so their results are not known inside the kernel"
        own = [instr.kind for instr in unit.part.instrs if instr.level == KEPT]
        if unit in crossed and not follows and not {"load", "gather", "coord"}.isdisjoint(own):
            return "what it reads per column would be read by another kernel"
    if sums > MAX_COLUMN_SUMS:
        return f"more than {MAX_COLUMN_SUMS} sums of columns beside rows"
    return None


def _only_columns(part: Part) -> bool:
    """True where the part reads what it works on per column, so that the kernel which combines the columns' sums can do it."""
    kinds = part.facts.kinds
    return "load" in kinds and kinds <= {"load", "store", "expr", "scalar", "size"}


def embedded(form: forms.Form, reduced: Reduced, numel: int, crossed: bool, level: int) -> forms.Form | None:
    """A form over the whole space: of one per row, or, where ``crossed``, one per column."""
    if level == FULL:
        return form
    return forms.embed(form, across(reduced, numel) if crossed else reduced, numel)
