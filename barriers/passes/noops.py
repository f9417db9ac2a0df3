"""Drops writes that change nothing. Imports `ir_nodes` only."""

from __future__ import annotations

from ir_nodes import Graph, Node, Operand, Value, Write
from ir_nodes.node import Arg, BufferKind
from ir_nodes.ops import info

_PLAIN = ("pointwise", "fill", "copy")
"""Kinds of op that do nothing but write."""


def eliminate_noops(graph: Graph) -> Graph:
    """Drop each ``copy_`` of a window of a buffer onto itself, and each write of no elements over a value; who used the new value
    uses the old one. Returns ``graph``."""
    gone = []
    for node in graph.nodes:
        if _copies_onto_itself(node):
            _replace(node.writes[0].value, node.reads[0].value, graph)
        elif _writes_nothing(node):
            for write in node.writes:
                assert write.base is not None
                _replace(write.value, write.base, graph)
        else:
            continue
        gone.append(node)
    graph.remove(gone)
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


def _replace(new: Value, old: Value, graph: Graph) -> None:
    """Make every user of ``new`` one of ``old``, and forget ``new``."""
    for user in list(new.users):
        user.reads = tuple(_read_of(operand, new, old) for operand in user.reads)
        user.args = tuple(_arg_of(arg, new, old) for arg in user.args)
        user.writes = tuple(_write_of(write, new, old) for write in user.writes)
        user.effects = tuple(_write_of(write, new, old) for write in user.effects)
        old.users[user] = None
    new.users.clear()
    graph.values[new.buffer.index].remove(new)


def _read_of(operand: Operand, new: Value, old: Value) -> Operand:
    return Operand(old, operand.layout) if operand.value is new else operand


def _arg_of(arg: Arg, new: Value, old: Value) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_arg_of(item, new, old) for item in arg)
    return _read_of(arg, new, old) if isinstance(arg, Operand) else arg


def _write_of(write: Write, new: Value, old: Value) -> Write:
    return Write(write.value, write.layout, old, write.reads_old) if write.base is new else write
