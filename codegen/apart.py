"""Stores a row's one element that differs from what the others are computed by, apart from them. Imports codegen's leaf modules.

The gradient of a loss over classes is a row's shares, and of one class one less. To ask of each element whether it is that one
takes two instructions of nine, which long rows wait for. So all are stored as if none was, and behind a barrier that one: on an
H200, 4,096 rows of 128,256 in float32 take 1,068 us so, 1,127 otherwise.
"""

from __future__ import annotations

from functools import partial

from codegen import forms
from codegen.body import Body, Step
from codegen.cached_rows import HELD
from codegen.forms import Form, Reduced
from codegen.instructions import FULL, KEPT, UNIFORM
from codegen.onehot import ONE_HOT, along
from codegen.picked import pick


def store_apart(body: Body) -> None:
    """Give stores of rows with a `ONE_HOT` its index, and the element there, as further arguments. Only of rows that registers do
    not hold whole: shorter ones are not worth a barrier, and an element that is loaded by itself."""
    if body.reduced is None or any(step.across for step in body.steps):
        return
    stores = [step for step in body.steps if step.stage == "store" and step.access is not None]
    written = {step.access.value.buffer for step in stores if step.access is not None}
    for store in [step for step in stores if step.level == FULL and len(step.args) == 1]:
        hot = _only_hot(body, store)
        width = store.access.dtype.itemsize if store.access is not None else 0
        if hot is None or body.extent <= HELD.get((width, True), body.extent):
            continue
        _, index, value = hot.args
        minus = body.add(Step("expr", value.dtype, KEPT, 0, (value,), "-{0}"))
        kept = partial(_of_rows, body.reduced, body.numel)
        alone = pick(body, store.args[0], index, body.reduced[0], kept, written, {hot: minus})
        if alone is not None:
            store.args += (index, alone)
            hot.text, hot.args, hot.level, hot.phase = "0.0", (), UNIFORM, 0
    body.steps.sort(key=lambda step: step.stage == "store")
    body.drop_unused()


def _of_rows(reduced: Reduced, numel: int, form: Form) -> Form:
    """A form of one element a row over the whole space."""
    found = forms.embed(form, reduced, numel)
    assert found is not None
    return found


def _only_hot(body: Body, store: Step) -> Step | None:
    """The `ONE_HOT` of which the ``store``'s value is made, if nothing else is, and its index waits for no sum."""
    needed = _behind(store.args[0])
    found = [step for step in needed if step.text == ONE_HOT]
    if len(found) != 1 or not along(body, found[0].args[0]):
        return None
    hot, (_, index, value) = found[0], found[0].args
    made = {hot}
    for step in body.steps:
        if any(arg in made for arg in step.args):
            if step not in needed and step is not store or step.level != FULL:
                return None
            made.add(step)
    return hot if index.level != FULL and value.level != FULL and not index.phase else None


def _behind(source: Step) -> dict[Step, None]:
    """The step and those over the full space that it takes."""
    found: dict[Step, None] = {}
    waiting = [source]
    while waiting:
        step = waiting.pop()
        if step.level == FULL and step not in found:
            found[step] = None
            waiting += step.args
    return found
