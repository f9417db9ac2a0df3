"""Hyperbolic tangents whose results are only rounded to 16 bits, in half the instructions. Imports codegen's leaf modules.

GPT-2's GELU is written as a formula, of which float32 tensors hold the parts under autocast: 1 + tanh(x) times half of x, then
rounded. Its kernels wait for instructions, of which an exact tanh takes a third. `codegen.helpers.TANH_16` is within 2.5e-7 of
it, and within two parts in 100,000 near zero, where that is more. Products, what adds a number and a tangent's own derivative
hand on no more than that; a difference of two tensors could be all error, so there the exact one stays.
"""

from __future__ import annotations

import torch

from codegen.body import Body, Step
from codegen.expressions import FUNCTIONS, ROWS
from codegen.instructions import UNIFORM
from codegen.promotion import HALF, TRITON_TYPES

EXACT, _, ROUGH = (f"{name}({{0}})" for name in FUNCTIONS["tanh"])
ROUNDINGS = frozenset(f"{{0}}.to({TRITON_TYPES[dtype]}).to(tl.float32)" for dtype in HALF)
_PRODUCT, _SUM = "{0} * {1}", "{0} + {1} * {2}"
_DERIVATIVE = str(ROWS["tanh_backward"].text).replace("{grad_output}", "{0}").replace("{output}", "{1}")


def rough_tangents(body: Body) -> None:
    """Tangents that only reach roundings by way of what hands on no more than their error."""
    found = [step for step in body.steps if step.text == EXACT and step.dtype is torch.float32]
    if not found:
        return
    users: dict[Step, list[Step]] = {}
    for step in body.steps:
        for argument in dict.fromkeys(step.args):
            users.setdefault(argument, []).append(step)
    for step in found:
        if _is_rounded(step, users):
            step.text = ROUGH


def _is_rounded(value: Step, users: dict[Step, list[Step]]) -> bool:
    """Do 16 bits hold whatever becomes of ``value``?"""
    found = users.get(value, [])
    return bool(found) and all(user.text in ROUNDINGS or _hands_on(user, value) and _is_rounded(user, users) for user in found)


def _hands_on(user: Step, value: Step) -> bool:
    """Is the error of what ``user`` makes of ``value`` no larger part of it, or of a number that is added?"""
    if user.stage != "expr" or user.text not in (_PRODUCT, _SUM, _DERIVATIVE):
        return False
    if user.text == _SUM:
        return user.args.count(value) == 1 and all(one is value or one.level == UNIFORM for one in user.args)
    return user.text == _PRODUCT or user.args[0] is not value
