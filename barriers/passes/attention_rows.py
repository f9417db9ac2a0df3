"""The gradient that cuDNN's backward of attention reads lies as the result does. Imports `ir_nodes` and `barriers` parts only.

PyTorch keeps cuDNN's plans for backwards by the layouts of queries, keys and values (`MHAParams` in ATen/native/cudnn/MHA.cpp),
but from cuDNN 9.5.1 on a plan holds the gradient's strides, too. So a second attention of the same sizes, whose gradient lies
otherwise than the first one's, would be read by the wrong strides, silently. That follows from PyTorch's source; wrong gradients
that fit it were seen in eager mode on an H200 (PyTorch 2.11), where it was not proved to be their reason. How a result lies
follows from its queries; a gradient that lies so, too, is read rightly by whatever plan is kept. Most do: a product made them.
"""

from __future__ import annotations

from dataclasses import replace

from ir_nodes import Graph, Layout, Node, Operand
from ir_nodes.node import Write
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import copy, new_value, reread

BACKWARD = "aten::_scaled_dot_product_cudnn_attention_backward"
GRADIENT, RESULT = 0, 4
"""Places of its arguments."""


def lay_gradients(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let backwards read copies of gradients that lie otherwise than results. Returns ``graph``. Linear in nodes."""
    nodes: list[Node] = []
    for node in graph.nodes:
        gradient, result = (node.args[GRADIENT], node.args[RESULT]) if node.target == BACKWARD else (None, None)
        if not isinstance(gradient, Operand) or not isinstance(result, Operand):
            nodes.append(node)
            continue
        if not replace(gradient.layout, offset=result.layout.offset).alike(result.layout):
            nodes.append(copied(graph, node, gradient, result.layout))
            if remarks is not None:
                remarks.did("attention", node.name, "cuDNN reads a copy of the gradient, which lies as the result does")
        nodes.append(node)
    graph.nodes = nodes
    return graph


def copied(graph: Graph, node: Node, gradient: Operand, wanted: Layout) -> Node:
    """Let ``node`` read a copy of ``gradient`` that lies as ``wanted``, or in rows where that has gaps. Returns what copies."""
    size, dtype = gradient.layout.size, gradient.layout.dtype
    layout = replace(wanted, dtype=dtype, size=size, offset=0) if wanted.is_dense else Layout.contiguous(dtype, size)
    value = new_value(graph, layout.nbytes)
    made = copy(node, gradient, Write(value, layout, None, False))
    reread(node, lambda operand: Operand(value, layout) if operand == gradient else operand)
    node.relaid = True
    return made
