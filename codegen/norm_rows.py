"""Lets copies of a layer norm read their rows' means and deviations instead of reducing rows again. Imports `ir_nodes` and
codegen's lowering modules.

`barriers.passes.recompute` copies a norm to kernels that read its input anyway. What such a copy lacks are two numbers per row,
which the first of them can leave: the rest is elementwise.
"""

from __future__ import annotations

from codegen.inline import Recipe, Recipes
from codegen.instructions import Part
from codegen.lowering import Lowering, arguments
from codegen.normalisation import normalised_by
from codegen.promotion import compute_dtype
from codegen.reductions import operand_of
from ir_nodes.graph import Graph
from ir_nodes.node import Arg, Node, Operand


class Norms:
    """Remembers the first of all layer norms with the same arguments."""

    def __init__(self, graph: Graph, recipes: Recipes) -> None:
        self._graph, self._recipes = graph, recipes
        self._first: dict[tuple[Arg, ...], Node] = {}

    def parts(self, node: Node) -> list[Part]:
        """What a copy becomes; nothing for other nodes. Who reads a copy's means and deviations reads those of the first."""
        if node.name != "native_layer_norm" or len(node.writes) != 3:
            return []
        first = self._first.setdefault(node.args, node)
        numbers = [Operand(write.value, write.layout) for write in first.writes[1:]]
        if first is node or not node.again or not all(map(self._there, numbers)):
            return []
        source = operand_of(arguments(node)["input"])
        if any(number.layout.dtype is not compute_dtype(source.layout.dtype) for number in numbers):
            return []
        for write, number in zip(node.writes[1:], numbers):
            self._recipes[write.value] = Recipe(number, number.layout.dtype)
        return [normalised_by(node, *numbers), *(_stored(node, index, number) for index, number in enumerate(numbers, 1))]

    def _there(self, number: Operand) -> bool:
        """True for what is not overwritten later and fills its memory."""
        return number.layout.covers(number.value.buffer.nbytes) and self._graph.last(number.value.buffer) is number.value


def _stored(node: Node, index: int, number: Operand) -> Part:
    """Leaves ``number`` as a result of ``node``, for whoever cannot read it where it is."""
    lowering = Lowering(node, node.writes[index].layout.size)
    lowering.write(index, lowering.load(number))
    return lowering.part
