"""A node as calls of functional ops, for compilers that know no writes to memory. Imports torch, `ir_nodes` and
`codegen.functional_rows` only."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

from codegen.functional_rows import ELEMENTWISE, NoFunctionalForm, Number, constant, elementwise, foreach
from ir_nodes import ops
from ir_nodes.node import Arg, Node, Operand, ScalarInput, Target, Write

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Reader:
    """``operand``: the tensor read; ``old``: what a written argument held before, seen through its layout."""

    operand: Callable[[Operand], Tensor]
    old: Callable[[Write], Tensor]
    number: Callable[[ScalarInput], Number]
    device: torch.device


def call(node: Node, reader: Reader) -> list[Tensor | None]:
    """What ``node`` leaves in each of its writes. Raises NoFunctionalForm."""
    space, name, _ = ops.split(node.target)
    if space != "aten":
        raise NoFunctionalForm(f"{node.target} is not PyTorch's own")
    _refuse_shared_memory(node)
    base = name if name.startswith("__") else name.removesuffix("_")
    named = _named_arguments(node, reader)
    if base.startswith("_foreach_"):
        results: list[Any] = foreach(node, base.removeprefix("_foreach_"), named)
    elif base in _WHOLE:
        results = _WHOLE[base](node, named, reader.device)
    else:
        results = _single(node, base, named, reader.device)
    return [_fit(result, write) for result, write in zip(results, node.writes, strict=True)]


def _refuse_shared_memory(node: Node) -> None:
    """An op over a list goes from element to element: a later one sees what an earlier one has written."""
    written = [write.value.buffer for write in node.writes]
    read = {operand.value.buffer for operand in node.reads} if len(written) > 1 else set()
    if len(set(written)) != len(written) or any(buffer in read for buffer in written):
        raise NoFunctionalForm("tensors of its lists share memory")


def _named_arguments(node: Node, reader: Reader) -> dict[str, Any]:
    schema = ops.schema(node.target)

    def fill(arg: Arg) -> Any:
        if isinstance(arg, tuple):
            return [fill(item) for item in arg]
        if isinstance(arg, Operand):
            return reader.operand(arg)
        if isinstance(arg, Target):
            return _Old(node.writes[arg.index], reader)
        return reader.number(arg) if isinstance(arg, ScalarInput) else arg

    named = {spec.name: fill(arg) for spec, arg in zip(schema.arguments, node.args)}
    for position, spec in enumerate(schema.arguments):
        if position < len(node.args) and ops.written_mode(node.target, position) == "w":
            named.pop(spec.name, None)
    return {name: _resolve(value) for name, value in named.items()}


@dataclass(frozen=True, slots=True)
class _Old:
    write: Write
    reader: Reader


def _resolve(value: Any) -> Any:
    if isinstance(value, list):
        return [_resolve(item) for item in value]
    return value.reader.old(value.write) if isinstance(value, _Old) else value


def _fit(result: Tensor | None, write: Write) -> Tensor | None:
    """``result`` with the recorded dtype and size."""
    if result is None:
        return None
    layout = write.layout
    if result.dtype is not layout.dtype:
        result = result.to(layout.dtype)
    return result if tuple(result.shape) == layout.size else result.expand(layout.size)


# ---- one op over tensors ----------------------------------------------------------------------------------------------


def _single(node: Node, base: str, named: dict[str, Any], device: torch.device) -> list[Any]:
    row = ELEMENTWISE.get(base)
    if row is not None and any(isinstance(value, Number) for value in named.values()):
        return [elementwise(base, row, named)]
    return _overload(node, base, named, device)


def _overload(node: Node, base: str, named: dict[str, Any], device: torch.device) -> list[Any]:
    function = functional_overload(node.target)
    arguments: dict[str, Any] = {}
    for spec in function._schema.arguments:
        if spec.name == "device":
            arguments[spec.name] = device
        elif spec.name == "dtype" and spec.name not in named and node.writes:
            arguments[spec.name] = node.writes[0].layout.dtype
        elif spec.name in named and spec.name not in ("generator", "pin_memory", "layout"):
            arguments[spec.name] = constant(named[spec.name])
    result = function(**arguments)
    found: list[Any] = []
    for item in result if isinstance(result, (list, tuple)) else [result]:
        found.extend(item) if isinstance(item, (list, tuple)) else found.append(item)
    if len(found) == len(node.writes):
        return found
    if len(found) == len(node.returns):  # some results are undefined
        return [item for item, index in zip(found, node.returns) if index is not None]
    raise NoFunctionalForm(f"{node.target} returns {len(found)} tensors, {len(node.writes)} were recorded")




def _constants(named: dict[str, Any]) -> dict[str, Any]:
    return {name: constant(value) for name, value in named.items()}


@functools.cache
def functional_overload(target: str) -> torch._ops.OpOverload:
    """The overload that returns what ``target`` writes. Raises NoFunctionalForm."""
    schema = ops.schema(target)
    if not schema.is_mutable:
        return ops.overload(target)
    written = [arg for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    if ops.info(target).hidden_writes or any(not arg.kwarg_only and not arg.is_out for arg in written[1:]):
        raise NoFunctionalForm(f"{target} has no functional form")
    wanted = [(arg.name, str(arg.type)) for arg in schema.arguments if not arg.is_out and arg not in written or _in_place(arg)]
    _, name, _ = ops.split(target)
    for packet in dict.fromkeys((name.removesuffix("_"), name)):
        found = getattr(_aten, packet, None)
        for over in found.overloads() if found is not None else ():
            candidate = getattr(found, over)
            given = candidate._schema.arguments
            names = [(arg.name, str(arg.type)) for arg in given]
            extra = [arg for arg in given if (arg.name, str(arg.type)) not in wanted]
            fits = all(one in names for one in wanted) and all(_may_be_left_out(arg) for arg in extra)
            if fits and not candidate._schema.is_mutable:
                return candidate
    raise NoFunctionalForm(f"{target} has no functional form")


def _in_place(arg: torch._C.Argument) -> bool:
    return arg.alias_info is not None and arg.alias_info.is_write and not arg.kwarg_only and not arg.is_out


def _may_be_left_out(arg: torch._C.Argument) -> bool:
    return bool(arg.has_default_value()) or arg.name in ("dtype", "device")


# ---- ops with rows of their own ------------------------------------------------------------------------------------------


def _filled(node: Node, value: Any, device: torch.device) -> list[Any]:
    layout = node.writes[0].layout
    if isinstance(value, Number):
        if value.kind in ("float", "double", "int"):
            return [value.tensor(layout.dtype).expand(layout.size)]
        value = value.constant()
    if isinstance(value, Tensor):
        return [value.to(layout.dtype).expand(layout.size)]
    return [torch.full(layout.size, value, dtype=layout.dtype, device=device)]


def _batch_norm(node: Node, named: dict[str, Any], device: torch.device) -> list[Any]:
    constant = _constants(named)
    given = [constant[name] for name in ("input", "weight", "bias", "running_mean", "running_var")]
    if not constant["training"] or constant["running_mean"] is None:
        raise NoFunctionalForm("batch norm that leaves its running statistics as they are")
    out = _aten._native_batch_norm_legit_functional.default(*given, True, constant["momentum"], constant["eps"])
    return [out[3], out[4], *out[:3]]


# Ops whose functional form goes by another name, or that say all of their result.
_WHOLE: dict[str, Callable[[Node, dict[str, Any], torch.device], list[Any]]] = {
    "native_batch_norm": _batch_norm,
    "copy": lambda node, named, device: [named["src"]],
    "_to_copy": lambda node, named, device: [named["self"].clone()],
    "convolution_overrideable": lambda node, named, device: [_aten.convolution.default(**_constants(named))],
    "fill": lambda node, named, device: _filled(node, named["value"], device),
    "full": lambda node, named, device: _filled(node, named["fill_value"], device),
    "full_like": lambda node, named, device: _filled(node, named["fill_value"], device),
    "new_full": lambda node, named, device: _filled(node, named["fill_value"], device),
    "scalar_tensor": lambda node, named, device: _filled(node, named["s"], device),
} | {name: lambda node, named, device: _filled(node, 0, device) for name in ("zero", "zeros", "zeros_like", "new_zeros")} | {
    name: lambda node, named, device: _filled(node, 1, device) for name in ("ones", "ones_like", "new_ones")
}
