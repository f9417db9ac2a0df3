"""Functional forms of ops with numbers among their arguments, one tensor at a time or over lists. Imports torch and
`ir_nodes` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from ir_nodes.node import Node

_aten = torch.ops.aten


class NoFunctionalForm(ValueError):
    """A node that cannot be said without writing to memory, or not with these arguments. The text says why."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is an input of the graph. ``tensor(dtype)`` keeps it one; ``constant()`` takes the value that it has now."""

    kind: str
    tensor: Callable[[torch.dtype], Tensor]
    constant: Callable[[], Any]

    @property
    def sample(self) -> Any:
        """Something that promotes dtypes as it does."""
        if self.kind == "double":
            return torch.empty((), dtype=torch.float64, device="meta")
        return 1.0 if self.kind == "float" else 1


def constant(value: Any) -> Any:
    if isinstance(value, list):
        return [constant(item) for item in value]
    return value.constant() if isinstance(value, Number) else value


_NOT_PROMOTED = ("mask", "condition", "rounding_mode")


def _lerp(self: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    near, far = self + weight * (end - self), end - (end - self) * (1 - weight)
    return torch.where(weight.abs() < 0.5, near, far)


def _clamp(self: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    low = self if min is None else torch.maximum(self, min)
    return low if max is None else torch.minimum(low, max)


# Where a number is an argument: the op over tensors, named as its schema names them.
ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "add": lambda self, other, alpha=None: self + (other if alpha is None else other * alpha),
    "sub": lambda self, other, alpha=None: self - (other if alpha is None else other * alpha),
    "rsub": lambda self, other, alpha=None: other - (self if alpha is None else self * alpha),
    "mul": lambda self, other: self * other,
    "div": lambda self, other, rounding_mode=None: torch.div(self, other, rounding_mode=rounding_mode),
    "addcmul": lambda self, tensor1, tensor2, value=None: self + (tensor1 if value is None else value * tensor1) * tensor2,
    "addcdiv": lambda self, tensor1, tensor2, value=None: self + (tensor1 if value is None else value * tensor1) / tensor2,
    "lerp": _lerp,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "eq": lambda self, other: self == other,
    "ne": lambda self, other: self != other,
    "lt": lambda self, other: self < other,
    "le": lambda self, other: self <= other,
    "gt": lambda self, other: self > other,
    "ge": lambda self, other: self >= other,
    "remainder": lambda self, other: torch.remainder(self, other),
    "fmod": lambda self, other: torch.fmod(self, other),
    "masked_fill": lambda self, mask, value: torch.where(mask, value, self),
    "where": lambda condition, self, other: torch.where(condition, self, other),
}


def elementwise(base: str, row: Callable[..., Tensor], named: dict[str, Any]) -> Tensor:
    """``row`` in the dtype in which the op computes, so that numbers keep their precision beside 16-bit tensors."""
    named = {name: value for name, value in named.items() if value is not None}
    for name in ("alpha", "value"):
        if name in named and isinstance(named[name], Number) and named[name].kind not in ("float", "double"):
            named[name] = named[name].constant()
        if base in ("add", "sub", "rsub", "addcmul", "addcdiv") and _is_one(named.get(name)):
            named.pop(name)
    weighed = [value for name, value in named.items() if name not in _NOT_PROMOTED and isinstance(value, (Tensor, Number))]
    samples = [value.sample if isinstance(value, Number) else value for value in weighed]
    kind = PROMOTION.INT_TO_FLOAT if base == "div" and "rounding_mode" not in named else PROMOTION.DEFAULT
    compute, result = elementwise_dtypes(*samples, type_promotion_kind=kind)

    def cast(name: str, value: Any) -> Any:
        if isinstance(value, Number):
            return value.tensor(compute) if value.kind in ("float", "double", "int") else value.constant()
        return value.to(compute) if isinstance(value, Tensor) and name not in _NOT_PROMOTED else value

    found = row(**{name: cast(name, value) for name, value in named.items()})
    return found if found.dtype is torch.bool else found.to(result)


def _is_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 1


# ---- lists of tensors ------------------------------------------------------------------------------------------------------

_NUMBER_NAMES = {"addcmul": "value", "addcdiv": "value", "lerp": "weight", "clamp_max": "max", "clamp_min": "min"}
_RENAMED = {"tensors1": "end", "weights": "weight", "src": "other"}


def foreach(node: Node, name: str, named: dict[str, Any]) -> list[Any]:
    """Element by element, so that an optimizer's whole update of a parameter is one loop."""
    lists = dict(named)
    single = {"maximum": "clamp_min", "minimum": "clamp_max"}.get(name, name)
    return [_element(node, single, lists, index) for index in range(len(node.writes))]


def _element(node: Node, name: str, lists: dict[str, Any], index: int) -> Any:
    arguments: dict[str, Any] = {}
    for given, arg in lists.items():
        if given == "scalars" and isinstance(arg, Tensor):
            arg = [arg[position] for position in range(len(node.writes))]
        number = given in ("scalar", "scalars") or name.startswith("clamp") and given == "other"
        renamed = _NUMBER_NAMES.get(name, "other") if number else _RENAMED.get(given, given)
        arguments[renamed] = arg[index] if isinstance(arg, list) else arg
    if name == "copy":
        return arguments["other"]
    if name == "zero":
        return torch.zeros_like(arguments["self"])
    if name == "pow":
        return _power(**arguments)
    row = ELEMENTWISE.get(name)
    if row is not None:
        return elementwise(name, row, arguments)
    if list(arguments) == ["self"] and name in _UNARY:
        return getattr(_aten, name).default(arguments["self"])
    raise NoFunctionalForm(f"no functional form of {node.target}")


def _power(self: Any, exponent: Any = None, other: Any = None) -> Tensor:
    """An exponent that is a number chooses a formula: a constant. A base that is one stays a number."""
    exponent = constant(exponent if other is None else other)
    return torch.pow(self.tensor(exponent.dtype) if isinstance(self, Number) else self, exponent)


_UNARY = frozenset(
    """
    abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt sigmoid
    sign sin sinh sqrt tan tanh trunc
    """.split()
)
