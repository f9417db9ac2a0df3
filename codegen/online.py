"""Merges a row's maximum and its sum of exponentials into one pass. Imports torch and codegen's leaf modules.

After "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018): the running sum is rescaled whenever the
running maximum grows, here once a block. Worth it where the row does not fit in registers, so that each pass reads memory.
"""

from __future__ import annotations

import torch

from codegen.body import Body, Step
from codegen.exponents import ROUGH, below_maximum

ONLINE = "exp_add"
_EXPONENTIALS = ("libdevice.exp({0})", "tl.exp({0})", ROUGH)
_BESIDE_ONE = ROUGH.removesuffix("({0})")
"""What sums of at least 1 in float32 take: it flushes denormal results to zero, and is off by some 1e-7 of a term for each unit
below the maximum, of terms that are the smaller for it. A softmax of 50,257 in float32 would spend 2 % of its time on the
difference."""


def merge_passes(body: Body) -> None:
    """Turn every sum of exp(value - max of value) into an `ONLINE` reduction of value, one phase earlier.

    Its arguments become (value, maximum) with the exponential's name as ``payload``.
    """
    for step in body.steps:
        if step.stage == "reduce" and step.text == "add":
            found = _pair(step.args[0])
            if found is not None:
                value, highest, exponential = found
                step.text, step.args = ONLINE, (value, highest)
                step.payload = _BESIDE_ONE if step.dtype is torch.float32 else exponential
    for step in body.steps:
        if step.text == ONLINE and step.stage == "reduce":
            step.phase = step.args[1].phase
        elif step.args:
            step.phase = max(arg.phase for arg in step.args) + (step.stage == "reduce")
    body.drop_unused()


def pairs(body: Body) -> list[Step]:
    """The sums that `merge_passes` would merge with their maxima."""
    return [step for step in body.steps if step.stage == "reduce" and step.text == "add" and _pair(step.args[0]) is not None]


def _pair(term: Step) -> tuple[Step, Step, str] | None:
    """(value, its maximum, the exponential's name) where ``term`` is exp(value - maximum)."""
    found = below_maximum(term) if term.text in _EXPONENTIALS else None
    return (*found, term.text.removesuffix("({0})")) if found is not None else None


def loop_lines(highest: str, value: str, sums: dict[str, str], axis: int, lane: int = 0, apart: bool = False) -> list[str]:
    """One block's share: updates the row's maximum ``{highest}_acc`` and the lanes' ``sums`` (name: exponential) by ``value``.

    ``value`` is -inf where masked. One maximum a block, not one a lane, spares every element its second exponential. With
    ``lane`` there is one for so many neighbours, all of a thread: its threads need not wait for one another in each block. Lanes
    that are ``apart``, of a column of which several threads hold parts, have one each.
    """
    if lane:
        return [
            f"{highest}_in = tl.reshape({value}, [B0, B1 // {lane}, {lane}])",
            f"{highest}_new = tl.maximum({highest}_acc, tl.reduce({highest}_in, 2, _max), propagate_nan=tl.PropagateNan.ALL)",
            f'{highest}_base = tl.where({highest}_new == float("-inf"), 0.0, {highest}_new)',
            *(line for name, exp in sums.items() for line in (
                f"{name}_in = tl.reduce({exp}({highest}_in - {highest}_base[:, :, None]), 2, _add)",
                f"{name}_acc = {name}_acc * {exp}({highest}_acc - {highest}_base) + {name}_in")),
            f"{highest}_acc = {highest}_new",
        ]
    return [
        f"{highest}_in = {value}",
        *([] if apart else [f"{highest}_new = tl.reduce({highest}_in, {axis}, _max, keep_dims=True)"]),
        f"{highest}_new = tl.maximum({highest}_acc, {highest}_{'in' if apart else 'new'}, propagate_nan=tl.PropagateNan.ALL)",
        f'{highest}_base = tl.where({highest}_new == float("-inf"), 0.0, {highest}_new)',
        *(f"{name}_acc = {name}_acc * {exp}({highest}_acc - {highest}_base) + {exp}({highest}_in - {highest}_base)"
          for name, exp in sums.items()),
        f"{highest}_acc = {highest}_new",
    ]


def end_lines(highest: str, sums: dict[str, str], alone: bool, axis: int = 1) -> list[str]:
    """The row's maximum, and its sums, from those of neighbours or lanes; as plain numbers where a program has one row ``alone``:
    they have no layout that what is computed with them would follow."""
    over = "None, {0}" if alone else f"{axis}, {{0}}, keep_dims=True"
    return [
        f"{highest} = tl.reduce({highest}_acc, {over.format('_max')})",
        f'{highest}_base = tl.where({highest} == float("-inf"), 0.0, {highest})',
        *(f"{name} = tl.reduce({name}_acc * {exp}({highest}_acc - {highest}_base), {over.format('_add')})"
          for name, exp in sums.items()),
    ]
