"""Lowers losses of two tensors and their gradients by rows like those of `codegen.expressions`. Imports torch, `ir_nodes` and
codegen's lowering modules.

A loss is computed in float32 (float64 for float64) and rounded once to what ATen would hold before it sums, so that what
overflows in 16 bits does here. Sums are taken of that, and a mean divides by how many there are. Binary cross entropy looks
whether its operands lie between 0 and 1 while LAZYSCHED_CHECK_INDICES is on.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

from codegen.expressions import Case, Row, Unsupported
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.pointwise import element
from codegen.promotion import compute_dtype
from codegen.reductions import Lowered, mean_of, operand_of, reduction, write_kept
from ir_nodes import settings
from ir_nodes.node import Node, Operand

NONE, MEAN, SUM = 0, 1, 2
"""ATen's reductions."""

OPERANDS = ("self", "target", "weight", "pos_weight")

_DIFFERENCE = "({self} - {target})"
_DISTANCE = f"tl.abs({_DIFFERENCE})"
_LOG_SIGMOID = "(tl.where({self} < 0, {self}, 0.0) - @log1p(@exp(-tl.abs({self}))))"


def _weighed(text: str) -> Callable[[Case], str]:
    return lambda case: f"({text}) * {{weight}}" if case.given("weight") else text


def _at_least(text: str, least: str) -> str:
    return f"tl.where({text} < {least}, {least}, {text})"


def _entropy_of_logits(case: Case) -> str:
    log = f"{_LOG_SIGMOID} * (({{pos_weight}} - 1.0) * {{target}} + 1.0)" if case.given("pos_weight") else _LOG_SIGMOID
    return _weighed(f"(1.0 - {{target}}) * {{self}} - {log}")(case)


def _entropy_slope(case: Case) -> str:
    least = "0.0" if case.half == "tl.float16" else "1e-12"  # what 1e-12 is in float16, where ATen's gradient may be infinite
    spread = _at_least("((1.0 - {self}) * {self})", least)
    return _weighed(f"@div({{grad_output}} * {_DIFFERENCE}, {spread})")(case) + " * {norm}"


LOSSES: dict[str, Row] = {
    "mse_loss": Row(f"{_DIFFERENCE} * {_DIFFERENCE}"),
    "smooth_l1_loss": Row(f"tl.where({_DISTANCE} < {{beta}}, @div(0.5 * {_DISTANCE} * {_DISTANCE}, {{beta}}), "
                          f"{_DISTANCE} - 0.5 * {{beta}})"),
    "huber_loss": Row(f"tl.where({_DISTANCE} < {{delta}}, 0.5 * {_DISTANCE} * {_DISTANCE}, "
                      f"{{delta}} * ({_DISTANCE} - 0.5 * {{delta}}))"),
    "binary_cross_entropy_with_logits": Row(_entropy_of_logits),
    "binary_cross_entropy": Row(_weighed(f"({{target}} - 1.0) * {_at_least('@log1p(-{self})', '-100.0')} "
                                         f"- {{target}} * {_at_least('@log({self})', '-100.0')}")),
}
"""What one element of a loss is, by the op's name."""

GRADIENTS: dict[str, Row] = {
    "mse_loss_backward": Row(f"{{norm}} * {_DIFFERENCE} * {{grad_output}}"),
    "smooth_l1_loss_backward": Row(
        f"tl.where({_DIFFERENCE} < -{{beta}}, -{{norm}} * {{grad_output}}, tl.where({_DIFFERENCE} > {{beta}}, "
        f"{{norm}} * {{grad_output}}, @div({{norm}} * {_DIFFERENCE} * {{grad_output}}, {{beta}})))"),
    "huber_loss_backward": Row(
        f"tl.where({_DIFFERENCE} < -{{delta}}, -{{norm}} * {{grad_output}} * {{delta}}, tl.where({_DIFFERENCE} > {{delta}}, "
        f"{{norm}} * {{grad_output}} * {{delta}}, {{norm}} * {_DIFFERENCE} * {{grad_output}}))"),
    "binary_cross_entropy_backward": Row(_entropy_slope),
}
"""What one element of a loss's gradient is. ``norm`` is what a unit of gradient counts for: 1 (2 for squares), over the number of
elements where the loss is their mean."""


def _arguments(node: Node) -> dict[str, Any]:
    """The node's arguments. Raises Unsupported where they are not what the rows are for."""
    args = {"weight": None, "pos_weight": None, **arguments(node)}
    if len(node.writes) != 1 or args["reduction"] not in (NONE, MEAN, SUM):
        raise Unsupported(f"no kernel for {node.target}")
    given = [operand_of(args[name]) for name in OPERANDS if args.get(name) is not None]
    if not all(operand.layout.dtype.is_floating_point for operand in given):
        raise Unsupported("a loss of integers")
    if node.name.startswith("binary_cross_entropy") and len({operand.layout.dtype for operand in given}) > 1:
        raise Unsupported("a binary cross entropy of operands of several dtypes")
    return args


def lower_loss(node: Node, scratch: int) -> list[Part]:
    """A loss: element by element, or their sum or mean."""
    args = _arguments(node)
    row, out = LOSSES[node.name], node.writes[0].layout
    sizes = [args[name].layout.size for name in OPERANDS if args[name] is not None]
    shape = tuple(torch.broadcast_shapes(*sizes))
    if node.name == "binary_cross_entropy" and any(size != shape for size in sizes[:2]):
        raise Unsupported("a binary cross entropy of operands of several shapes")
    if args["reduction"] == NONE:
        lowering = Lowering(node, out.size)
        lowering.write(0, _loss(lowering, row, args, out.dtype))
        return [lowering.part]
    source = operand_of(args["self"])
    lowering, dims = reduction(node, Operand(source.value, source.layout.expanded(shape)), None)
    rounded = lowering.cast(_loss(lowering, row, args, out.dtype), out.dtype)
    total = lowering.reduce("add", lowering.cast(rounded, compute_dtype(out.dtype)))
    write_kept(lowering, 0, mean_of(lowering, total) if args["reduction"] == MEAN else total, dims)
    return [lowering.part]


def _loss(lowering: Lowering, row: Row, args: dict[str, Any], out: torch.dtype) -> Instr:
    value = element(lowering, row, args, out)
    if lowering.part.node.name == "binary_cross_entropy" and settings.current().check_indices:
        for name, told in (("self", "input"), ("target", "target")):
            value = _where_probable(lowering, value, lowering.read(args[name]), told)
    return value


def _where_probable(lowering: Lowering, value: Instr, probability: Instr, told: str) -> Instr:
    """``value``; a kernel that finds a ``probability`` below 0, above 1 or NaN stops, as ATen does."""
    found = lowering.expr("tl.where(({0} >= 0) & ({0} <= 1), 0, 1)", probability, dtype=torch.int32)
    checked = lowering.check(found, 1, wrong=f"all elements of {told} should be between 0 and 1")
    return lowering.expr('tl.where({0} == 0, {1}, float("nan"))', checked, value, dtype=value.dtype)


def lower_loss_backward(node: Node, scratch: int) -> list[Part]:
    """A loss's gradient with respect to ``self``."""
    args = _arguments(node)
    out = node.writes[0].layout
    lowering = Lowering(node, out.size)
    unit = 2.0 if node.name == "mse_loss_backward" else 1.0
    args["norm"] = unit
    if args["reduction"] == MEAN:
        held = compute_dtype(operand_of(args["self"]).layout.dtype)
        text = f"tl.math.div_rn({unit}, {{0}})" if held is torch.float32 else f"{unit} / {{0}}"
        count = lowering.size(math.prod(operand_of(args["self"]).layout.size), held)
        args["norm"] = lowering.expr(text, count, dtype=held)
    lowering.write(0, element(lowering, GRADIENTS[node.name], args, out.dtype))
    return [lowering.part]


LOWERED: dict[str, Lowered] = {
    **dict.fromkeys(LOSSES, lower_loss),
    **dict.fromkeys(GRADIENTS, lower_loss_backward),
}
"""Keyed by `ir_nodes.node.Node.name`."""
