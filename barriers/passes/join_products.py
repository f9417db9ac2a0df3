"""Products of one matrix by several run as one, whose results are its columns. Imports `epilogues`, `parts`, `product_sums`,
`ir_nodes`.

Queries, keys and values come of one input by three weights. One product by all three reads the input once and fills a GPU where
each alone leaves a part of it idle, as long as the weights lie side by side: autocast writes a copy of each in 16 bits, and may
as well write them so. Each number is the sum that it was, but cuBLAS may add it up in another order, so this is for programs that
have accepted other last bits. `join_gradients` does the same for what follows in backward.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from barriers.passes.epilogues import PRODUCTS as BIASED
from barriers.passes.parts import behind, forget, lie_beside, move, new_node, places_of, together, why_not_moved
from barriers.passes.product_sums import HALF, PRODUCTS, VECTOR
from ir_nodes import Graph, Layout, Node, Operand
from ir_nodes.remarks import Remarks

CAST = "aten::copy_"


@dataclass(frozen=True, slots=True)
class Product:
    """``node`` makes [rows, columns] of ``left`` and the transposed ``weight``, and adds a ``bias`` if there is one."""

    node: Node
    left: Operand
    weight: Operand
    bias: Operand | None

    @property
    def columns(self) -> int:
        return self.weight.layout.size[0]


def join_products(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let products that share their first factor run as one. Returns ``graph``. Linear in nodes."""
    return _Joiner(graph, remarks or Remarks()).run()


class _Joiner:
    def __init__(self, graph: Graph, remarks: Remarks) -> None:
        self.graph, self.remarks = graph, remarks
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.before: dict[Node, list[Node]] = {}  # what is to stand where the first of several products stood
        self.gone: dict[Node, None] = {}  # from where it stood

    def run(self) -> Graph:
        alike: dict[Hashable, list[Node]] = {}
        for node in self.graph.nodes:
            product = product_of(node)
            if product is not None:
                key = (product.left.value, product.left.layout, product.bias is None, node.segment, node.stage)
                alike.setdefault(key, []).append(node)
        for nodes in alike.values():
            if len(nodes) > 1:
                self._consider([product for product in map(product_of, nodes) if product is not None])
        self.graph.nodes = [one for node in self.graph.nodes
                            for one in (*self.before.get(node, ()), *(() if node in self.gone else (node,)))]
        return self.graph

    def _consider(self, products: list[Product]) -> None:
        name = " and ".join(product.node.name for product in products)
        reason = self._why_not(products)
        if reason:
            self.remarks.refused("join_products", name, reason)
        else:
            self._join(products)
            self.remarks.did("join_products", name, "one product by matrices that are written side by side")

    def _why_not(self, products: list[Product]) -> str:
        """Why the products can't be one; "": they can."""
        sizes = (*products[0].left.layout.size, *(product.columns for product in products))
        if any(size * products[0].left.layout.itemsize % VECTOR for size in sizes):
            return f"a size is no multiple of {VECTOR} bytes, so that products had better run in longer rows"
        for product, place in zip(products, places_of([one.columns for one in products])):
            reason = why_not_moved(self.graph, product.node.writes[0], place)
            if reason:
                return reason
        first = products[0].node
        return (self._why_not_beside([product.weight for product in products], first)
                or self._why_not_beside([product.bias for product in products if product.bias is not None], first))

    def _why_not_beside(self, operands: list[Operand], first: Node) -> str:
        """Why ``operands`` can't lie side by side where ``first`` runs; "": they can, or do."""
        if lie_beside(operands):
            return ""
        if len({operand.value for operand in operands}) < len(operands):
            return "a matrix or a bias is that of several products"
        return next((why for operand in operands if (why := self._why_not_written(operand, first))), "")

    def _why_not_written(self, operand: Operand, first: Node) -> str:
        """Why ``operand`` can't be written side by side with others before ``first``."""
        value, place = operand.value, self.place[first]
        cast = value.producer
        if cast is None or cast.target != CAST or cast not in self.place:
            return "the matrices are no copies, which could be written side by side, but the program's own"
        if operand.layout.nbytes != value.buffer.nbytes or why_not_moved(self.graph, cast.writes[0], behind(0)):
            return "a copy of a matrix is held, or a part of something else"
        if (cast.segment, cast.stage) != (first.segment, first.stage) or cast.again:
            return "a matrix is copied in another part of the program"
        if any(self.place.get(user, place) < place for user in value.users):
            return "somebody reads a copy of a matrix before the first of the products"
        makers = [one.producer for one in cast.inputs()]
        late = [one for one in makers if one is not None and self.place.get(one, place) >= place]
        return "what a matrix is copied from is made after the first of the products" if self.place[cast] > place and late else ""

    def _join(self, products: list[Product]) -> None:
        first = products[0].node
        self.before[first] = before = []
        weight = self._beside(before, first, [product.weight for product in products])
        biases = [product.bias for product in products if product.bias is not None]
        bias = [self._beside(before, first, biases)] if biases else []
        (columns, inner), rows = weight.layout.size, products[0].left.layout.size[0]
        factors = (products[0].left, Operand(weight.value, replace(weight.layout, size=(inner, columns), stride=(1, inner))))
        layout = Layout.contiguous(first.writes[0].layout.dtype, (rows, columns))
        target, numbers = (BIASED[-1], (1, 1)) if bias else (PRODUCTS[-1], ())
        joint = new_node(self.graph, first, target, (*bias, *factors, *numbers), layout)
        before.append(joint)
        for product, place in zip(products, places_of([one.columns for one in products])):
            move(product.node.writes[0].value, joint.writes[0].value, place)
            forget(self.graph, product.node)
            self.gone[product.node] = None

    def _beside(self, before: list[Node], first: Node, parts: list[Operand]) -> Operand:
        """``parts`` one after the other along their first dimension, where they are if they lie so, else in a tensor that is made
        ``before`` the node ``first``; whoever reads one of them reads it there."""
        whole = together(parts)
        if lie_beside(parts):
            return whole
        for cast in (part.value.producer for part in parts):
            if cast is not None and self.place[cast] > self.place[first]:
                before.append(cast)
                self.gone[cast] = None
        layout = replace(whole.layout, offset=0)
        made = new_node(self.graph, first, "aten::cat.out", (tuple(parts), 0), layout)
        before.append(made)
        start = 0
        for part in parts:
            move(part.value, made.writes[0].value, behind(start), but=made)
            start += part.layout.numel
        return Operand(made.writes[0].value, layout)


def product_of(node: Node) -> Product | None:
    """``node`` as a product by a transposed matrix, to which a bias may be added, and which nothing scales."""
    if node.target not in (*PRODUCTS, *BIASED) or node.again:
        return None
    *added, left, right = node.args[: 3 if node.target in BIASED else 2]
    layout, (inner, columns) = right.layout, right.layout.size
    if layout.dtype not in HALF or layout.flipped or not layout.alike(replace(layout, stride=(1, inner))):
        return None
    bias = added[0] if added else None
    if bias is not None and (bias.layout.size != (columns,) or not bias.layout.is_contiguous or node.args[3:5] != (1, 1)):
        return None
    weight = replace(layout, size=(columns, inner), stride=(inner, 1))
    return Product(node, left, Operand(right.value, weight), bias) if node.writes[0].layout.is_contiguous else None
