"""Turns a node back into a call of its op. Imports torch, `ir_nodes.node` and `ir_nodes.ops` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch

from ir_nodes import ops
from ir_nodes.node import Arg, Node, Operand, ScalarInput, Target, Write


@dataclass(frozen=True, slots=True)
class Fill:
    """What stands for each part of a node's arguments: a tensor for a read and for a written argument, a number for a number."""

    operand: Callable[[Operand], Any]
    target: Callable[[Write], Any]
    scalar: Callable[[ScalarInput], Any]
    device: torch.device | None


def arguments(node: Node, fill: Fill) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments for `ops.overload(node.target)`.

    Device arguments become ``fill.device``; ``generator`` and ``pin_memory`` become None. Raises ValueError where the node
    has more arguments than the schema.
    """
    schema = ops.schema(node.target)
    if len(node.args) > len(schema.arguments):
        raise ValueError(f"{node.target} takes {len(schema.arguments)} arguments, the node holds {len(node.args)}")
    positional: list[Any] = []
    keyword: dict[str, Any] = {}
    for spec, arg in zip(schema.arguments, node.args):
        kind = str(spec.type)
        if "Device" in kind:
            value = fill.device
        elif "Generator" in kind or spec.name == "pin_memory":
            value = None
        else:
            value = _fill(node, arg, fill)
        if spec.kwarg_only:
            keyword[spec.name] = value
        else:
            positional.append(value)
    return positional, keyword


def new_results(node: Node, result: Any) -> list[Any]:
    """What ``result`` of the op newly returns, flat: one entry for each of ``node.returns``.

    Left out are sizes, and tensors that the op was given to write to and hands back. Raises ValueError where the count differs.
    """
    specs = ops.schema(node.target).returns
    results = (result,) if len(specs) == 1 else tuple(result or ())
    found: list[Any] = []
    for spec, item in zip(specs, results):
        if str(spec.type) != "int" and (spec.alias_info is None or not spec.alias_info.is_write):
            found.extend(item if isinstance(item, (list, tuple)) else (item,))
    if len(found) != len(node.returns):
        raise ValueError(f"{node.target} returns {len(found)} new results, the node names {len(node.returns)}")
    return found


def _fill(node: Node, arg: Arg, fill: Fill) -> Any:
    if isinstance(arg, tuple):
        return [_fill(node, item, fill) for item in arg]
    if isinstance(arg, Operand):
        return fill.operand(arg)
    if isinstance(arg, Target):
        return fill.target(node.writes[arg.index])
    if isinstance(arg, ScalarInput):
        return fill.scalar(arg)
    return arg
