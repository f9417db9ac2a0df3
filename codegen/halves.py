"""Lowers ops that cut an operand in halves, and elementwise ones with several results. Imports torch and codegen modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from codegen.activations import LOG_SIGMOID, PRELU_BACKWARD
from codegen.expressions import Row
from codegen.instructions import Part
from codegen.lowering import Lowering, arguments
from codegen.pointwise import element, lower_row
from codegen.reductions import operand_of
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand

_OPEN = "@share({self}, 1.0 + @grow(-{gate}))"
_GLU = Row(_OPEN, "float")
_GLU_FIRST = Row("@share({grad_output}, 1.0 + @grow(-{gate}))", "float")
_GLU_SECOND = Row(f"@share({{grad_output}}, 1.0 + @grow({{gate}})) * {_OPEN}", "float")
"""Half of the gradient each: a sigmoid less than one is the sigmoid of the opposite."""


def lower_log_sigmoid(node: Node) -> list[Part]:
    return _results(node, LOG_SIGMOID)


def lower_prelu_backward(node: Node) -> list[Part]:
    return _results(node, PRELU_BACKWARD)


def _results(node: Node, rows: tuple[Row, ...]) -> list[Part]:
    """One part for each result that has elements."""
    args = arguments(node)
    return [lower_row(node, row, args, index) for index, row in enumerate(rows) if node.writes[index].layout.numel]


def lower_glu(node: Node) -> list[Part]:
    """glu: the first half of a dimension times the sigmoid of the second."""
    args, out = arguments(node), node.writes[0].layout
    lowering = Lowering(node, out.size)
    lowering.write(0, element(lowering, _GLU, _gated(args), out.dtype))
    return [lowering.part]


def lower_glu_backward(node: Node) -> list[Part]:
    """The gradients of both halves, each in its half of the result."""
    args, write = arguments(node), node.writes[0]
    lowering = Lowering(node, operand_of(args["grad_output"]).layout.size)
    for row, place in zip((_GLU_FIRST, _GLU_SECOND), _halves(write.layout, args["dim"])):
        lowering.store(write.value, place, element(lowering, row, _gated(args), write.layout.dtype))
    return [lowering.part]


def _gated(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the halves of ``self`` as ``self`` and ``gate``."""
    source = operand_of(args["self"])
    first, second = (Operand(source.value, half) for half in _halves(source.layout, args["dim"]))
    return {name: arg for name, arg in args.items() if name != "dim"} | {"self": first, "gate": second}


def _halves(layout: Layout, dim: int) -> tuple[Layout, Layout]:
    dim %= len(layout.size)
    count = layout.size[dim] // 2
    first = replace(layout, size=(*layout.size[:dim], count, *layout.size[dim + 1 :]))
    return first, replace(first, offset=first.offset + count * layout.stride[dim])
