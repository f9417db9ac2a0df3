"""A matrix product that is added to another's result is added up where that lies. Imports torch, `rewrite`, `ir_nodes`.

The gradient of what several layers read is a sum of products: of queries, keys and values, of a gate and what it lets through.
The kernel that reads the sum would read each of them. cuBLAS takes about as long to add to what its result's memory holds as to
fill it, so the later product goes onto the earlier one's result, and one tensor is left to read. Where a residual's gradient is
the first addend, the products add up beside it: it may live in registers, and a kernel adds it for nothing.

Each sum is rounded once, where eager mode rounds both the product and the sum: other last bits, so this is for programs that have
accepted such.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ir_nodes import BufferKind, Graph, Layout, Node, Operand, Value, Write
from ir_nodes.node import Arg, Target
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import let_go, read

PRODUCTS, ONTO = ("aten::mm", "aten::mm.out"), "aten::addmm_"
OUT_OF_PLACE, IN_PLACE = ("aten::add.out", "aten::add.Tensor"), "aten::add_.Tensor"
HALF = (torch.bfloat16, torch.float16)
VECTOR = 16
"""Bytes: products of rows that are no multiple of it run in longer ones, which `pad_products` knows for plain products only."""


def sum_products(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let products add up to others' results in place of ops that do. Returns ``graph``, its nodes in their order. Linear in
    nodes."""
    return _Sums(graph, remarks or Remarks()).run()


@dataclass(frozen=True, slots=True)
class Case:
    """Two products that ``nodes`` add up: one op, or that of the first product and ``rest`` and one behind it. ``numbers`` scale
    the products; ``rescaled`` is what remains of the two ops then, as both sides of the last and the number of the second."""

    nodes: tuple[Node, ...]
    first: Node
    second: Node
    numbers: tuple[Arg, Arg]
    rest: Operand | None = None
    rescaled: tuple[Arg, ...] = ()


class _Sums:
    def __init__(self, graph: Graph, remarks: Remarks) -> None:
        self.graph, self.remarks = graph, remarks
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.before: dict[Node, list[Value]] = {}  # what lay where a product has been added up, the oldest first
        self.gone: dict[Node, None] = {}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            products = self._products(node)
            if not products:
                continue
            case = self._case(node, products)
            reason = "what it is added to is no product's result" if case is None else self._why_not(case)
            name = " and ".join([*(one.name for one in (products if case is None else (case.first, case.second))), node.name])
            if case is None or reason:
                self.remarks.refused("product_sums", name, reason)
                continue
            self._regroup(case) if case.rest else self._join(case)
            self.remarks.did("product_sums", name, "the later product adds to what the earlier one has left")
        self.graph.nodes = [node for node in self.graph.nodes if node not in self.gone]
        return self.graph

    def _products(self, node: Node) -> list[Node]:
        """The products whose results ``node`` adds to something."""
        makers = (one.value.producer for one in addends(node))
        return [one for one in makers if one is not None and (one.target in PRODUCTS or one in self.before)]

    def _case(self, node: Node, products: list[Node]) -> Case | None:
        """What two products could add up; None where there is one only."""
        if len(products) == 2:
            first, second = sorted(products, key=self.place.__getitem__)
            number = scale_of(node)
            return Case((node,), first, second, (1, number) if second is products[1] else (number, 1))
        whole, last = addends(node)
        inner, second = whole.value.producer, last.value.producer
        if second is not products[0] or inner is None or node.target not in OUT_OF_PLACE or len(self._products(inner)) != 1:
            return None
        (first,), (left, right), number = self._products(inner), addends(inner), scale_of(inner)
        if right.value.producer is first:
            return Case((inner, node), first, second, (number, scale_of(node)), left, (left, last, 1))
        return Case((inner, node), first, second, (1, scale_of(node)), right, (last, right, number))

    def _why_not(self, case: Case) -> str:
        """Why ops have to add up what the products leave; "": they have not."""
        return why_not(self.graph, case) or (self._why_not_apart(case) if case.rest else self._why_not_there(case))

    def _why_not_there(self, case: Case) -> str:
        """Why the products can't run where they are, in the sum's memory; "": they can."""
        value = case.nodes[-1].writes[0].value
        mine = [*self.before.get(case.first, ()), *(one.writes[0].value for one in (case.first, case.second))]
        older = [one for one in self.graph.values[value.buffer.index] if one.version < value.version and one not in mine]
        if case.second in self.before:
            return "the later product is already added to another"
        if value.buffer.kind is not BufferKind.FRESH or any(one.users or one.producer is not None for one in older):
            return "the sum goes into memory that was there before"
        return ""

    def _why_not_apart(self, case: Case) -> str:
        """Why the products can't add up in the first one's memory, so that the rest is added to that at last; "": they can."""
        assert case.rest is not None
        inner, node = case.nodes
        if case.second in self.before or self.place[case.second] < self.place[case.first]:
            return "the products run in another order than they are added in"
        if inner.writes[0].layout != addends(node)[0].layout:
            return "they differ in shape"
        made = case.first.writes[0].value
        if made.buffer.kind is not BufferKind.FRESH or self._overwritten(made, case) or self._overwritten(case.rest.value, case):
            return "what is added is overwritten before all of it is there"
        return ""

    def _overwritten(self, value: Value, case: Case) -> bool:
        """Is another value than the sums' written over ``value`` before the last of them is there?"""
        sums = [one.writes[0].value for one in case.nodes]
        newer = (one.producer for one in self.graph.values[value.buffer.index] if one.version > value.version and one not in sums)
        return any(one is not None and self.place[one] < self.place[case.nodes[-1]] for one in newer)

    def _join(self, case: Case) -> None:
        """Add the second product to what the first leaves, both in the memory of the sum, which is no op any more."""
        (node,) = case.nodes
        start, product, total = (one.writes[0].value for one in (case.first, case.second, node))
        self._drop(node)
        self.graph.values[product.buffer.index].remove(product)
        older = [*self.before.pop(case.first, ()), start]
        self._move(older, total, 0)
        self._add(case, older, total)

    def _regroup(self, case: Case) -> None:
        """Add the second product to what the first leaves, in the memory of that, and let the last sum add the rest to both."""
        inner, node = case.nodes
        start, product, partial = (one.writes[0].value for one in (case.first, case.second, inner))
        self._drop(inner)
        self.graph.values[partial.buffer.index].remove(partial)
        self._move([product], start, 1)
        self._add(case, [*self.before.pop(case.first, ()), start], product)
        node.args, node.changed = (*case.rescaled, *node.args[3:]), True  # its number is another
        partial.users.clear()
        read(node)

    def _drop(self, node: Node) -> None:
        let_go(node)
        self.gone[node] = None

    def _add(self, case: Case, older: list[Value], total: Value) -> None:
        """Make the second product leave ``total`` over the last of ``older``."""
        product = case.second
        product.args = (Target(0), *product.args[:2], *case.numbers)
        product.target, product.changed, product.returns = ONTO, True, ()
        product.writes = (Write(total, product.writes[0].layout, older[-1], True),)
        older[-1].users[product] = None
        total.producer = product
        self.before[product] = older

    def _move(self, moved: list[Value], other: Value, behind: int) -> None:
        """Make ``moved`` the values of the buffer of ``other`` that come before it, or ``behind`` it."""
        for value in moved:
            self.graph.values[value.buffer.index].remove(value)
            value.buffer = other.buffer
        values = self.graph.values[other.buffer.index]
        at = values.index(other) + behind
        values[at:at] = moved
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


def scale_of(node: Node) -> Arg:
    return node.args[2]


def why_not(graph: Graph, case: Case) -> str:
    """Why the products' layouts and readers keep them apart; "": they do not."""
    first, second = made = [one.writes[0] for one in (case.first, case.second)]
    totals = [one.writes[0] for one in case.nodes]
    parts = [*made, *totals[:-1]]
    if case.first is case.second or any(len(one.value.users) != 1 for one in parts):
        return "somebody else reads a part of the sum"
    if any(graph.holds(one.value) for one in parts):
        return "a part of the sum is held"
    sums = (case.first.segment, None) if case.second.segment is case.first.segment else ()  # sums of gradients belong to none
    stages = {one.stage for one in (case.first, case.second, *case.nodes)}
    if any(one.segment not in sums for one in case.nodes) or len(stages) > 1:
        return "they belong to different segments"
    seen = [(one.value, one.layout) for one in (*made, *totals, *(side for node in case.nodes for side in addends(node)))]
    if any(layout.dtype is not first.layout.dtype for _, layout in seen) or first.layout.dtype not in HALF:
        return "they are not in 16 bits throughout"
    if not all(fills(layout, value) for value, layout in seen if case.rest is None or value is not case.rest.value):
        return "one of them is a part of its memory, or lies there in another order"
    if first.layout.size != second.layout.size or any(one.layout.numel != first.layout.numel for one in totals):
        return "they differ in shape"
    sizes = (*case.first.reads[0].layout.size, *case.second.reads[0].layout.size, first.layout.size[1])
    if any(size * first.layout.itemsize % VECTOR for size in sizes):
        return f"a size is no multiple of {VECTOR} bytes, so that products had better run in longer rows"
    return ""


def fills(layout: Layout, value: Value) -> bool:
    return layout.is_contiguous and not layout.flipped and layout.covers(value.buffer.nbytes)
