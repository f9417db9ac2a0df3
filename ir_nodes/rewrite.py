"""What passes rewrite a graph with: other operands for users, one or many at once; new values and nodes. Imports `ir_nodes.graph`
and `ir_nodes.node` only."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterable, Mapping

from ir_nodes.graph import Graph
from ir_nodes.node import Arg, Node, Operand, Target, Value, Write, leaves


def redirect(user: Node, instead: Mapping[Value, Value]) -> None:
    """Make ``user`` read other values in place of some."""
    reread(user, lambda operand: Operand(instead[operand.value], operand.layout) if operand.value in instead else operand)


def reread(user: Node, instead: Callable[[Operand], Operand]) -> None:
    """Make ``user`` read other operands in place of some."""
    def of(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(of, arg))
        return instead(arg) if isinstance(arg, Operand) else arg

    before = list(user.inputs())
    user.args = tuple(map(of, user.args))
    user.reads = tuple(map(of, user.reads))
    after = dict.fromkeys(user.inputs())
    for value in before:
        if value not in after:
            value.users.pop(user, None)
    for value in after:
        value.users[user] = None


def read(node: Node) -> None:
    """Let ``node``, which has been given new arguments or is new, read what they name."""
    node.reads = tuple(arg for arg in leaves(node.args) if isinstance(arg, Operand))
    for value in node.inputs():
        value.users[node] = None


def let_go(node: Node) -> None:
    """Let ``node``, which goes or gets other arguments, be no user of what it needs."""
    for value in dict.fromkeys(node.inputs()):
        value.users.pop(node)


def new_value(graph: Graph, nbytes: int, producer: Node | None = None) -> Value:
    """The first value of a buffer of its own."""
    buffer = graph.add_buffer(nbytes)
    value = Value(buffer, 1, producer)
    graph.values[buffer.index].append(value)
    return value


def move_apart(graph: Graph, value: Value) -> None:
    """Give ``value``, which its node writes whole, and what follows it in its memory, memory of their own."""
    values = graph.values[value.buffer.index]
    first = values.index(value)
    buffer = graph.add_buffer(value.buffer.nbytes)
    for version, one in enumerate(values[first:], 1):
        one.buffer, one.version = buffer, version
        graph.values[buffer.index].append(one)
    del values[first:]


def copy(beside: Node, source: Operand, write: Write) -> Node:
    """What copies ``source``; it stands where ``beside`` does, and belongs to what that belongs to."""
    return node_beside(beside, "aten::copy_", (Target(0), source, False), write)


def node_beside(beside: Node, target: str, args: tuple[Arg, ...], write: Write, returns: tuple[int, ...] = (),
                again: bool = False) -> Node:  # fmt: skip
    """What writes ``write``; it stands where ``beside`` does, belongs to what that belongs to, and is not yet one of the graph's
    nodes."""
    node = Node(beside.index, target, args, (), (write,), returns=returns, frame=beside.frame, instr=beside.instr,
                segment=beside.segment, stage=beside.stage, changed=True, again=again)
    write.value.producer = node
    read(node)
    return node


def clone(graph: Graph, node: Node, instead: Mapping[Value, Value], reader: Node, joins: Node | None = None) -> Node:
    """The same op once more, into new memory, of other values in place of some. It belongs where ``reader`` does, for which it is
    made, and is not yet one of the graph's nodes."""
    writes = []
    for write in node.writes:
        writes.append(Write(new_value(graph, write.value.buffer.nbytes), write.layout, None, False))
    again = replace(node, writes=tuple(writes), again=True, twin=node.twin or node, joins=joins, segment=reader.segment,
                    stage=reader.stage, index=reader.index)
    for write in writes:
        write.value.producer = again
    redirect(again, instead)
    return again


class Substitution:
    """Values that others stand in for. Nothing changes before `apply`, which is linear in nodes and operands."""

    def __init__(self) -> None:
        self.instead: dict[Value, Value] = {}

    def of(self, value: Value) -> Value:
        """What stands for ``value`` now; itself where nothing else does."""
        while value in self.instead:
            value = self.instead[value]
        return value

    def replace(self, value: Value, other: Value) -> None:
        """From now on ``other`` stands for ``value``, and for all that ``value`` stood for."""
        assert self.of(other) is not value, "two values would stand for each other"
        self.instead[value] = other

    def apply(self, graph: Graph, gone: Iterable[Node] = ()) -> None:
        """Rewrite every user, then forget the values that were replaced and the nodes ``gone``, which nobody needs any more."""
        if self.instead:
            for user in dict.fromkeys(user for value in self.instead for user in value.users):
                self._rewrite(user)
        for value in self.instead:
            value.users.clear()
        graph.remove(gone)
        for index in {value.buffer.index for value in self.instead}:
            graph.values[index][:] = [value for value in graph.values[index] if value not in self.instead]

    def _rewrite(self, user: Node) -> None:
        user.reads = tuple(map(self._operand, user.reads))
        user.args = tuple(map(self._arg, user.args))
        user.writes = tuple(map(self._write, user.writes))
        user.effects = tuple(map(self._write, user.effects))
        for value in user.inputs():
            value.users[user] = None

    def _operand(self, operand: Operand) -> Operand:
        return Operand(self.of(operand.value), operand.layout) if operand.value in self.instead else operand

    def _arg(self, arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(self._arg, arg))
        return self._operand(arg) if isinstance(arg, Operand) else arg

    def _write(self, write: Write) -> Write:
        if write.base is None or write.base not in self.instead:
            return write
        return Write(write.value, write.layout, self.of(write.base), write.reads_old)
