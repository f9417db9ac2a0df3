"""Sums of gradients belong to no segment. Imports `ir_nodes` only."""

from __future__ import annotations

from ir_nodes import Graph, Node, SegmentCall

_SUMS = ("aten::add.Tensor", "aten::add_.Tensor", "aten::add.out")


def release_sums(graph: Graph) -> None:
    """Take each sum of gradients out of its backward segment.

    Where a tensor was used twice, autograd adds the two gradients while the node that made the second one runs. That sum reads
    what another segment made, so it would tie the two segments' backwards to the order in which they were recorded. A third
    gradient is added to that sum, so sums come in chains.
    """
    loose: dict[Node, SegmentCall] = {}  # sums whose results no other node of their segment uses
    for node in reversed(graph.nodes):
        call = node.segment
        if call is not None and call.backward and node.target in _SUMS:
            users = (user for write in node.writes for user in write.value.users)
            if not any(_inside(user, call) and user not in loose for user in users):
                loose[node] = call
    for node, call in reversed(loose.items()):
        if any(value.producer is not None and not _inside(value.producer, call) for value in node.inputs()):
            node.segment = None


def _inside(node: Node, call: SegmentCall) -> bool:
    return node.segment is not None and call in node.segment.chain()
