"""Finds the activation between a batch norm and the gradient that comes back, so that the norm's backward computes its mask anew.
Imports `ir_nodes` and codegen's leaf modules.

The norm's input is read there anyhow. So neither the activation's result has to be read again, nor its gradient to be stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from codegen.channels import normalised
from codegen.instructions import Instr
from codegen.lowering import Lowering, arguments
from codegen.pulled import Known
from ir_nodes import settings
from ir_nodes.node import Node, Operand


@dataclass(frozen=True, slots=True)
class Masked:
    """A gradient behind an activation: ``grad`` passes where what ``norm``, with its arguments ``args``, gave lies above
    ``threshold``."""

    grad: Operand
    norm: Node
    args: dict[str, Any]
    threshold: Any

    def load(self, lowering: Lowering, value: Instr, mean: Instr, scale: Instr, level: int) -> Instr:
        """The gradient before the activation; ``value`` is the norm's input, ``mean`` and ``scale`` are what it normalised by."""
        out = self.norm.returns[0]
        assert out is not None
        held = normalised(lowering, self.args, value, mean, scale, level)
        held = lowering.cast(held, self.norm.writes[out].layout.dtype)
        active = lowering.expr("tl.where({0} <= 0, 0.0, {0})", held, dtype=held.dtype)
        grad = lowering.load(self.grad)
        bound = lowering.read(self.threshold, held.dtype)
        passed = lowering.expr("tl.where({0} <= {1}, {2} * 0, {2})", active, bound, grad, dtype=grad.dtype)
        passed.rounded = grad.rounded
        return passed


def masked(args: dict[str, Any], known: Known) -> Masked | None:
    """How the gradient that a norm's backward (with arguments ``args``) takes was made, if that can be computed again there."""
    if not settings.enabled("recompute") or args["train"] is not True:
        return None
    given = args["grad_out"]
    gate = _maker(given, ("threshold_backward",))
    if gate is None or len(given.value.users) != 1 or given.value.buffer.live:
        return None
    passed = arguments(gate)
    activation = _maker(passed["self"], ("relu", "relu_"))
    norm = _maker(arguments(activation)["self"], ("native_batch_norm",)) if activation is not None else None
    if norm is None or not isinstance(passed["grad_output"], Operand):
        return None
    forward = arguments(norm)
    if not _same_norm(norm, forward, args) or passed["grad_output"].layout.size != given.layout.size:
        return None
    needed = [passed["grad_output"], *(forward[name] for name in ("input", "weight", "bias") if forward.get(name) is not None)]
    if not all(known.newest.get(operand.value.buffer, operand.value) is operand.value for operand in needed):
        return None
    return Masked(passed["grad_output"], norm, forward, passed["threshold"])


def _maker(operand: Any, names: tuple[str, ...]) -> Node | None:
    """The node that made all of ``operand`` as its first write, if it has one of ``names``."""
    node = operand.value.producer if isinstance(operand, Operand) else None
    if node is None or node.name not in names:
        return None
    first = node.returns[0] if node.name == "native_batch_norm" else 0
    write = node.writes[first] if first is not None else None
    return node if write is not None and write.value is operand.value and write.layout == operand.layout else None


def _same_norm(norm: Node, forward: dict[str, Any], backward: dict[str, Any]) -> bool:
    """True where the backward is that of ``norm`` in training, whose statistics were kept in the numbers' own precision."""
    made = [None if index is None else norm.writes[index] for index in norm.returns]
    kept = [backward["save_mean"], backward["save_invstd"]]
    saved = all(write is not None and isinstance(operand, Operand) and write.value is operand.value
                and write.layout.dtype in (torch.float32, torch.float64) for write, operand in zip(made[1:], kept))
    alike = all(forward.get(name) == backward.get(name) for name in ("input", "weight"))
    return forward["training"] is True and saved and alike
