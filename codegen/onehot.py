"""Sums of rows with one element that is not zero, without walking the rows. Imports codegen's leaf modules.

The gradient of a negative log likelihood is such a row, and the gradient of log-softmax sums it.
"""

from __future__ import annotations

from codegen import forms
from codegen.body import Body, Step
from codegen.instructions import FULL, KEPT, UNIFORM

ONE_HOT = "tl.where(({0} == {1}) & ({1} != {2}), -{3}, 0.0)"
"""(position in the row, the position that counts, the position that means none, value)"""


def sum_one_hots(body: Body) -> None:
    """Turn every sum of a `ONE_HOT` along its row into the element that is not zero. A body left without reductions becomes one
    over the whole space."""
    for step in list(body.steps):
        if step.stage == "reduce" and step.text == "add" and not step.across:
            rounding, hot = _unrounded(step.args[0])
            if hot.text == ONE_HOT and _along(body, hot.args[0]) and all(arg.level != FULL for arg in hot.args[1:]):
                _pick(body, step, rounding, hot)
    for step in body.steps:
        if step.args:
            step.phase = max(arg.phase for arg in step.args) + (step.stage == "reduce")
    body.drop_unused()
    kept = any(step.stage == "store" and step.level == KEPT for step in body.steps)
    if body.reduced and not kept and not any(step.stage in ("reduce", "gather", "scan") for step in body.steps):
        body.reduced, body.column = None, False


def _unrounded(step: Step) -> tuple[str, Step]:
    """(text that rounds to 16 bits or "{0}", what is rounded)."""
    if len(step.args) == 1 and step.text.startswith("{0}.to(tl.") and step.text.endswith("float16).to(tl.float32)"):
        return step.text, step.args[0]
    return "{0}", step


def _along(body: Body, position: Step) -> bool:
    """True where the position counts from the row's first element to its last."""
    return position.stage == "coord" and body.reduced == ((1, body.extent),) and position.form == forms.collapse(
        (body.kept, body.extent), (0, 1))


def _pick(body: Body, total: Step, rounding: str, hot: Step) -> None:
    _, index, none, value = hot.args
    count = Step("size", index.dtype, UNIFORM, payload=body.extent)
    body.steps.insert(body.steps.index(total), count)
    inside = "({0} >= 0) & ({0} < {3}) & ({0} != {1})"
    total.stage, total.level, total.args = "expr", KEPT, (index, none, value, count)
    total.text = rounding.replace("{0}", f"tl.where({inside}, -{{2}}, 0.0)")
