"""Gradients of queries, keys and values side by side in one tensor, where one product made all three. Imports torch, `ir_nodes`
and `codegen.lowering`.

Autograd concatenates them along the last dimension for that product's backward, which copies them all. The backward and the
concatenation become one op, so that kernels can put each gradient where it belongs. The op is defined for PyTorch, too: should
another engine have to run the graph, it computes the gradients and concatenates them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import torch
from torch import Tensor

from codegen.lowering import arguments
from ir_nodes import BufferKind, Graph, Layout, Node, ops, own
from ir_nodes.node import Operand, Write
from ir_nodes.rewrite import let_go


def define(target: str, ending: str, results: str, function: Callable[..., Any]) -> str:
    """An op of our own, named as ``target`` with an ``ending``, that takes what ``target`` takes and gives ``results``, as
    ``function`` computes them. Returns its name with its namespace."""
    taken, _, _ = str(ops.schema(target)).partition(" -> ")
    return own.define(ops.split(target)[1] + ending, f"{taken[taken.index('(') :]} -> {results}", function)


def _joined(target: str) -> str:
    """An op that takes what ``target`` takes, a backward of attention, and gives [batch, rows, 3 * heads * elements]."""
    def joined(*positional: Any, **keyword: Any) -> Tensor:
        return torch.cat([made.transpose(1, 2).flatten(2) for made in ops.overload(target)(*positional, **keyword)], 2)

    return define(target, "_joined", "Tensor", joined)


JOINED = {target: _joined(target) for target in ("aten::_scaled_dot_product_cudnn_attention_backward",
                                                 "aten::_scaled_dot_product_flash_attention_backward")}
"""The op for each backward of attention and the concatenation after it."""


def is_joined(target: str) -> bool:
    """Is it an op that puts gradients side by side, whatever else it gives?"""
    return "_joined" in target


def gradients_of(node: Node) -> list[Write | None]:
    """Where a backward leaves the gradients of queries, keys and values, each as [batch, heads, rows, elements]."""
    if not is_joined(node.target):
        return [None if place is None else node.writes[place] for place in node.returns[:3]]
    write, size = node.writes[0], arguments(node)["query"].layout.size
    return [replace(write, layout=part) for part in parts_of(write.layout, size)]


def parts_of(layout: Layout, size: tuple[int, ...]) -> list[Layout]:
    """The three parts of [batch, rows, 3 * heads * elements], each of ``size``: [batch, heads, rows, elements]."""
    batch, rows, step = layout.stride
    heads, width = size[1], size[3]
    first = replace(layout, size=size, stride=(batch, width * step, rows, step))
    return [replace(first, offset=layout.offset + part * heads * width * step) for part in range(3)]


def join(graph: Graph, node: Node, refuse: Callable[[Layout], str]) -> str:
    """Make one op of the backward ``node`` and the concatenation of its gradients. Returns why not where they are concatenated;
    "": they are joined, or nobody does. ``refuse``: why kernels can't write such a gradient."""
    cat = reader_of(node)
    if cat is None:
        return ""
    reason = why_not(graph, node, cat)
    if not reason:
        parts = parts_of(cat.writes[0].layout, node.writes[0].layout.size)
        reason = next((why for part in parts if (why := refuse(part))), "")
    if not reason:
        replace_both(graph, node, cat)
    return reason


def replace_both(graph: Graph, node: Node, cat: Node) -> None:
    """``node`` writes what ``cat`` did, whose readers stay as they are."""
    let_go(cat)
    for read in cat.reads:
        graph.values[read.value.buffer.index].remove(read.value)
    graph.nodes.remove(cat)
    node.target, node.changed = JOINED[node.target], True
    node.writes, node.returns = cat.writes, (0,)
    node.writes[0].value.producer = node


def reader_of(node: Node) -> Node | None:
    """The concatenation that reads a gradient which ``node``, a backward, makes."""
    users = [user for write in node.writes for user in write.value.users]
    return next((user for user in users if ops.split(user.target)[:2] == ("aten", "cat")), None)


def why_not(graph: Graph, node: Node, cat: Node) -> str:
    gradients, write = [one for one in gradients_of(node) if one is not None], cat.writes[0]
    if len(gradients) != 3 or [read.value for read in cat.reads] != [one.value for one in gradients]:
        return "gradients are concatenated with something else, or in another order"
    if not all(only(graph, one) and one.value.users.keys() == {cat} for one in gradients) or not only(graph, write):
        return "somebody else needs what is concatenated"
    if (node.stage, node.segment) != (cat.stage, cat.segment) or cat.again:
        return "gradients are concatenated in another part of the program"
    if len(write.layout.size) != 3 or arguments(cat)["dim"] % 3 != 2:
        return "gradients are not concatenated along the last of three dimensions"
    if not all(same_elements(one.layout, read) for one, read in zip(gradients, cat.reads)):
        return "gradients are concatenated in another order of elements"
    if write.layout.dtype is not gradients[0].layout.dtype or write.layout.flipped:
        return "what is concatenated gets another dtype"
    return ""


def only(graph: Graph, write: Write) -> bool:
    """Is it all that ever is in a buffer of the graph's own?"""
    buffer = write.value.buffer
    fresh = buffer.kind is BufferKind.FRESH and not buffer.live
    return fresh and write.base is None and graph.values[buffer.index][1:] == [write.value]


def same_elements(made: Layout, read: Operand) -> bool:
    """Does [batch, rows, heads * elements] see what was made as [batch, heads, rows, elements]?"""
    seen = by_rows(made)
    return seen is not None and seen.alike(read.layout)


def by_rows(made: Layout) -> Layout | None:
    """[batch, heads, rows, elements] seen as [batch, rows, heads * elements]; None where it can't be."""
    (batch, heads, rows, width), (outer, head, row, step) = made.size, made.stride
    if heads > 1 and head != width * step:
        return None
    return replace(made, size=(batch, rows, heads * width), stride=(outer, row, step))
