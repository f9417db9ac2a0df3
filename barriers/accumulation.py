"""Sums of gradients belong to no segment. Imports `ir_nodes` only."""

from __future__ import annotations

from ir_nodes import Graph, Node, SegmentCall

_SUMS = ("aten::add.Tensor", "aten::add_.Tensor", "aten::add.out")


def release_sums(graph: Graph) -> None:
    """Take each sum of gradients out of its backward segment.

    Where a tensor was used twice, autograd adds the two gradients while the node that made the second one runs. That sum reads
    what another segment made, so it would tie the two segments' backwards to the order in which they were recorded.
    """
    for node in reversed(graph.nodes):
        call = node.segment
        if call is not None and call.backward and node.target in _SUMS and _is_at_the_border(node, call):
            node.segment = None


def _is_at_the_border(node: Node, call: SegmentCall) -> bool:
    """Does it read what was made outside ``call``, and does nobody inside use its result?"""
    outside = any(value.producer is not None and not _inside(value.producer, call) for value in node.inputs())
    return outside and not any(_inside(user, call) for write in node.writes for user in write.value.users)


def _inside(node: Node, call: SegmentCall) -> bool:
    return node.segment is not None and call in node.segment.chain()
