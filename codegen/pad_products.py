"""Rounds the sizes of matrix products up, into memory that nobody else looks at. Imports `codegen.pad_rows` and `ir_nodes` only.

Rows that start on 16-byte boundaries are not enough: cuBLAS picks its fast kernels by the sizes themselves. After `pad_rows` has
lengthened the rows of a matrix, and with a few rows more at the end of another, a product of 50,257 columns may compute 50,264.
What it writes too much lies in the padding. Where the sum runs over padding, that is filled with zeros first: memory that nothing
has written may hold NaN, and zero times NaN is NaN. So it is for a library that looks behind rows of its own accord
(`Tuning.overreads`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from codegen.pad_rows import VECTOR, pad_rows
from ir_nodes import BufferKind, Graph, Layout, Node
from ir_nodes.node import Buffer, Operand, Target, Value, Write
from ir_nodes.ops import info
from ir_nodes.remarks import Remarks

FORMS = {"mm": ("mk", "kn", "mn"), "addmm": ("mn", "mk", "kn", "mn")}
"""The dimensions of each tensor of a product, in argument order, its result last."""


@dataclass(slots=True)
class Padding:
    """Room along a dimension of ``stride``: ``size`` elements are used, of ``room``. ``zeros``: what lies behind them, which has
    to be zero before anybody sums over it."""

    size: int
    room: int
    stride: int
    zeros: Layout


@dataclass(slots=True)
class Padder:
    graph: Graph
    rows: dict[Buffer, tuple[int, int]]  # lengthened: (elements used, elements)
    more: dict[Buffer, Padding] = field(default_factory=dict)  # with rows at the end

    def widen(self, node: Node) -> None:
        """Round every size of the product up that can be."""
        tensors = tensors_of(node)
        if not tensors:
            return
        for dim in "mnk":
            held = [(place, form.index(dim)) for place, form in tensors_of(node) if dim in form]
            size = held[0][0].layout.size[held[0][1]]
            step = VECTOR // held[0][0].layout.itemsize
            wanted = -(-size // step) * step
            if wanted == size:
                continue
            paddings = [self.padding(place, axis, wanted) for place, axis in held]
            if any(padding is None for padding in paddings):
                continue
            if dim == "k" and any(len(self.graph.values[place.value.buffer.index]) != 2 for place, _ in held):
                continue
            zeros: dict[tuple[Buffer, Layout], None] = {}  # a matrix times its own transpose needs them once
            for (place, axis), padding in zip(held, paddings):
                assert padding is not None
                self.grow(node, place, axis, padding)
                zeros[place.value.buffer, padding.zeros] = None
            for buffer, layout in zeros if dim == "k" else ():
                self.fill(node, self.graph.values[buffer.index][-1], layout)

    def padding(self, place: Operand | Write, axis: int, wanted: int) -> Padding | None:
        """Room for ``wanted`` elements along ``axis`` that is nobody else's; None where there is none."""
        buffer, layout = place.value.buffer, place.layout
        size, stride = layout.size[axis], layout.stride[axis]
        across = [(n, s) for index, (n, s) in enumerate(zip(layout.size, layout.stride)) if index != axis]
        if buffer.live or buffer.kind is not BufferKind.FRESH or layout.flipped or layout.offset:
            return None
        if stride == 1 and across:
            (count, apart), (used, padded) = across[0], self.rows.get(buffer, (0, 0))
            if size != used or padded != wanted or apart != padded:
                return None
            return Padding(size, wanted, 1, Layout(layout.dtype, (count, padded - used), (padded, 1), used))
        known = self.more.get(buffer)
        whole = buffer.nbytes == size * stride * layout.itemsize and (not across or across[0][1] == 1)
        if known is None and not whole or known is not None and (known.size, known.room, known.stride) != (size, wanted, stride):
            return None
        zeros = Layout(layout.dtype, (wanted - size, stride), (stride, 1), size * stride)  # whole rows, others read more
        return known or Padding(size, wanted, stride, zeros)

    def grow(self, node: Node, place: Operand | Write, axis: int, padding: Padding) -> None:
        layout, buffer = place.layout, place.value.buffer
        size = tuple(padding.room if index == axis else n for index, n in enumerate(layout.size))
        replace_place(node, place, replace(place, layout=replace(layout, size=size)))
        if padding.stride != 1 or len(layout.size) == 1:
            self.more[buffer] = padding
            buffer.nbytes = max(buffer.nbytes, padding.room * padding.stride * layout.itemsize)

    def guard(self, product: Node) -> None:
        """Make what lies behind the rows that ``product`` reads zero, unless it is."""
        for value, dtype in {read.value: read.layout.dtype for read in product.reads if read.value.buffer in self.rows}.items():
            used, padded = self.rows[value.buffer]
            rows, maker = value.buffer.nbytes // (padded * dtype.itemsize), value.producer
            zeros = Layout(dtype, (rows, padded - used), (padded, 1), used)
            if maker is None or maker.name != "zero_" or maker.writes[0].layout != zeros:
                self.fill(product, value, zeros)

    def fill(self, product: Node, old: Value, zeros: Layout) -> None:
        """Make the padding of ``old`` zero before ``product``, and let all that follows read the buffer so."""
        buffer, values = old.buffer, self.graph.values[old.buffer.index]
        self.sum_first(product, old)
        at = self.graph.nodes.index(product)
        node = Node(product.index, "aten::zero_", (Target(0),), (), (), segment=product.segment, stage=product.stage, again=True,
                    relaid=True)
        new = Value(buffer, old.version + 1, node)
        node.writes = (Write(new, zeros, old, False),)
        following = values.index(old) + 1
        for value in values[following:]:
            value.version += 1
        values.insert(following, new)
        self.graph.nodes.insert(at, node)
        later = set(self.graph.nodes[at + 1 :])
        for user in [user for user in old.users if user in later]:
            replace_value(user, old, new)
            del old.users[user]
            new.users[user] = None
        old.users[node] = None

    def sum_first(self, product: Node, value: Value) -> None:
        """Let sums of ``value`` come before ``product``, so that they read it as its maker left it, and may share its kernel."""
        at = self.graph.nodes.index(product)
        there = set(self.graph.nodes[:at])
        for user in [node for node in self.graph.nodes[at + 1 :] if node in value.users and node.stage == product.stage]:
            known = all(read.value.producer is None or read.value.producer in there for read in user.reads)
            fresh = not user.effects and all(write.base is None for write in user.writes)
            if known and fresh and info(user.target).kind == "reduction":
                self.graph.nodes.remove(user)
                self.graph.nodes.insert(at, user)
                at += 1


def pad_products(graph: Graph, remarks: Remarks | None = None, overreads: bool = False) -> dict[Buffer, str]:
    """Give products rows and sizes that suit tensor cores. Returns which odd matrices were left as they are, and why;
    ``remarks`` are told that, and which products are served. ``overreads``: as in `codegen.tuning.Tuning`."""
    rows: dict[Buffer, tuple[int, int]] = {}
    refused = pad_rows(graph, rows)
    padder = Padder(graph, rows)
    for node in [node for node in graph.nodes if node.relaid and node.name in FORMS]:
        padder.widen(node)
    for node in [node for node in graph.nodes if overreads and info(node.target).kind == "matmul"]:
        padder.guard(node)
    if remarks is not None:
        for reason in refused.values():
            remarks.refused("pad_rows", "a matrix with rows off 16-byte boundaries", reason)
        for node in graph.nodes:
            if node.relaid and node.name in FORMS:
                remarks.did("pad_rows", node.name, "its matrices have longer rows, so that they start on 16-byte boundaries")
    return refused


def tensors_of(node: Node) -> list[tuple[Operand | Write, str]]:
    """The tensors of a product that writes where it is told to, with the names of their dimensions; none where two of them are
    one, whose dimensions cannot be told apart (`replace_place`)."""
    tensors = [arg for arg in node.args if isinstance(arg, (Operand, Target))]
    places = [node.writes[arg.index] if isinstance(arg, Target) else arg for arg in tensors]
    forms = FORMS[node.name]
    if len(places) != len(forms) or len(set(places)) != len(places) or not isinstance(places[-1], Write) or places[-1].reads_old:
        return []
    named = [(place, form if len(place.layout.size) == 2 else form[1:]) for place, form in zip(places, forms)]
    return named if all(len(place.layout.size) == len(form) for place, form in named) else []


def replace_place(node: Node, old: Operand | Write, new: Operand | Write) -> None:
    """Put ``new`` where ``node`` names ``old``."""

    def of(item: Any) -> Any:
        return tuple(map(of, item)) if isinstance(item, tuple) else new if item is old or item == old else item

    node.args, node.reads, node.writes = of(node.args), of(node.reads), of(node.writes)
    node.relaid = True


def replace_value(node: Node, old: Value, new: Value) -> None:
    """Make ``node`` read ``new`` in the place of ``old``."""

    def of(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(map(of, item))
        if isinstance(item, Operand) and item.value is old:
            return Operand(new, item.layout)
        return replace(item, base=new) if isinstance(item, Write) and item.base is old else item

    node.args, node.reads, node.writes = of(node.args), of(node.reads), of(node.writes)
