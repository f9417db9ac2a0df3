"""A convolution's bias gradient is summed by the kernel that makes what it sums. Imports `ir_nodes` and `barriers` parts only.

cuDNN gives the gradients of input and weight; for that of the bias ATen then reads the gradient of the result once more, in a
kernel of its own. As an op of its own the sum shares the kernel of the activation's gradient, as behind a linear layer. What is
left of the recorded op is one call for each gradient, as cuDNN has it anyway.
"""

from __future__ import annotations

from dataclasses import replace

from barriers.passes.conv_bias import has_own_kernel, why_not_cudnn
from barriers.passes.permuted import is_channels_last
from ir_nodes import Graph, Node, Write
from ir_nodes.node import Target
from ir_nodes.ops import info
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import let_go, read

BACKWARD, SUM = "aten::convolution_backward", "aten::sum.IntList_out"
WORTH = 1 << 20
"""Bytes of what is summed from which on a kernel of ours for nothing else pays: on an H200, ATen's takes 50 us for 33 MB."""
SHARED, OWN = "the kernel of what it sums", "a generated kernel"
INPUT, WEIGHT, BIAS = range(3)
"""The op's results, and its mask's words."""


def sum_gradients(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Take sums for biases out of convolutions' backwards. Returns ``graph``. Linear in nodes."""
    remarks, nodes = remarks or Remarks(), []
    for node in graph.nodes:
        wanted = node.target == BACKWARD and node.args[-1][BIAS] and needed(graph, node)
        reason = why_not(node) if wanted else ""
        if reason:
            remarks.refused("conv_gradients", node.name, reason)
        elif wanted:
            remarks.did("conv_gradients", node.name, f"its bias's gradient is summed in {OWN if is_alone(node) else SHARED}")
        nodes += parted(node) if wanted and not reason else [node]
    graph.nodes = nodes
    return graph


def needed(graph: Graph, node: Node) -> bool:
    """Does anybody read the bias's gradient?"""
    value = result(node, BIAS).value
    return bool(value.users) or graph.holds(value)


def result(node: Node, which: int) -> Write:
    place = node.returns[which]
    assert place is not None, node
    return node.writes[place]


def why_not(node: Node) -> str:
    """Why the sum stays where it is; "": it need not."""
    gradient, source, weight, *_, transposed, _, groups, _ = node.args
    reason = why_not_cudnn(node)
    if reason:
        return reason
    if has_own_kernel(source.layout, transposed, groups):
        return "it is that of a depthwise convolution, which has kernels of its own"
    if is_alone(node) and gradient.layout.nbytes < WORTH:
        return "what it sums is small, and not made by a kernel that could do so"
    layouts = [one.layout for one in (gradient, source, weight)]
    if not all(one.is_contiguous for one in layouts) and not all(map(is_channels_last, layouts)):
        return "its operands differ in layout, so that each call would copy some"
    return ""


def is_alone(node: Node) -> bool:
    """Is what is summed made by nothing that could do so?"""
    maker = node.args[0].value.producer
    return maker is None or info(maker.target).kind not in ("pointwise", "copy") or maker.stage != node.stage


def parted(node: Node) -> list[Node]:
    """What ``node`` does, as the sum and one node for each other gradient."""
    gradient, *_, mask = node.args
    dims = tuple(dim for dim in range(len(gradient.layout.size)) if dim != 1)
    total = replace(node, target=SUM, args=(gradient, dims, False, None, Target(0)), writes=(result(node, BIAS),), returns=(),
                    reads=(gradient,), changed=True)
    calls = [replace(node, args=(*node.args[:-1], tuple(one == which for one in (INPUT, WEIGHT, BIAS))), changed=True,
                     writes=(result(node, which),), returns=tuple(0 if one == which else None for one in (INPUT, WEIGHT, BIAS)))
             for which in (INPUT, WEIGHT) if mask[which]]
    let_go(node)
    for one in (total, *calls):
        one.writes[0].value.producer = one
        read(one)
    return [total, *calls]
