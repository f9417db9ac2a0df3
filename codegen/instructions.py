"""The instructions a fused kernel is built of, before it has blocks or names. Imports torch, `ir_nodes` and `codegen.forms`.

Every node is lowered once, on its own, into a `Part` (or several, where it needs more than one iteration space). Fusion
looks only at a part's space and memory accesses; emission concatenates instructions and forwards what one part stores to
the parts that load it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from codegen.forms import Form, Reduced, reduced_extent
from ir_nodes.node import Buffer, BufferKind, Node, Value

UNIFORM, KEPT, FULL = 0, 1, 2
"""How often an instruction's result differs: never, per kept element of a reduction, per element of the whole space."""


@dataclass(slots=True, eq=False)
class MemAccess:
    """``dtype`` elements of ``value`` walked by ``form`` from ``byte_offset`` on, at ``level``.

    ``low`` and ``high`` bound the bytes touched (high exclusive). ``index_stride`` is for gathers: elements per index.
    ``shift``: how many elements from the buffer's memory on ``byte_offset`` lies too low, for an access through a window begins
    where the window does, not where the form does. ``scattered``: index tensors add to the addresses.
    """

    value: Value
    form: Form
    dtype: torch.dtype
    byte_offset: int
    level: int
    low: int
    high: int
    index_stride: int = 0
    shift: int = 0
    scattered: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        return (self.value, self.form, self.dtype, self.byte_offset, self.level)

    @property
    def covers(self) -> bool:
        """True where it walks the whole buffer, in whatever order."""
        expected = 1
        for size, stride in sorted(self.form, key=lambda pair: pair[1]):
            if stride != expected:
                return False
            expected *= size
        whole = expected * self.dtype.itemsize == self.value.buffer.nbytes
        return whole and self.byte_offset == 0 and not self.index_stride and not self.scattered

    def overlaps(self, other: "MemAccess") -> bool:
        return self.low < other.high and other.low < self.high


@dataclass(slots=True, eq=False)
class Instr:
    """``kind``: "load", "store", "gather", "take", "put", "expr", "reduce", "scan", "coord", "scalar", "size", "seed",
    "offset" or "random".

    ``text`` is an expression over {0}, {1}, ... (expr) or the combining function's name (reduce, scan). ``dtype`` is what the
    result is held in. A load's argument, if it has one, says where there is something to load.
    ``payload`` is the kind's own datum: the form of a coord, the scalar's index, the size, the generator's buffer (seed),
    (buffer, increment) of an offset, whether a scan runs backwards, the `codegen.draws.Stream` of a random number, (stride,
    extent) of each index that a take's or put's addresses depend on: the arguments of a take, and of a put behind its value; its
    ``text`` is "add" or "set".
    """

    kind: str
    dtype: torch.dtype
    level: int
    args: tuple["Instr", ...] = ()
    text: str = ""
    access: MemAccess | None = None
    payload: object = None
    rounded: torch.dtype | None = None  # a 16-bit float dtype that the value is known to be representable in


@dataclass(slots=True, eq=False)
class Part:
    """A node's share of one kernel: an iteration space of ``numel`` elements and the instructions run over it.

    ``reduced`` is None for a pointwise part. ``phases`` counts reductions that wait for one another. ``column``: the
    reduced elements are not adjacent in memory.
    """

    node: Node
    numel: int
    reduced: Reduced | None = None
    instrs: list[Instr] = field(default_factory=list)
    column: bool = False
    after: tuple[Value, ...] = ()  # values that have to be there, besides those that it reads

    @property
    def kept(self) -> int:
        """How many results each of the part's reductions has."""
        return self.numel // reduced_extent(self.reduced or ())

    def accesses(self) -> list[tuple[str, MemAccess]]:
        """("r" or "w", access) in program order."""
        return [("w" if i.kind in ("store", "put") else "r", i.access) for i in self.instrs if i.access is not None]

    def patterns(self) -> list[tuple[Form, int]]:
        """(form, level) of the indices that it computes with, which cut its space as memory accesses do."""
        return [(i.payload, i.level) for i in self.instrs if i.kind == "coord"] + [  # type: ignore[misc]
            (i.payload.pattern, i.level) for i in self.instrs if i.kind == "dot"]  # type: ignore[attr-defined]

    @property
    def reduces(self) -> bool:
        return any(instr.kind == "reduce" for instr in self.instrs)

    @property
    def scans(self) -> int:
        """The directions in which it needs its rows whole: 1 from the first element on, 2 from the last, 3 both, 0 neither."""
        found = dict.fromkeys(2 if instr.payload else 1 for instr in self.instrs if instr.kind == "scan")
        return sum(found)

    @property
    def multiplies(self) -> bool:
        """True where it is a matrix product."""
        return any(instr.kind == "dot" for instr in self.instrs)

    @property
    def draws(self) -> bool:
        """True where it takes numbers from a generator, which it moves on."""
        return any(instr.kind == "offset" for instr in self.instrs)

    @property
    def waits(self) -> bool:
        """True where something over the full space needs a finished reduction."""
        done: set[int] = set()
        for instr in self.instrs:
            late = any(id(arg) in done for arg in instr.args)
            if late and (instr.level == FULL or instr.kind == "reduce"):
                return True
            if late or instr.kind == "reduce":
                done.add(id(instr))
        return False


def scratch_value(index: int, nbytes: int, producer: Node) -> Value:
    """A value that only kernels of this plan know: what one part of a node hands to another. Negative buffer index."""
    return Value(Buffer(-1 - index, nbytes, BufferKind.FRESH, False), 1, producer)
