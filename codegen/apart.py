"""Stores a row's one element that differs from what the others are computed by, apart from them. Imports codegen's leaf modules.

The gradient of a loss over classes is a row's shares, and of one class one less. To ask of each element whether it is that one
takes two instructions of nine, which long rows wait for. So all are stored as if none was, and behind a barrier that one: on an
H200, 4,096 rows of 128,256 in float32 take 1,068 us so, 1,127 otherwise.
"""

from __future__ import annotations

from codegen.body import Body, Step
from codegen.cached_rows import HELD
from codegen.instructions import FULL, KEPT, UNIFORM
from codegen.onehot import ONE_HOT, along
from codegen.picked import behind, pick


def store_apart(body: Body) -> None:
    """Give stores of rows with a `ONE_HOT` its index, and the element there, as further arguments. Only of rows that registers do
    not hold whole: shorter ones are not worth a barrier, and an element that is loaded by itself."""
    if body.reduced is None or any(step.across for step in body.steps):
        return
    for store in [step for step in body.steps if step.stage == "store" and step.level == FULL and len(step.args) == 1]:
        width = store.access.dtype.itemsize if store.access is not None else 0
        if body.extent > HELD.get((width, True), body.extent):
            hot = _only_hot(body, store)
            if hot is not None:
                _part(body, store, hot)


def _part(body: Body, store: Step, hot: Step) -> None:
    """The same for one ``store``, whose value ``hot`` is made part of, unless the element can't be computed by itself."""
    _, index, value = hot.args
    written = {step.access.value.buffer for step in body.steps if step.stage == "store" and step.access is not None}
    minus = body.add(Step("expr", value.dtype, KEPT, 0, (value,), "-{0}"))
    assert body.reduced is not None
    alone = pick(body, store.args[0], index, body.reduced[0], written, {hot: minus})
    if alone is not None:
        store.args += (index, alone)
        hot.text, hot.args, hot.level, hot.phase = "0.0", (), UNIFORM, 0
    body.steps.sort(key=lambda step: step.stage == "store")
    body.drop_unused()


def _only_hot(body: Body, store: Step) -> Step | None:
    """The `ONE_HOT` of which the ``store``'s value is made, if nothing else is, and its index waits for no sum."""
    needed = behind(store.args[0])
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
