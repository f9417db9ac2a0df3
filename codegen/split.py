"""Divides the body of a reduction that is split over programs into that of two kernels. Imports codegen's leaf modules and
`ir_nodes`."""

from __future__ import annotations

from dataclasses import replace

from codegen import forms
from codegen.body import Body, Step
from codegen.instructions import FULL, KEPT, MemAccess, scratch_value
from ir_nodes.node import Node


def split_body(body: Body, shares: int, node: Node) -> tuple[Body, Body]:
    """The kernels of a reduction split into ``shares``: partial results into scratch memory, then their combination.

    Scratch holds (shares, kept) accumulators per reduction, row-major.
    """
    first = Body(body.numel, body.reduced, column=body.column, elided=body.elided)
    second = Body(shares * body.kept, ((body.kept, shares * body.kept),) if shares > 1 else (), column=True)
    moved: dict[int, Step] = {}
    for step in body.steps:
        if step.level == FULL or step.stage != "store" and step.phase == 0:
            first.steps.append(step)
        if step.stage == "reduce":
            moved[id(step)] = _partial(first, second, step, shares, node)
        elif step.level != FULL:
            args = tuple(moved[id(arg)] for arg in step.args)
            form = forms.collapse((shares, *(n for n, _ in step.kept_form)), (0, *(s for _, s in step.kept_form)))
            moved[id(step)] = replace(step, args=args, form=form)
            second.steps.append(moved[id(step)])
    for half in (first, second):
        half.drop_unused(draws=half is first)
        half.stored = [step.access.value for step in half.steps if step.stage == "store" and step.access is not None]
    return first, second


def _partial(first: Body, second: Body, step: Step, shares: int, node: Node) -> Step:
    kept = first.kept
    value = scratch_value(0, shares * kept * step.dtype.itemsize, node)
    row = forms.collapse((kept,), (1,))
    full = forms.embed(row, first.reduced or (), first.numel)
    assert full is not None
    access = MemAccess(value, row, step.dtype, 0, KEPT, 0, value.buffer.nbytes)
    first.steps.append(step)
    first.steps.append(Step("store", step.dtype, KEPT, 1, (step,), access=access, form=full, partial=True))
    whole = forms.collapse((shares, kept), (kept, 1))
    loaded = Step("load", step.dtype, FULL, access=replace(access, form=whole, level=FULL), form=whole)
    total = Step("reduce", step.dtype, KEPT, 1, (loaded,), step.text)
    second.steps += [loaded, total]
    return total
