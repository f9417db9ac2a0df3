"""A matrix product in float32 of few results leaves its bias to a kernel. Imports torch, `barriers.passes.parts`, `ir_nodes`.

Eager mode has cuBLASLt add a row to what it holds in registers. Where results are so few that summands have to be shared between
programs for the machine to be busy, it finds slow kernels for that, as far as it computes in float32 itself: TF32 and 16 bits
have good ones. On an H200, us with the bias, and with a kernel behind the product that adds it: 256 x 23 times 23 x 256 13.4 and
4.6; 32 x 64 times 64 x 256 13.3 and 5.3; 256 x 3,072 times 3,072 x 768 83 and 39, but 256 x 64 times 64 x 256 3.7 and 5.3. The
addition becomes an op of its own, which shares a kernel with what reads it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from barriers.passes.parts import new_node
from ir_nodes import Graph, Node, Operand
from ir_nodes.node import Target
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import let_go, read

PRODUCTS, PLAIN, SUM = ("aten::addmm", "aten::addmm.out"), "aten::mm.out", "aten::add.out"
FEW, FEW_APART, FEW_OF_MANY, MANY = 1 << 15, 1 << 16, 1 << 20, 768
"""Results that are few whatever is summed, where rows are no multiple of `VECTOR` bytes, and of so many summands or more."""
VECTOR = 16
DID = "its bias is added in the kernel of what follows, as the product has few results"


def part_biases(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let generated kernels add the biases of small float32 products. Returns ``graph``. Linear in nodes."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.target in PRODUCTS and node.writes[0].layout.dtype is torch.float32:
            name, reason = node.name, why_not(node)
            if not reason:
                nodes.append(part(graph, node))
            if remarks is not None and reason:
                remarks.refused("product_bias", name, reason)
            elif remarks is not None:
                remarks.did("product_bias", name, DID)
        nodes.append(node)
    graph.nodes = nodes
    return graph


def why_not(node: Node) -> str:
    """Why cuBLAS had better add the bias; "": a kernel may."""
    bias, left, right, beta, alpha, *_ = node.args
    made = node.writes[0]
    if any(one.layout.dtype is not torch.float32 or one.layout.flipped for one in (*node.reads, made)):
        return "not all of it is in float32"
    if rounds():
        return "float32 may be rounded to TF32, where cuBLAS adds biases well"
    if made.base is not None or not made.layout.is_contiguous:
        return "it fills a part of a tensor, or another layout"
    if len(bias.layout.size) != 1 or beta != 1 or alpha != 1:
        return "what it adds is no row, or one of both is scaled"
    results, summands = made.layout.numel, left.layout.size[1]
    apart = any(size * made.layout.itemsize % VECTOR for size in (summands, right.layout.size[1]))
    if results > (FEW_OF_MANY if summands >= MANY else FEW_APART if apart else FEW):
        return "its results are so many that cuBLAS adds biases well"
    return ""


def rounds() -> bool:
    """May products round float32 to TF32?"""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def part(graph: Graph, node: Node) -> Node:
    """Make ``node`` add its bias only. Returns the product that it adds it to, which belongs before it."""
    bias, left, right, *_ = node.args
    product = new_node(graph, node, PLAIN, (left, right), replace(node.writes[0].layout, offset=0))
    (made,) = product.writes
    let_go(node)
    node.target, node.args, node.changed, node.returns = SUM, (Operand(made.value, made.layout), bias, 1, Target(0)), True, ()
    read(node)
    return product
