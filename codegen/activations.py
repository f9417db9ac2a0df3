"""The table's rows for activations beside the usual ones, and for their derivatives. Imports `codegen.expressions` only.

Semantics follow ATen's CUDA kernels: what holds at a bend, and where an element is no number, is theirs.
"""

from __future__ import annotations

from codegen.expressions import Case, Row, sigmoid

_DECAY = "@grow(-tl.abs({self}))"
_SHARE = f"@share({_DECAY}, 1.0 + {_DECAY})"
_BENT = "@tanh(@log1p(@exp({self})))"
_INSIDE = "({self} >= -{lambd}) & ({self} <= {lambd})"


def _mish_backward(case: Case) -> str:
    return f"{{grad_output}} * ({_BENT} + {{self}} * ({sigmoid(case)}) * (1.0 - {_BENT} * {_BENT}))"


def _logit(case: Case) -> str:
    kept = "{self}"
    if case.given("eps"):
        low = "tl.where({self} < {eps}, {eps}, {self})"
        kept = f"tl.where({low} > 1.0 - {{eps}}, 1.0 - {{eps}}, {low})"
    return f"@log(@div({kept}, 1.0 - {kept}))"


def _logit_backward(case: Case) -> str:
    slope = "@div({grad_output}, {self} * (1.0 - {self}))"
    if case.given("eps"):
        return f"tl.where(({{self}} < {{eps}}) | ({{self}} > 1.0 - {{eps}}), 0.0, {slope})"
    return f'tl.where(({{self}} < 0) | ({{self}} > 1), float("nan"), {slope})'


ACTIVATIONS: dict[str, Row] = {
    "log_sigmoid_backward": Row(f"{{grad_output}} * tl.where({{self}} < 0, 1.0 - {_SHARE}, {_SHARE})", typed=("buffer:float32",)),
    "mish_backward": Row(_mish_backward),
    "hardswish_backward": Row("tl.where({self} <= -3, 0.0, tl.where({self} >= 3, {grad_output}, "
                              "{grad_output} * ({self} * 0.3333333333333333 + 0.5)))"),
    "hardsigmoid_backward": Row("tl.where(({self} > -3) & ({self} < 3), {grad_output} * 0.16666666666666666, 0.0)"),
    "softshrink": Row("tl.where({self} > {lambd}, {self} - {lambd}, tl.where({self} < -{lambd}, {self} + {lambd}, {self} * 0))"),
    "softshrink_backward": Row(f"tl.where({_INSIDE}, 0.0, {{grad_output}})"),
    "hardshrink": Row(f"tl.where({_INSIDE}, {{self}} * 0, {{self}})"),
    "hardshrink_backward": Row(f"tl.where({_INSIDE}, 0.0, {{grad_out}})"),
    "_prelu_kernel": Row("tl.where({self} > 0, {self}, {weight} * {self})"),
    "logit": Row(_logit, "float"),
    "logit_backward": Row(_logit_backward),
}
"""Keyed as `codegen.expressions.ROWS`."""

LOG_SIGMOID = (Row(f"tl.where({{self}} < 0, {{self}}, 0.0) - @log1p({_DECAY})"), Row(_DECAY))
"""Both results of log_sigmoid_forward, the second of which is empty on a GPU."""

PRELU_BACKWARD = (
    Row("tl.where({self} > 0, {grad_output}, {weight} * {grad_output})"),
    Row("tl.where({self} > 0, 0.0, {self} * {grad_output})"),
)
"""Both results of _prelu_kernel_backward: the gradients of what it was given, and of each element's slope."""
