"""What `hold_less` asks of one op or one kernel: can it be run again, and what was won there already? Imports `ir_nodes` and
`barriers` parts only."""

from __future__ import annotations

from dataclasses import replace
from typing import Container, Mapping, Sequence

from barriers.passes.cheap import is_elementwise
from ir_nodes import Graph, Node, Operand, Value, Write
from ir_nodes.kernels import Kernel
from ir_nodes.own import DROPPED
from ir_nodes.rewrite import clone, new_value, read

LITTLE = 16
"""What is smaller by this factor is not counted."""


def drops(node: Node) -> bool:
    """Is it dropout in training, whose result follows from its operand and its mask?"""
    return node.target == "aten::native_dropout" and len(node.effects) == 1 and None not in node.returns


def is_plain(node: Node) -> bool:
    """Can its result be made again element by element? A reduction would take registers from the kernel that it joins."""
    return is_elementwise(node) or drops(node)


def result_of(node: Node) -> Value:
    """What could be made again of a plain op or a dropout."""
    return node.writes[node.returns[0] or 0].value if drops(node) else node.writes[0].value


def taken(node: Node) -> tuple[Operand, ...]:
    """What it takes to make the result of ``node`` again."""
    return (*node.reads, _mask(node)) if drops(node) else node.reads


def _mask(node: Node) -> Operand:
    index = node.returns[1]
    assert index is not None
    return Operand(node.writes[index].value, node.writes[index].layout)


def again(graph: Graph, node: Node, instead: Mapping[Value, Value], joined: Node) -> Node:
    """A copy of ``node`` in the kernel of ``joined``, of other values in place of some. A dropout's takes its mask and draws
    nothing."""
    if not drops(node):
        return clone(graph, node, instead, joined, joined)
    old = node.writes[node.returns[0] or 0]
    source, p = node.args[:2]
    source = Operand(instead.get(source.value, source.value), source.layout)
    value = new_value(graph, old.value.buffer.nbytes)
    copied = replace(
        node, target=DROPPED, args=(source, _mask(node), p), writes=(Write(value, old.layout, None, False),), effects=(),
        returns=(0,), changed=True, again=True, joins=joined, segment=joined.segment, stage=joined.stage, index=joined.index,
    )
    value.producer = copied
    read(copied)
    return copied


def twice(kernel: Kernel) -> dict[Value, Value]:
    """For each value that the kernel makes once more, though another has made it, its own."""
    pairs = [(node.twin, node) for node in kernel.nodes if node.twin is not None]
    return {old.value: new.value for twin, node in pairs for old, new in zip(twin.writes, node.writes)}


def won(kernel: Kernel, unseen: Container[int]) -> int:
    """Bytes that do not move because the kernel makes some values once more: they need not be read, nor written where they are
    in no memory (``unseen``) any more; what it reads for that is subtracted."""
    own = twice(kernel)
    olds = {new: old for old, new in own.items()}
    reads = {True: set[Value](), False: set[Value]()}
    for node in kernel.nodes:
        reads[node.again].update(one.value for one in node.reads)
    spared = sum(new.buffer.nbytes * (2 if olds[new].buffer.index in unseen or not olds[new].users else 1)
                 for new in reads[False] if new in olds)
    extra = [value.buffer.nbytes for value in reads[True] - reads[False] if value not in olds]
    return spared - sum(nbytes for nbytes in extra if LITTLE * nbytes > spared)


def squares(value: Value, late: Sequence[Node]) -> bool:
    """Do only batched products read ``value``, each of which touches less than half of that else? Attention's probabilities are
    like that: they grow with the square of a sequence."""
    def others(user: Node) -> int:
        return sum(one.value.buffer.nbytes for one in (*user.reads, *user.writes) if one.value is not value)

    return all(user.name in ("bmm", "baddbmm") and 2 * others(user) <= value.buffer.nbytes for user in late)
