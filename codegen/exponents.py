"""Exponentials that take fewer instructions, powers that hold fewer registers. Imports codegen's leaf modules."""

from __future__ import annotations

from codegen.body import Body, Step

ROUGH = "libdevice.fast_expf({0})"
_LOG2_E = "1.4426950408889634"
_FOLDED = f"tl.exp2(({{0}} - {{1}}) * {_LOG2_E} - {{2}} * {_LOG2_E})"


def fold_logarithms(body: Body) -> None:
    """exp(value - maximum - logarithm) as a power of two whose exponent is one multiply-add.

    The maximum is subtracted first, which is exact for numbers near it however large they are; a logarithm of a sum is at most
    some 20, so its rounding shows no more than that of the second difference would. Only where the exponential is a rough one.
    """
    found = [step for step in body.steps if step.text == ROUGH and step.args[0].text == "{0} - {1} - {2}"]
    for step in found:
        step.text, step.args = _FOLDED, step.args[0].args
    if found:
        body.drop_unused()


def powers_first(body: Body) -> None:
    """Powers are computed as soon as there is what they are of.

    A power asks what its exponent is; what is computed before the question and needed after it stays in registers meanwhile, for
    all of a thread's elements: 157 registers in GELU's gradient as GPT-2 writes it, 116 so.
    """
    placed: dict[Step, None] = {}
    for power in filter(_asks, body.steps):
        needed: set[Step] = set()
        waiting = [power]
        while waiting:
            step = waiting.pop()
            if step not in needed and step not in placed:
                needed.add(step)
                waiting += step.args
        placed |= dict.fromkeys(step for step in body.steps if step in needed)
    body.steps = list(placed | dict.fromkeys(body.steps))


def _asks(step: Step) -> bool:
    return "_pow(" in step.text
