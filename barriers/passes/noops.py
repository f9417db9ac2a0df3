"""Drops writes that change nothing. Imports `ir_nodes` only."""

from __future__ import annotations

from ir_nodes import BufferKind, Graph, Node, Value
from ir_nodes.ops import info
from ir_nodes.rewrite import Substitution

_PLAIN = ("pointwise", "fill", "copy")
"""Kinds of op that do nothing but write."""


def eliminate_noops(graph: Graph) -> Graph:
    """Drop each ``copy_`` of a window of a buffer onto itself, and each write of no elements over a value; who used the new value
    uses the old one. Returns ``graph``. Linear in nodes and operands."""
    same, gone = Substitution(), []
    for node in graph.nodes:
        if _copies_onto_itself(node):
            same.replace(node.writes[0].value, node.reads[0].value)
        elif _writes_nothing(node):
            for write in node.writes:
                assert write.base is not None
                same.replace(write.value, write.base)
        else:
            continue
        gone.append(node)
    if gone:
        same.apply(graph, gone)
    return graph


def _writes_nothing(node: Node) -> bool:
    """Does it only change windows without an element? Halves of a rotary embedding for all of a head are such ones. Not a
    collective: a rank that receives nothing may send."""
    return bool(node.writes) and not node.effects and info(node.target).kind in _PLAIN and all(
        write.base is not None and not write.layout.numel and not _is_memory(write.base) for write in node.writes)


def _is_memory(value: Value) -> bool:
    """Is it what was there before anything wrote to new memory?"""
    return value.producer is None and value.buffer.kind is BufferKind.FRESH


def _copies_onto_itself(node: Node) -> bool:
    if node.target != "aten::copy_" or len(node.reads) != 1 or len(node.writes) != 1:
        return False
    read, write = node.reads[0], node.writes[0]
    if read.value.buffer is not write.value.buffer or read.layout != write.layout:
        return False
    return not _is_memory(read.value)  # else nothing would make the buffer
