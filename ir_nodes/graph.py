"""A recording in single-assignment form, with use lists. Imports torch and `ir_nodes.layout`, `.node` and `.ops` only."""

from __future__ import annotations

import hashlib
from typing import Iterable, Sequence

from ir_nodes import ops
from ir_nodes.node import Access, Arg, Buffer, BufferKind, Frame, Node, Operand, ScalarInput, Target, Value, Write


class Graph:
    """Nodes in recorded order over numbered buffers.

    ``nodes`` keep the order in which they were recorded until a pass reorders them; ``values[b]`` lists the values of
    buffer ``b`` from its version 0 on; ``scalars`` holds the kind of each number that is an input; ``left`` why ATen has to run
    a node, for those that no kernel could be made of.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.values: list[list[Value]] = []
        self.scalars: list[str] = []
        self.nodes: list[Node] = []
        self.left: dict[Node, str] = {}

    def add_buffer(self, nbytes: int, kind: BufferKind = BufferKind.FRESH, live: bool = False) -> Buffer:
        """A buffer of ``nbytes`` bytes; ``live``: its last value is a result of the graph."""
        buffer = Buffer(len(self.buffers), nbytes, kind, live)
        self.buffers.append(buffer)
        self.values.append([Value(buffer, 0)])
        return buffer

    def add_scalar(self, kind: str = "float") -> ScalarInput:
        self.scalars.append(kind)
        return ScalarInput(len(self.scalars) - 1, kind)

    def record(
        self,
        target: str,
        args: Sequence[Arg],
        outs: Sequence[Access | None] = (),
        effects: Sequence[Access] = (),
        frame: Frame | None = None,
        instr: int = -1,
    ) -> Node:
        """Append one op. ``args`` may hold `Access`es, nested in sequences; ``outs`` are the tensors it newly returns."""
        reads: list[Operand] = []
        written: list[Access] = []
        reads_only = ops.reads_only(target, args)

        def resolve(arg: Arg, position: int) -> Arg:
            if isinstance(arg, (list, tuple)):
                return tuple(resolve(item, position) for item in arg)
            if not isinstance(arg, Access):
                return arg
            if arg.mode == "r" or position in reads_only:
                operand = Operand(self.last(arg.buffer), arg.layout)
                reads.append(operand)
                return operand
            written.append(arg)
            return Target(len(written) - 1)

        resolved = tuple(resolve(arg, position) for position, arg in enumerate(args))
        returns: list[int | None] = []
        for out in outs:
            returns.append(None if out is None else len(written))
            if out is not None:
                written.append(out)
        node = Node(len(self.nodes), target, resolved, tuple(reads), (), (), tuple(returns), frame, instr)
        node.writes = tuple(self._assign(node, access) for access in written)
        node.effects = tuple(self._assign(node, access) for access in effects)
        for value in node.inputs():
            value.users[node] = None
        self.nodes.append(node)
        return node

    def _assign(self, node: Node, access: Access) -> Write:
        old = self.last(access.buffer)
        reads_old = access.mode == "rw"
        untouched = old.producer is None and access.buffer.kind is BufferKind.FRESH  # uninitialised: nothing to keep
        keeps_old = reads_old or not (untouched or access.layout.covers(access.buffer.nbytes))
        value = Value(access.buffer, old.version + 1, node)
        self.values[access.buffer.index].append(value)
        return Write(value, access.layout, old if keeps_old else None, reads_old)

    def last(self, buffer: Buffer) -> Value:
        """The newest value of ``buffer``."""
        return self.values[buffer.index][-1]

    def holds(self, value: Value) -> bool:
        """Does a tensor show ``value`` when the recording ends?"""
        return value.buffer.live and self.last(value.buffer) is value

    def inputs(self) -> list[Value]:
        """Values that must hold bytes when the graph starts: version 0 of what some node reads."""
        return [vs[0] for b, vs in zip(self.buffers, self.values) if b.kind is not BufferKind.FRESH and vs[0].users]

    def outputs(self) -> list[Value]:
        """The last value of every live buffer that a node of the graph wrote."""
        return [vs[-1] for b, vs in zip(self.buffers, self.values) if b.live and vs[-1].producer is not None]

    def remove(self, dead: Iterable[Node]) -> None:
        """Drop nodes whose values nobody uses. Raises ValueError where one is still used."""
        gone = dict.fromkeys(dead)
        for node in reversed(gone):
            for write in node.all_writes():
                if any(user not in gone for user in write.value.users):
                    raise ValueError(f"{node} still has users")
            for value in node.inputs():
                value.users.pop(node, None)
        self.nodes = [node for node in self.nodes if node not in gone]

    def key(self) -> str:
        """Structural key: equal for two graphs that compute the same thing from the same layouts, whatever numbers they hold."""
        return hashlib.sha256(self.describe().encode()).hexdigest()

    def describe(self) -> str:
        """Every buffer, number and node in one deterministic text, without frames."""
        lines = [f"{b} {b.kind.value} {b.nbytes} {'live' if b.live else 'dead'}" for b in self.buffers]
        lines += [f"s{i} {kind}" for i, kind in enumerate(self.scalars)]
        for node in self.nodes:
            effects = "".join(f" !{write}" for write in node.effects)
            lines.append(f"{node}{effects}")
        return "\n".join(lines)


