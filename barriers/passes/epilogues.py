"""A matrix product that leaves only what is positive, where nobody needs the rest. Imports `ir_nodes` only.

cuBLAS adds a bias and applies a ReLU to what it holds in registers: a pass over memory less. Rounding and taking what is positive
may change places, so numbers stay those of the two ops. What a ReLU's gradient needs is its result.
"""

from __future__ import annotations

from dataclasses import replace

from ir_nodes import Graph, Node
from ir_nodes.node import Target, Write
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import let_go

PRODUCTS, TOGETHER = ("aten::addmm", "aten::addmm.out"), "aten::_addmm_activation.out"
RELUS = ("aten::relu", "aten::relu_")
VECTOR = 16
"""Bytes: with rows that are no multiple of it cuBLAS leaves a ReLU to a kernel of its own, and `pad_products` helps more."""


def join_relus(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let products with a bias apply the ReLU that is all that reads them. Returns ``graph``. Linear in nodes."""
    gone: dict[Node, None] = {}
    for node in graph.nodes:
        if node.target not in PRODUCTS or len(node.writes[0].value.users) != 1:
            continue
        (relu,) = node.writes[0].value.users
        if relu.target not in RELUS:
            continue
        name, reason = f"{node.name} and {relu.name}", why_not(node, relu)
        if not reason:
            join(graph, node, relu)
            gone[relu] = None
        if remarks is not None and reason:
            remarks.refused("epilogues", name, reason)
        elif remarks is not None:
            remarks.did("epilogues", name, "cuBLAS applies the ReLU to what it has in registers")
    graph.nodes = [node for node in graph.nodes if node not in gone]
    return graph


def why_not(node: Node, relu: Node) -> str:
    """Why the ReLU can't be a part of the product; "": it can."""
    made, read, write = node.writes[0], relu.reads[0] if relu.reads else None, relu.writes[0]
    seen = write.layout if read is None else read.layout
    bias, left, right, *_ = node.args
    if (node.segment, node.stage) != (relu.segment, relu.stage):
        return "they belong to different segments"
    if made.base is not None:
        return "the product fills a part of a tensor"
    inside = write.base is made.value
    if not inside and (write.base is not None or made.value.buffer.live):
        return "the product is held, or its ReLU goes into memory that was there before"
    layouts = (made.layout, seen, write.layout)
    if not all(one.is_contiguous and one.dtype is made.layout.dtype and one.numel == made.layout.numel for one in layouts):
        return "the ReLU reads or leaves another part or layout"
    if len(bias.layout.size) != 1:
        return "the bias is no row"
    sizes = (*left.layout.size, right.layout.size[1])
    if not made.layout.dtype.is_floating_point or any(size * made.layout.itemsize % VECTOR for size in sizes):
        return f"a size is no multiple of {VECTOR} bytes, so that cuBLAS would not apply it"
    return ""


def join(graph: Graph, node: Node, relu: Node) -> None:
    """Make ``node`` leave what ``relu`` does. ``relu`` stays in the graph's list."""
    made, write = node.writes[0], relu.writes[0]
    let_go(relu)
    graph.values[made.value.buffer.index].remove(made.value)
    write.value.producer = node
    node.target, node.changed, node.returns = TOGETHER, True, ()
    node.writes = (Write(write.value, replace(made.layout, offset=write.layout.offset), None, False),)
    node.args = (*node.args[:5], False, Target(0))
