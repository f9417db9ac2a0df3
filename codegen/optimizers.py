"""Lowers ops that update all of an optimizer's parameters at once, parameter by parameter. Imports torch, `ir_nodes` and
codegen's leaf modules.

The numbers are those of CUDA's fused kernels: everything is computed in float32 (float64 for float64) and rounded once, when it
is stored. A step that found an infinity stores what was there before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Callable

import torch

from codegen.expressions import Unsupported, function
from codegen.foreach import refuse_aliases
from codegen.instructions import KEPT, Instr, Part, scratch_value
from codegen.lowering import Lowering, arguments
from codegen.promotion import COMPUTABLE
from codegen.reductions import kept_layout, reduction
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand, Value

LARGE = 1 << 16
"""Elements of a parameter from which on the two powers of its step count are taken once, by a part of their own, and not by every
program: they took a third of the time of a large parameter's update."""


def lower_adam(node: Node, scratch: int) -> list[Part]:
    """`_fused_adam_` and `_fused_adamw_`: a part per parameter that has elements, behind one for what large ones' step counts
    make of the learning rate."""
    large = [index for index, parameter in enumerate(arguments(node)["self"]) if math.prod(parameter.layout.size) >= LARGE]
    held = scratch_value(scratch, 2 * 8 * max(len(large), 1), node)
    counts = {index: Counted(held, 2 * place) for place, index in enumerate(large)}
    first = [_counted(Update(node, arguments(node), index, ()), counts[index]) for index in large]
    return first + _lower(node, lambda one: _adam(one, counts.get(one.index)))


def lower_sgd(node: Node, scratch: int) -> list[Part]:
    """`_fused_sgd_`: a part per parameter that has elements."""
    return _lower(node, _sgd)


def _lower(node: Node, update: Callable[["Update"], None]) -> list[Part]:
    refuse_aliases(node)
    args = arguments(node)
    parts = []
    for index, parameter in enumerate(args["self"]):
        if all(parameter.layout.size):
            one = Update(node, args, index, parameter.layout.size)
            update(one)
            parts.append(one.lowering.part)
    return parts


class Update:
    """The update of parameter ``index``: its arguments, and what may be computed from them in the optimizer's dtype, over
    elements of shape ``size``."""

    def __init__(self, node: Node, args: dict[str, Any], index: int, size: tuple[int, ...]) -> None:
        self._args, self.index = args, index
        parameter = args["self"][index]
        if parameter.layout.dtype not in COMPUTABLE or not parameter.layout.dtype.is_floating_point:
            raise Unsupported(f"an optimizer of {str(parameter.layout.dtype).removeprefix('torch.')}")
        self.dtype = torch.float64 if parameter.layout.dtype is torch.float64 else torch.float32
        self.lowering = Lowering(node, size)
        self._positions = _positions(args, len(args["self"]))
        self._skip = self._found_inf()

    def flag(self, name: str) -> bool:
        return bool(self._args[name])

    def number(self, name: str) -> Instr:
        """An argument that all parameters share."""
        return self.lowering.read(self._args[name], self.dtype)

    def has(self, name: str) -> bool:
        """Whether the list of that name was given."""
        return bool(self._args[name])

    def load(self, name: str) -> Instr:
        """This parameter's tensor of a list, as it is stored."""
        operand = self._args[name][self.index]
        if not isinstance(operand, Operand):
            raise Unsupported(f"{name} without old contents")
        like = self._args["self"][self.index].layout
        if operand.layout.size and not replace(operand.layout, dtype=like.dtype, offset=like.offset).alike(like):
            raise Unsupported("a parameter whose gradient or state lies otherwise in memory")
        return self.lowering.load(operand)

    def value(self, name: str) -> Instr:
        return self.lowering.cast(self.load(name), self.dtype)

    def compute(self, text: str, *args: Instr) -> Instr:
        """``text`` over {0}, {1}, ...; "@name" is a function of the optimizer's dtype, with branches: those without have more
        instructions. AdamW over GPT-2's parameters in bfloat16 takes 438 us on an H200, and 473 so."""
        for name in ("div", "sqrt", "pow"):
            text = text.replace(f"@{name}", function(name, self.dtype, False, branches=True))
        return self.lowering.expr(text, *args, dtype=self.dtype)

    def store(self, name: str, value: Instr) -> None:
        """Make ``value`` this parameter's tensor of a list, unless the step is to be skipped."""
        if self._skip is not None:
            value = self.compute("tl.where({0} == 1, {1}, {2})", self._skip, self.value(name), value)
        self.lowering.write(self._positions[name] + self.index, value)

    def gradient(self) -> Instr:
        """The gradient, divided by GradScaler's scale, which is stored then; negated where the objective is maximised."""
        gradient = self.value("grads")
        if self._args.get("grad_scale") is not None:
            gradient = self.compute("@div({0}, {1})", gradient, self.number("grad_scale"))
            self.store("grads", gradient)
        return self.compute("-{0}", gradient) if self.flag("maximize") else gradient

    def _found_inf(self) -> Instr | None:
        return None if self._args.get("found_inf") is None else self.number("found_inf")


def _positions(args: dict[str, Any], count: int) -> dict[str, int]:
    """Where each written list begins among the node's writes."""
    names = ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list")
    written = [name for name in names if args.get(name) and (name != "grads" or args.get("grad_scale") is not None)]
    return {name: count * position for position, name in enumerate(written)}


def _decayed(one: Update, gradient: Instr, parameter: Instr) -> Instr:
    return one.compute("tl.where({0} != 0, {1} + {2} * {0}, {1})", one.number("weight_decay"), gradient, parameter)


@dataclass(frozen=True, slots=True)
class Counted:
    """Where a part leaves what follows from a step count, for others of its node: two numbers of ``value``, from ``place``."""

    value: Value
    place: int

    def layout(self, number: int, dtype: torch.dtype) -> Layout:
        return Layout(dtype, (), (), self.place + number)


def _sizes(one: Update) -> tuple[Instr, Instr]:
    """The size of an Adam step, and the root of the second moment's bias correction."""
    rate, first, second = (one.number(name) for name in ("lr", "beta1", "beta2"))
    step = one.value("state_steps")
    correction = one.compute("1.0 - @pow({0}, {1})", first, step)
    root = one.compute("@sqrt(1.0 - @pow({0}, {1}))", second, step)
    return one.compute("@div({0}, {1})", rate, correction), root


def _counted(one: Update, held: Counted) -> Part:
    for number, value in enumerate(_sizes(one)):
        one.lowering.store(held.value, held.layout(number, one.dtype), value)
    return one.lowering.part


def _adam(one: Update, held: Counted | None) -> None:
    decoupled = one.lowering.part.node.name.startswith("_fused_adamw")
    gradient, parameter = one.gradient(), one.value("self")
    rate, first, second = (one.number(name) for name in ("lr", "beta1", "beta2"))
    if decoupled:
        shrink = one.compute("{0} * {1}", rate, one.number("weight_decay"))
        parameter = one.compute("tl.where({0} != 0, {1} - {0} * {1}, {1})", shrink, parameter)
    else:
        gradient = _decayed(one, gradient, parameter)
    blend = "tl.fma({0}, {1}, tl.fma(-{0}, {2}, {2}))"
    mean = one.compute(blend, first, one.value("exp_avgs"), gradient)
    square = one.compute(blend, second, one.value("exp_avg_sqs"), one.compute("{0} * {0}", gradient))
    largest = square
    if one.flag("amsgrad"):
        largest = one.compute("tl.where({0} < {1}, {1}, {0})", one.value("max_exp_avg_sqs"), square)
    if held:
        size, root = (one.lowering.load(Operand(held.value, held.layout(number, one.dtype))) for number in (0, 1))
    else:
        size, root = _sizes(one)
    divisor = one.compute("@div(@sqrt({0}), {1}) + {2}", largest, root, one.number("eps"))
    parameter = one.compute("{0} - @div({1} * {2}, {3})", parameter, size, mean, divisor)
    one.store("self", parameter)
    one.store("exp_avgs", mean)
    one.store("exp_avg_sqs", square)
    if one.flag("amsgrad"):
        one.store("max_exp_avg_sqs", largest)


def _sgd(one: Update) -> None:
    parameter = one.value("self")
    gradient = _decayed(one, one.gradient(), parameter)
    if one.has("momentum_buffer_list"):
        momentum = one.number("momentum")
        moment = gradient
        if not one.flag("is_first_step"):
            damped = one.compute("(1.0 - {0}) * {1}", one.number("dampening"), gradient)
            moment = one.compute("{0} * {1} + {2}", momentum, one.value("momentum_buffer_list"), damped)
        one.store("momentum_buffer_list", moment)
        gradient = one.compute("{0} + {1} * {2}", gradient, momentum, moment) if one.flag("nesterov") else moment
    one.store("self", one.compute("{0} - {1} * {2}", parameter, one.number("lr"), gradient))


def lower_unscale(node: Node, scratch: int) -> list[Part]:
    """`_amp_foreach_non_finite_check_and_unscale_`: a part per gradient that has elements, which scales it and leaves a number
    above 0 where it found one that is not finite; then a part that looks at all of these."""
    refuse_aliases(node)
    args = arguments(node)
    grads = [(index, grad) for index, grad in enumerate(args["self"]) if all(grad.layout.size)]
    flags = scratch_value(scratch, 4 * max(len(grads), 1), node)
    parts = [_unscaled(node, args, index, flags, place) for place, (index, _) in enumerate(grads)]
    return [*parts, _any_found(node, args, flags, len(grads))] if parts else []


def _unscaled(node: Node, args: dict[str, Any], index: int, flags: Value, place: int) -> Part:
    source = args["self"][index]
    lowering, _ = reduction(node, source, None)
    grad = lowering.load(source)
    value = lowering.cast(grad, torch.float64 if grad.dtype is torch.float64 else torch.float32)
    factor = lowering.read(args["inv_scale"], value.dtype)
    lowering.write(index, lowering.expr("tl.where({1} == 1, {0}, {0} * {1})", value, factor, dtype=value.dtype))
    odd = lowering.expr("tl.where({0} - {0} == 0, 0.0, 1.0)", lowering.cast(value, torch.float32), dtype=torch.float32)
    lowering.store(flags, Layout(torch.float32, (), (), place), lowering.reduce("max", odd), KEPT)
    return lowering.part


def _any_found(node: Node, args: dict[str, Any], flags: Value, count: int) -> Part:
    lowering, _ = reduction(node, Operand(flags, Layout.contiguous(torch.float32, (count,))), None)
    found = lowering.reduce("max", lowering.load(Operand(flags, Layout.contiguous(torch.float32, (count,)))))
    old = args["found_inf"]
    known = lowering.load(Operand(old.value, kept_layout(old.layout, range(len(old.layout.size)))), KEPT)
    place = len(node.writes) - 1
    target = node.writes[place]
    value = lowering.expr("tl.where({0} > 0, 1.0, {1})", found, known, dtype=torch.float32)
    lowering.store(target.value, kept_layout(target.layout, range(len(target.layout.size))), value, KEPT)
    return lowering.part
