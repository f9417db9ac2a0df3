"""Sums at places that indices name, in float32 memory of their own: of 16-bit numbers, which GPUs add in loops that wait for
their turn and round after each, and of numbers so many of which go to one place that they would wait for one another. Imports
`ir_nodes` and codegen's lowering modules.

ATen sorts the places for `index_put`, with float32 sums, and rounds after each number elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from codegen.expressions import Unsupported
from codegen.forms import collapse
from codegen.instructions import Instr, Part, scratch_value
from codegen.lowering import Lowering, fill_of
from codegen.promotion import HALF
from codegen.reductions import reduction, write_kept
from ir_nodes.layout import Layout
from ir_nodes.node import BufferKind, Node, Operand, Value

WIDENED, IN_CACHE = 1 << 25, 1 << 23
"""Elements of 16 bits up to which sums have float32 memory: of an embedding, and of what ATen would sort, which takes 120 us on
an H200 for 32,768 rows of 1,024 and some 80 for 16,384 rows of 512 that go into 1,000."""

OFTEN = 128
"""Numbers for each place from which they are summed in several tables, or atomics would meet too often."""
TABLES, FEWEST_TABLES, ALL_TABLES = 256, 8, 1 << 19
"""How many tables at most and at least, and their elements together at most."""

Place = tuple[Instr, int, int]
"""An index, the stride that it counts in, and the extent that it has to stay below."""


@dataclass
class Sums:
    """Where an op's numbers go: to ``target``, as ``layout``, which is ``before`` until then, or to one of so many ``tables`` of
    that layout; parts ``ahead`` and ``behind``."""

    target: Value
    layout: Layout
    before: Value
    ahead: list[Part] = field(default_factory=list)
    behind: list[Part] = field(default_factory=list)
    tables: int = 1

    def turns(self, lowering: Lowering, index: Layout) -> list[Place]:
        """The table of each of ``lowering``'s elements, seen over which ``index`` names places: all tables in turn, from one of
        its elements to the next."""
        if self.tables == 1:
            return []
        steps, step = [], 1
        for size, stride in zip(reversed(index.size), reversed(index.stride)):
            steps.append(step if stride else 0)
            step *= size if stride else 1
        turn = lowering.place(collapse(lowering.shape, tuple(reversed(steps))))
        return [(lowering.expr(f"({{0}} % {self.tables})", turn, dtype=turn.dtype), self.layout.numel, self.tables)]

    def around(self, part: Part) -> list[Part]:
        """``part``, which adds, between the others."""
        part.after = (self.before,)
        return [*self.ahead, part, *self.behind]


def sums_for(node: Node, source: Operand, scratch: int, numbers: int, together: bool = False) -> Sums | None:
    """For ``numbers`` that are added to ``source``; None: in place, as 16-bit ones are that GPUs add ``together``. Raises
    Unsupported where those that are not have too many places."""
    write = node.writes[0]
    if write.layout.dtype not in (torch.float32, *HALF):
        return None
    tables = tables_for(write.layout.numel, numbers) if fill_of(source) == 0 else 1
    if tables == 1 and (write.layout.dtype not in HALF or together):
        return None
    if write.layout.numel > IN_CACHE:
        raise Unsupported("a large table in 16 bits")
    return with_memory(node, source, scratch, tables)


def tables_for(numel: int, numbers: int) -> int:
    """In how many tables of ``numel`` elements so many are summed. A power of two, for it becomes a part of the kernel."""
    most = min(TABLES, ALL_TABLES // max(numel, 1))
    return 1 << most.bit_length() - 1 if most >= FEWEST_TABLES and numbers >= OFTEN * numel else 1


def with_memory(node: Node, source: Operand | None, scratch: int, tables: int) -> Sums:
    """float32 memory that holds ``source``, or zeros, first, and is rounded once, as the op's result, in the end; of several
    ``tables`` each holds zeros."""
    write = node.writes[0]
    layout, whole = (Layout.contiguous(torch.float32, size) for size in (write.layout.size, (tables, *write.layout.size)))
    sums = scratch_value(scratch, whole.nbytes, node)
    before, first = _begun(node, sums, whole, None if tables > 1 else source)
    last, dims = reduction(node, Operand(sums, whole), 0) if tables > 1 else (Lowering(node, layout.size), ())
    if tables > 1:
        write_kept(last, 0, last.reduce("add", last.load(Operand(sums, whole))), dims)
    else:
        last.write(0, last.load(Operand(sums, layout)))
    return Sums(sums, layout, before, [first], [last.part], tables)


def in_place(node: Node, source: Operand | None) -> Sums:
    """The result's memory, and the part that puts ``source``, or zeros, there where the op does not change memory in place.
    Raises Unsupported where others use it."""
    write = node.writes[0]
    if source is not None and write.base is not None and source.value is write.base and source.layout == write.layout:
        return Sums(write.value, write.layout, write.base)
    whole = write.base is None and write.layout.covers(write.value.buffer.nbytes)
    if write.value.buffer.kind is not BufferKind.FRESH or not whole:
        raise Unsupported("into memory that is in use")
    before, first = _begun(node, write.value, write.layout, source)
    return Sums(write.value, write.layout, before, [first])


def _begun(node: Node, target: Value, layout: Layout, source: Operand | None) -> tuple[Value, Part]:
    """What ``target``'s memory is first, and the part that puts ``source``, or zeros, there."""
    before, first = Value(target.buffer, 0, node), Lowering(node, layout.size)
    first.store(before, layout, first.expr("0.0", dtype=torch.float32) if source is None else first.load(source))
    return before, first.part
