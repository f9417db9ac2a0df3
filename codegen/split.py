"""Cuts a body in two kernels where programs share a reduction: partial results into scratch memory, then their combination.
Imports codegen's leaf modules and `ir_nodes`."""

from __future__ import annotations

from dataclasses import replace

from codegen import forms, mixing
from codegen.body import Body, Step
from codegen.instructions import FULL, KEPT, UNIFORM, MemAccess, scratch_value
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
            first.steps.append(step)
            moved[id(step)] = _partial(first, second, step, shares, node)
        elif step.level != FULL:
            args = tuple(moved[id(arg)] for arg in step.args)
            form = forms.collapse((shares, *(n for n, _ in step.kept_form)), (0, *(s for _, s in step.kept_form)))
            moved[id(step)] = replace(step, args=args, form=form)
            second.steps.append(moved[id(step)])
    return _tidied(first, second)


def mixed_body(body: Body, shares: int, node: Node) -> tuple[Body, Body]:
    """The kernels of rows reduced beside columns: ``shares`` programs walk the rows and leave partial results of the columns.

    Scratch holds (shares, columns) accumulators per reduction of columns, row-major.
    """
    columns = body.extent
    first = Body(body.numel, body.reduced, elided=body.elided, mixed=True)
    second = Body(shares * columns, ((columns, shares * columns),) if shares > 1 else (), column=True)
    moved: dict[int, Step] = {}
    for step in body.steps:
        if not step.across or step.stage == "reduce":
            first.steps.append(step)
        if step.stage == "reduce" and step.across:
            moved[id(step)] = _partial(first, second, step, shares, node)
        elif step.across or step.level == UNIFORM and all(id(arg) in moved for arg in step.args):
            args = tuple(moved[id(arg)] for arg in step.args)
            form = forms.collapse((shares, *(n for n, _ in step.kept_form)), (0, *(s for _, s in step.kept_form)))
            phase = max((arg.phase for arg in args), default=0)
            moved[id(step)] = replace(step, args=args, form=form, across=False, phase=phase)
            second.steps.append(moved[id(step)])
    return _tidied(first, second)


def _tidied(first: Body, second: Body) -> tuple[Body, Body]:
    for half in (first, second):
        half.drop_unused(draws=half is first)
        half.stored = [step.access.value for step in half.steps if step.stage == "store" and step.access is not None]
    return first, second


def _partial(first: Body, second: Body, step: Step, shares: int, node: Node) -> Step:
    """Scratch for one program's share of a reduction: stored in ``first``, combined in ``second``, whose step is returned."""
    kept = first.extent if step.across else first.kept
    value = scratch_value(0, shares * kept * step.dtype.itemsize, node)
    row = forms.collapse((kept,), (1,))
    full = mixing.embedded(row, first.reduced or (), first.numel, step.across, KEPT)
    assert full is not None
    access = MemAccess(value, row, step.dtype, 0, KEPT, 0, value.buffer.nbytes)
    first.steps.append(Step("store", step.dtype, KEPT, step.phase, (step,), access=access, form=full, partial=True,
                            across=step.across))
    whole = forms.collapse((shares, kept), (kept, 1))
    loaded = Step("load", step.dtype, FULL, access=replace(access, form=whole, level=FULL), form=whole)
    total = Step("reduce", step.dtype, KEPT, 1, (loaded,), step.text)
    second.steps += [loaded, total]
    return total
