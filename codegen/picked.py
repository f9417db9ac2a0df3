"""Picks one element of each row of what a kernel computes, by computing that element alone: a loss needs one of a row's
log-softmax. Imports codegen's leaf modules and `ir_nodes`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Mapping

from codegen import forms
from codegen.instructions import FULL, KEPT
from ir_nodes.node import Buffer

if TYPE_CHECKING:
    from codegen.body import Body, Step

MOST = 16
"""More steps than so many are not taken again for one element of a row."""


def pick(body: Body, source: Step, index: Step, interval: tuple[int, int], written: set[Buffer],
         known: Mapping[Step, Step] = {}) -> Step | None:
    """``source`` at ``index`` along the rows, which are ``interval`` of the linear index, in new steps of ``body``; None where
    that takes more than elementwise steps over what is loaded. What is ``written`` by the kernel is left alone, for other threads
    may have done so. ``known``: what some steps are there."""
    needed = behind(source, known)
    if len(needed) > MOST or not all(_can(step, interval, body.numel, written) for step in needed):
        return None
    made = {id(step): one for step, one in known.items()}
    for step in [step for step in body.steps if step in needed]:
        if step.stage == "load":
            stride, rest = forms.along(step.form, interval, body.numel) or (0, ())
            form = forms.embed(rest, body.reduced or (), body.numel)
            assert step.access is not None and form is not None
            made[id(step)] = body.add(replace(
                step, stage="gather", level=KEPT, args=(index,), access=replace(step.access, index_stride=stride),
                form=form, kept_form=rest, payload=(interval, rest)))
        else:
            made[id(step)] = body.add(replace(step, level=KEPT, phase=0, args=tuple(made.get(id(arg), arg) for arg in step.args)))
    return made[id(source)]


def behind(source: Step, known: Mapping[Step, Step] = {}) -> dict[Step, None]:
    """The step and those over the full space that it takes, but what is ``known``."""
    found: dict[Step, None] = {}
    waiting = [source]
    while waiting:
        step = waiting.pop()
        if step.level == FULL and step not in found and step not in known:
            found[step] = None
            waiting += step.args
    return found


def _can(step: Step, interval: tuple[int, int], numel: int, written: set[Buffer]) -> bool:
    access = step.access
    if step.stage == "expr":
        return bool(step.args)
    plain = step.stage == "load" and not step.args and access is not None and not (access.shift or access.scattered)
    return plain and access is not None and access.value.buffer not in written and bool(forms.along(step.form, interval, numel))
