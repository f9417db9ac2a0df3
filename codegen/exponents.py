"""Probabilities from log-probabilities in one instruction less an element. Imports codegen's leaf modules."""

from __future__ import annotations

from codegen.body import Body

ROUGH = "libdevice.fast_expf({0})"
_LOG2_E = "1.4426950408889634"
_FOLDED = f"tl.exp2(({{0}} - {{1}}) * {_LOG2_E} - {{2}} * {_LOG2_E})"


def fold_logarithms(body: Body) -> None:
    """exp(value - maximum - logarithm) as a power of two whose exponent is one multiply-add.

    The maximum is subtracted first, which is exact for numbers near it however large they are; a logarithm of a sum is at most
    some 20, so its rounding shows no more than that of the second difference would. Only where the exponential is a rough one.
    """
    for step in body.steps:
        if step.text == ROUGH and step.args[0].text == "{0} - {1} - {2}":
            step.text, step.args = _FOLDED, step.args[0].args
    body.drop_unused()
