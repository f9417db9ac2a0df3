"""Gradients of attention that are summed over rows, for the biases of what made queries, keys and values. Imports torch,
`ir_nodes` and codegen's parts about attention's backward.

Such a sum reads a whole gradient once more. The kernels that make it have a block of its rows at hand, and leave the sum of
these, so that what is left to be summed is one row for each block. As in eager mode, what is rounded already is summed in float32
and the whole sum is rounded once. The backward becomes an op that gives sums of blocks, too, and is defined for PyTorch: should
another engine have to run the graph, it sums what it has computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from codegen.attention_joined import JOINED, by_rows, define, gradients_of, is_joined
from codegen.lowering import arguments
from ir_nodes import Graph, Layout, Node, Operand, Write, ops
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import copy, new_value, reread

ROWS = 64
"""Queries or keys whose gradients a program makes: so many rows have a sum of their own."""

SUM = ("aten", "sum")


def _summed(target: str) -> str:
    """An op that takes what ``target`` takes, a backward of attention, and gives what that gives; then, for each of these
    gradients, sums of ROWS rows, float32 [batch * rows / ROWS, columns]."""
    joined = is_joined(target)

    def summed(*positional: Any, **keyword: Any) -> tuple[Tensor, ...]:
        result = ops.overload(target)(*positional, **keyword)
        made = (result,) if joined else tuple(result)
        rows = made if joined else [one.transpose(1, 2).flatten(2) for one in made]
        return (*made, *(one.reshape(-1, ROWS, one.shape[2]).sum(1, dtype=torch.float32) for one in rows))

    return define(target, "_sums", f"({', '.join(['Tensor'] * (2 if joined else 6))})", summed)


SUMMED = {target: _summed(target) for target in (*JOINED, *JOINED.values())}
"""The op for each backward of attention, joined or not, and the sums of its gradients."""


def sums_of(node: Node) -> list[Write | None]:
    """Where a backward leaves sums of the gradients of queries, keys and values, each as [batch * rows / ROWS, heads * elements];
    None: nobody asks for them."""
    if node.target not in SUMMED.values():
        return [None, None, None]
    places = node.returns[len(node.returns) // 2 :]
    found = [None if place is None else node.writes[place] for place in places]
    return parts_of(found[0]) if is_joined(node.target) and found[0] is not None else found


def parts_of(write: Write) -> list[Write | None]:
    """The three parts of the columns that ``write`` has."""
    layout, (count, columns) = write.layout, write.layout.size
    part = replace(layout, size=(count, columns // 3))
    return [replace(write, layout=replace(part, offset=number * columns // 3)) for number in range(3)]


def leave_sums(graph: Graph, node: Node, remarks: Remarks) -> None:
    """Let ``node``, a backward, leave sums of those gradients that are summed over all rows, and let the sums read these."""
    if node.target not in SUMMED:
        return
    partial: list[Write | None] = []
    for write, rows in wholes_of(node):
        readers = readers_of(write, rows, remarks)
        partial.append(leave(graph, node, rows, readers) if readers and rows is not None else None)
    if not any(partial):
        return
    places = iter(range(len(node.writes), len(node.writes) + 3))
    node.target, node.changed = SUMMED[node.target], True
    node.returns = (*node.returns, *(None if one is None else next(places) for one in partial))
    node.writes = (*node.writes, *(one for one in partial if one is not None))


def wholes_of(node: Node) -> list[tuple[Write, Layout | None]]:
    """The tensors of gradients that ``node`` makes, and how each lies as [batch, rows, columns], if it can be seen so."""
    if is_joined(node.target):
        return [(node.writes[0], node.writes[0].layout)]
    return [(write, by_rows(write.layout)) for write in gradients_of(node) if write is not None]


def readers_of(write: Write, rows: Layout | None, remarks: Remarks) -> list[Node]:
    """The sums that may read sums of blocks of ``write`` instead."""
    found = []
    for user in write.value.users:
        if ops.split(user.target)[:2] == SUM:
            reason = why_not(user, rows)
            if reason:
                remarks.refused("attention_sums", user.name, reason)
            else:
                found.append(user)
    return found


def why_not(node: Node, rows: Layout | None) -> str:
    """Why ``node`` sums a gradient as it lies, as ``rows`` if it can be seen so; "": it need not."""
    args, read = arguments(node), node.reads[0].layout
    if rows is None or not (read.alike(rows) or read.alike(flat(rows))):
        return "a part of attention's gradient is summed, or its elements in another order"
    count = len(read.size)
    if sorted(dim % count for dim in args.get("dim") or ()) != list(range(count - 1)):
        return "attention's gradient is summed over other dimensions than batch and rows"
    if node.writes[0].layout.dtype not in (read.dtype, torch.float32):
        return "the sum of attention's gradient has another dtype"
    if node.again:
        return "attention's gradient is summed twice"
    return ""


def flat(rows: Layout) -> Layout:
    """[batch, rows, columns] seen as [batch * rows, columns]; as it is, where it can't be."""
    (batch, count, columns), (outer, step, inner) = rows.size, rows.stride
    return replace(rows, size=(batch * count, columns), stride=(step, inner)) if batch == 1 or outer == count * step else rows


def leave(graph: Graph, node: Node, rows: Layout, readers: list[Node]) -> Write:
    """Memory for sums of blocks of ``rows``, which ``node`` makes and ``readers`` read."""
    batch, count, columns = rows.size
    layout = Layout.contiguous(torch.float32, (batch * count // ROWS, columns))
    write = Write(new_value(graph, layout.nbytes, node), layout, None, False)
    for reader in readers:
        lead = layout.size[:1] if len(reader.reads[0].layout.size) == 2 else (batch, count // ROWS)
        reread_sums(graph, reader, Operand(write.value, Layout.contiguous(torch.float32, (*lead, columns))))
    return write


def reread_sums(graph: Graph, node: Node, partial: Operand) -> None:
    """Let ``node`` sum ``partial``. A copy rounds where its result has 16 bits: told to give such a result, PyTorch's sum would
    round what it reads, too."""
    reread(node, lambda operand: partial)
    dtype = list(arguments(node)).index("dtype")
    node.args = tuple(None if place == dtype else arg for place, arg in enumerate(node.args))
    node.changed = node.relaid = True
    write = node.writes[0]
    if write.layout.dtype is not torch.float32:
        layout = Layout.contiguous(torch.float32, write.layout.size)
        value = new_value(graph, layout.nbytes, node)
        if write.base is not None:
            write.base.users.pop(node)
        node.writes = (Write(value, layout, None, False),)
        graph.nodes.insert(graph.nodes.index(node) + 1, copy(node, Operand(value, layout), write))
