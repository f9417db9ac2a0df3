"""A matrix product that is added to another's result is added up where that lies. Imports torch and `ir_nodes` only.

The gradient of what several layers read is a sum of products: of queries, keys and values, of a gate and what it lets through.
The kernel that reads the sum would read each of them. cuBLAS takes about as long to add to what its result's memory holds as to
fill it, so the later product goes onto the earlier one's result, and one tensor is left to read.

Each sum is rounded once, where eager mode rounds both the product and the sum: other last bits, so this is for programs that have
accepted such. The core calls recorded ops only, so Python calls what stands for two: once, where a CUDA graph captures it.
"""

from __future__ import annotations

import torch

from ir_nodes import BufferKind, Graph, Layout, Node, Operand, Value, Write
from ir_nodes.node import Target
from ir_nodes.remarks import Remarks

PRODUCTS, ONTO = ("aten::mm", "aten::mm.out"), "aten::addmm_"
OUT_OF_PLACE, IN_PLACE = ("aten::add.out", "aten::add.Tensor"), "aten::add_.Tensor"
HALF = (torch.bfloat16, torch.float16)
VECTOR = 16
"""Bytes: products of rows that are no multiple of it run in longer ones, which `pad_products` knows for plain products only."""


def sum_products(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let products add up to others' results in place of ops that do. Returns ``graph``, its nodes in their order. Linear in
    nodes."""
    return _Sums(graph, remarks or Remarks()).run()


class _Sums:
    def __init__(self, graph: Graph, remarks: Remarks) -> None:
        self.graph, self.remarks = graph, remarks
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.before: dict[Node, list[Value]] = {}  # what lay where a product has been added up, the oldest first

    def run(self) -> Graph:
        gone: dict[Node, None] = {}
        for node in self.graph.nodes:
            added = addends(node)
            makers = [one.value.producer for one in added if one.value.producer is not None]
            products = sorted((one for one in makers if one.target in PRODUCTS or one in self.before), key=self.place.__getitem__)
            if not products:
                continue
            name = " and ".join([*(one.name for one in products), node.name])
            reason = self._why_not(node, products)
            if reason:
                self.remarks.refused("product_sums", name, reason)
                continue
            first, second = products
            self._join(node, first, second, scales_second=added[1].value is second.writes[0].value)
            gone[node] = None
            self.remarks.did("product_sums", name, "the later product adds to what the earlier one has left")
        self.graph.nodes = [node for node in self.graph.nodes if node not in gone]
        return self.graph

    def _why_not(self, node: Node, products: list[Node]) -> str:
        """Why ``node``, which adds what ``products`` leave, in their order, stays; "": it need not."""
        if len(products) < 2:
            return "what it is added to is no product's result"
        first, second = products
        return why_not(self.graph, node, first, second) or self._why_not_there(node, first, second)

    def _why_not_there(self, node: Node, first: Node, second: Node) -> str:
        """Why the products can't run where they are, in the sum's memory; "": they can."""
        if second in self.before:
            return "the later product is already added to another"
        value = node.writes[0].value
        mine = [*self.before.get(first, ()), *(one.writes[0].value for one in (first, second))]
        older = [one for one in self.graph.values[value.buffer.index] if one.version < value.version and one not in mine]
        if value.buffer.kind is not BufferKind.FRESH or any(one.users or one.producer is not None for one in older):
            return "the sum goes into memory that was there before"
        return ""

    def _join(self, node: Node, first: Node, second: Node, scales_second: bool) -> None:
        """Add ``second`` to what ``first`` leaves, both in the memory of what ``node`` does, which stays in the graph's list."""
        total, start, product = (one.writes[0] for one in (node, first, second))
        for value in dict.fromkeys(node.inputs()):
            value.users.pop(node)
        older = [*self.before.pop(first, ()), start.value]
        self.graph.values[product.value.buffer.index].remove(product.value)
        self._move(older, total.value)
        left, right, *_ = second.args
        number = node.args[2]
        second.args = (Target(0), left, right, *((1, number) if scales_second else (number, 1)))
        second.target, second.changed, second.returns = ONTO, True, ()
        second.writes = (Write(total.value, product.layout, start.value, True),)
        start.value.users[second] = None
        total.value.producer = second
        self.before[second] = older

    def _move(self, older: list[Value], newer: Value) -> None:
        """Make ``older`` the values of the buffer of ``newer`` that come before it."""
        for value in older:
            self.graph.values[value.buffer.index].remove(value)
            value.buffer = newer.buffer
        values = self.graph.values[newer.buffer.index]
        at = values.index(newer)
        values[at:at] = older
        for version, value in enumerate(values):
            value.version = version


def addends(node: Node) -> tuple[Operand, ...]:
    """The two tensors that ``node`` adds, the one that its number scales last; none where it does not."""
    if node.target in OUT_OF_PLACE:
        both = node.args[:2]
    elif node.target == IN_PLACE and node.writes[0].base is not None:
        both = (Operand(node.writes[0].base, node.writes[0].layout), node.args[1])
    else:
        return ()
    return both if all(isinstance(one, Operand) for one in both) else ()


def why_not(graph: Graph, node: Node, first: Node, second: Node) -> str:
    """Why ``node`` has to add what the two products leave; "": it has not."""
    total, *made = (one.writes[0] for one in (node, first, second))
    if first is second or any(len(one.value.users) != 1 for one in made):
        return "somebody else reads a product's result"
    if any(one.value.buffer.live and graph.last(one.value.buffer) is one.value for one in made):
        return "a product's result is held"
    sums = (first.segment, None) if second.segment is first.segment else ()  # sums of gradients belong to none
    if node.segment not in sums or len({one.stage for one in (node, first, second)}) > 1:
        return "they belong to different segments"
    seen = [(one.value, one.layout) for one in (*addends(node), *made, total)]
    if any(layout.dtype is not total.layout.dtype for _, layout in seen) or total.layout.dtype not in HALF:
        return "they are not in 16 bits throughout"
    if not all(fills(layout, value) for value, layout in seen):
        return "one of them is a part of its memory, or lies there in another order"
    if made[0].layout.size != made[1].layout.size or total.layout.numel != made[0].layout.numel:
        return "they differ in shape"
    sizes = (*first.reads[0].layout.size, *second.reads[0].layout.size, made[0].layout.size[1])
    if any(size * total.layout.itemsize % VECTOR for size in sizes):
        return f"a size is no multiple of {VECTOR} bytes, so that products had better run in longer rows"
    return ""


def fills(layout: Layout, value: Value) -> bool:
    return layout.is_contiguous and not layout.flipped and layout.covers(value.buffer.nbytes)
