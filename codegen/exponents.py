"""Exponentials that take fewer instructions, powers that hold fewer registers. Imports codegen's leaf modules."""

from __future__ import annotations

import torch

from codegen.body import Body, Step
from codegen.instructions import FULL, KEPT
from codegen.promotion import HALF

ROUGH = "libdevice.fast_expf({0})"
_LOG2_E = "1.4426950408889634"
_FOLDED = f"tl.exp2(({{0}} - {{1}}) * {_LOG2_E} - {{2}} * {_LOG2_E})"
_HIGHER = 32
_RAISED = {"tl.exp({0})": f"libdevice.exp2({{0}} * {_LOG2_E} + {_HIGHER}.0)"}
_PRODUCTS = ("{0} * {1}", "{0} - {1} * {2}")

UNIT = f"tl.where(tl.abs({{0}}) < {1 << 20}.0, {_LOG2_E}, 1.0)"
"""(a maximum of 16-bit elements): what their exponents are multiplied by. From 2^20 on, the next smaller number in 16 bits is
thousands away: whatever the base, its power is zero, and numbers times 1 overflow no more than numbers do."""
FROM = "{0} * {1}"
"""(the maximum, its unit)"""
POWER = "tl.exp2(tl.fma({0}, {1}, -{2}))"
"""(element, unit, `FROM`): a multiply-add, rounded once. All of a row's powers are off by one factor near 1, as `FROM` is
rounded, too. `SLACK` of the maximum is its inverse, for their sum, or for what they are multiplied by."""
SLACK = "tl.exp2(-tl.fma({0}, {1}, -{2}))"


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


def raise_exponentials(body: Body) -> None:
    """Exponentials of elements that are shown in 16 bits, 2^32 times as large; what they are multiplied by is as much smaller.

    The machine's power of two takes denormal numbers for zero. To keep them, three more instructions ask whether it is one, and
    scale it. What these lose is less than 2^-158, of which 16 bits show nothing, not even times a gradient of 2^24.
    """
    for step in [step for step in body.steps if step.text in _RAISED and step.dtype is torch.float32]:
        if step.level != FULL or below_maximum(step) is None:  # others might be too large
            continue
        users = [user for user in body.steps if step in user.args]
        if not _shared_out(body, step, users):
            factors = [factor_of(user, step) for user in users]
            if not factors or None in factors:
                continue
            for user, factor in zip(users, factors):
                assert factor is not None
                smaller = Step("expr", factor.dtype, factor.level, factor.phase, (factor,), f"{{0}} * {2.0 ** -_HIGHER}")
                _take_instead(body, user, factor, smaller)
        step.text = _RAISED[step.text]


def scale_exponentials(body: Body) -> None:
    """Exponentials of a row's 16-bit elements less their maximum take a multiply-add each, if a row's number multiplies them.

    That number then makes up for the rest: what the maximum's product was rounded by, and a logarithm. Where denormal numbers
    count, powers are 2^32 times as large, as in `raise_exponentials`.
    """
    for step in list(body.steps):
        if step.level != FULL or step.text != _FOLDED and step.text not in _RAISED:
            continue
        found = step.args[:2] if step.text == _FOLDED else below_maximum(step)
        factors = {user: factor_of(user, step) for user in body.steps if step in user.args}
        if found is not None and _narrow(found[0]) and found[1].level == KEPT and None not in factors.values():
            _scale(body, step, found[0], found[1], {user: factor for user, factor in factors.items() if factor is not None})
    body.drop_unused()


def _scale(body: Body, power: Step, value: Step, highest: Step, factors: dict[Step, Step]) -> None:
    """The same for one ``power``, of ``value`` less ``highest``, which its users multiply by their ``factors``."""
    folded = power.text == _FOLDED
    unit = _of_row(UNIT, highest)
    start = _of_row(FROM if folded else f"{FROM} - {_HIGHER}.0", highest, unit)
    slack = f"{SLACK.removesuffix(')')} - {{3}} * {_LOG2_E})" if folded else SLACK
    rest = _of_row(slack, highest, unit, start, *power.args[2:])
    place = body.steps.index(power)
    body.steps[place:place] = [unit, start, rest]
    power.text, power.args = POWER, (value, unit, start)
    for user, factor in factors.items():
        _take_instead(body, user, factor, _of_row("{0} * {1}", factor, rest))


def _of_row(text: str, *args: Step) -> Step:
    return Step("expr", torch.float32, KEPT, max(arg.phase for arg in args), args, text)


def _take_instead(body: Body, user: Step, old: Step, new: Step) -> None:
    """Let the ``user`` take a new step for an old one."""
    body.steps.insert(body.steps.index(user), new)
    user.args = tuple(new if arg is old else arg for arg in user.args)


def _narrow(step: Step) -> bool:
    """Is it a 16-bit number as it was loaded?"""
    load = loaded(step)
    return load is not None and load.access is not None and load.access.dtype in HALF and load.dtype is torch.float32


def loaded(step: Step) -> Step | None:
    """The load whose number this is, if it is nothing else."""
    if step.stage == "load":
        return step
    return loaded(step.args[0]) if step.text == "{0}" else None


def below_maximum(power: Step) -> tuple[Step, Step] | None:
    """(value, its maximum) where ``power``, some function of one number, is one of value - maximum, which is never above 0."""
    if power.args[0].text != "{0} - {1}":
        return None
    value, highest = power.args[0].args
    return (value, highest) if highest.stage == "reduce" and highest.text == "max" and highest.args[0] is value else None


def _shared_out(body: Body, power: Step, users: list[Step]) -> bool:
    """Is each of a row's powers only shown as a share of their sum, for which nothing has to be smaller?"""
    totals = [user for user in users if user.stage == "reduce" and user.text == "add"]
    inverses = [step for step in body.steps if any(total in step.args for total in totals)]
    if len(totals) != 1 or not inverses or any(step.text != "1.0 / {0}" for step in inverses):
        return False
    shares = {step for step in body.steps if any(inverse in step.args for inverse in inverses)}
    return shares == {*users} - {*totals} and all(factor_of(share, power) in inverses for share in shares)


def factor_of(user: Step, power: Step) -> Step | None:
    """The number, one for a row, by which the ``user`` multiplies the ``power``, if it does nothing else with it."""
    if user.text not in _PRODUCTS or user.args.count(power) != 1:
        return None
    left, right = user.args[-2:]
    factor = right if left is power else left
    return factor if power in (left, right) and factor.level != FULL and factor.dtype is torch.float32 else None


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
    return "_pow(" in step.text or "_number_pow_16(" in step.text
