"""Whether a part fits into a kernel by itself. Imports codegen's planning modules."""

from __future__ import annotations

from codegen import forms
from codegen.expressions import Unsupported
from codegen.group import MAX_DIMS
from codegen.instructions import KEPT, Part

FEW_ROWS, LONG_ROW = 16, 1 << 16


def check_part(part: Part) -> None:
    """Raises Unsupported where it does not."""
    cuts: tuple[int, ...] | None = forms.reduced_cuts(part.reduced or (), part.numel)
    for pattern, level in (*part.patterns(), *((access.form, access.level) for _, access in part.accesses())):
        form = forms.embed(pattern, part.reduced or (), part.numel) if level == KEPT else pattern
        cuts = None if form is None or cuts is None else forms.merge_cuts(cuts, forms.cuts(form))
    if cuts is None:
        raise Unsupported("its operands' dimensions do not nest")
    if len(cuts) + 1 > MAX_DIMS:
        raise Unsupported(f"more than {MAX_DIMS} dimensions that do not merge")
    if part.reduced is not None and part.waits and part.kept < FEW_ROWS and part.numel // part.kept > LONG_ROW:
        raise Unsupported("a few long rows, each reduced more than once")
