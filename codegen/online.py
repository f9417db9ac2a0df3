"""Merges a row's maximum and its sum of exponentials into one pass. Imports codegen's leaf modules.

After "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018): the running sum is rescaled whenever the
running maximum grows. Worth it where the row does not fit in registers, so that each pass reads memory.
"""

from __future__ import annotations

from codegen.body import Body, Step

ONLINE = "exp_add"
_EXPONENTIALS = ("libdevice.exp({0})", "tl.exp({0})")


def merge_passes(body: Body) -> None:
    """Turn every sum of exp(value - max of value) into an `ONLINE` reduction of value, one phase earlier.

    Its arguments become (value, maximum) with the exponential's name as ``payload``.
    """
    for step in body.steps:
        if step.stage == "reduce" and step.text == "add":
            found = _pair(step.args[0])
            if found is not None:
                value, highest, exponential = found
                step.text, step.args, step.payload = ONLINE, (value, highest), exponential
    for step in body.steps:
        if step.text == ONLINE and step.stage == "reduce":
            step.phase = step.args[1].phase
        elif step.args:
            step.phase = max(arg.phase for arg in step.args) + (step.stage == "reduce")
    body.drop_unused()


def _pair(term: Step) -> tuple[Step, Step, str] | None:
    """(value, its maximum, the exponential's name) where ``term`` is exp(value - maximum)."""
    if term.text not in _EXPONENTIALS or term.args[0].text != "{0} - {1}":
        return None
    value, highest = term.args[0].args
    if highest.stage != "reduce" or highest.text != "max" or highest.args[0] is not value:
        return None
    return value, highest, term.text.removesuffix("({0})")


def loop_lines(total: str, highest: str, value: str, exponential: str) -> list[str]:
    """One block's share: updates the sum ``total`` and the maximum ``highest`` by ``value``, -inf where masked."""
    return [
        f"{total}_in = {value}",
        f"{total}_max = tl.maximum({highest}, {total}_in, propagate_nan=tl.PropagateNan.ALL)",
        f'{total}_base = tl.where({total}_max == float("-inf"), 0.0, {total}_max)',
        f"{total}_acc = {total}_acc * {exponential}({highest} - {total}_base) + {exponential}({total}_in - {total}_base)",
        f"{highest} = {total}_max",
    ]


def final_lines(total: str, highest: str, exponential: str, axis: int) -> list[str]:
    """The row's sum from its lanes' sums, which are relative to their own maxima ``{highest}_acc``."""
    return [
        f'{total}_base = tl.where({highest} == float("-inf"), 0.0, {highest})',
        f"{total} = tl.reduce({total}_acc * {exponential}({highest}_acc - {total}_base), {axis}, _add, keep_dims=True)",
    ]
