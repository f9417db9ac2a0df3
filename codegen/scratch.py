"""Memory that a plan's kernels hand one another numbers in. Imports `codegen.kernel` and `ir_nodes`."""

from __future__ import annotations

from codegen.kernel import Temporary
from ir_nodes.node import Buffer, BufferKind, Value


class Scratch:
    """The plan's scratch memory: one temporary per scratch buffer."""

    def __init__(self) -> None:
        self._made: dict[Buffer, Temporary] = {}

    def of(self, value: Value) -> Temporary:
        return self._made.setdefault(value.buffer, Temporary(len(self._made), value.buffer.nbytes))

    def more(self, nbytes: int) -> Temporary:
        """Scratch memory that no value names."""
        return self.of(Value(Buffer(-1, nbytes, BufferKind.FRESH, False), 1))

    def __contains__(self, value: Value) -> bool:
        return value.buffer in self._made

    def all(self) -> tuple[Temporary, ...]:
        return tuple(self._made.values())
