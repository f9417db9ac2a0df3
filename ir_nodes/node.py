"""The parts a graph is made of. Imports torch and `ir_nodes.layout` only.

A *buffer* is what a storage owns. Every write to a buffer makes a new *value* of it, so each value is assigned once. An
*operand* is a value seen through a layout: a view is never a node. A *node* is one recorded op.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterator

from ir_nodes.layout import Layout


class BufferKind(enum.Enum):
    """Where a buffer's first value comes from."""

    INPUT = "input"  # holds bytes on the device before the recording starts
    FRESH = "fresh"  # made by the recording
    GENERATOR = "generator"  # a random generator's state; every random op reads and writes it


@dataclass(frozen=True, slots=True)
class Frame:
    """The user's source line."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(slots=True, eq=False)
class SegmentCall:
    """One run of a named part of the program: ``call`` counts the segment's runs from 0, ``parent`` is the call around it.

    One object for each run, so that it can be compared by identity.
    """

    name: str
    backward: bool = False
    call: int = 0
    parent: SegmentCall | None = None
    owners: tuple[int, ...] = ()  # the schedulers that it ran under, outermost first

    def chain(self) -> Iterator[SegmentCall]:
        """This call, then those around it, innermost first."""
        found: SegmentCall | None = self
        while found is not None:
            yield found
            found = found.parent

    def __str__(self) -> str:
        return f"{self.name}#{self.call}" if self.call else self.name


@dataclass(slots=True, eq=False)
class Buffer:
    index: int
    nbytes: int
    kind: BufferKind
    live: bool  # does a tensor still own it when the recording ends?

    def __str__(self) -> str:
        return f"b{self.index}"


@dataclass(slots=True, eq=False, repr=False)
class Value:
    """Contents of ``buffer`` after its ``version``-th write (0: before the first)."""

    buffer: Buffer
    version: int
    producer: Node | None = None  # None: the contents when the recording starts
    users: dict[Node, None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.buffer}.{self.version}"

    __repr__ = __str__  # fields lead to all of the graph, by many ways


@dataclass(frozen=True, slots=True)
class Operand:
    """A read of ``value`` through ``layout``."""

    value: Value
    layout: Layout

    def __str__(self) -> str:
        return f"{self.value}:{self.layout}"


@dataclass(frozen=True, slots=True)
class Write:
    """A new value of a buffer: ``base``'s bytes with the elements of ``layout`` replaced.

    ``base`` is None where nothing of the old contents is needed. ``reads_old`` says that the op itself computes from the
    old elements (``mul_``), not only that bytes outside ``layout`` survive.
    """

    value: Value
    layout: Layout
    base: Value | None
    reads_old: bool

    def __str__(self) -> str:
        base = f" over {self.base}" if self.base else ""
        return f"{self.value}:{self.layout}{base}"


@dataclass(frozen=True, slots=True)
class Target:
    """An argument that the op writes to: ``node.writes[index]``."""

    index: int


@dataclass(frozen=True, slots=True)
class ScalarInput:
    """A number that is an input of the graph, so that changing it never recompiles; 0-d CPU tensors are such numbers too.

    ``kind``: "float", "int", "bool", "complex"; "double": a float that makes integers it meets float64, for it was a tensor.
    """

    index: int
    kind: str


@dataclass(frozen=True, slots=True)
class Access:
    """How a recording names an operand, before values exist. ``mode``: "r", "w" (old elements unused) or "rw"."""

    buffer: Buffer
    layout: Layout
    mode: str = "r"


Arg = Any  # Operand | Target | ScalarInput | None | bool | int | float | str | dtype | ... | tuple of Arg


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One recorded op.

    ``args`` follow the schema of ``target`` ("aten::add.out"), keyword-only ones included. ``writes`` holds first the
    written arguments in schema order (a `Target` stands in their place), then the op's new outputs. ``effects`` are
    writes that the schema does not show: the state of a random generator. ``returns`` names for each tensor the op
    newly returns its index in ``writes`` (None: undefined or no tensor).
    """

    index: int
    target: str
    args: tuple[Arg, ...]
    reads: tuple[Operand, ...]
    writes: tuple[Write, ...]
    effects: tuple[Write, ...] = ()
    returns: tuple[int | None, ...] = ()
    frame: Frame | None = None
    instr: int = -1  # the recorded instruction it came from
    segment: SegmentCall | None = None  # the innermost one it was recorded in
    relaid: bool = False  # its layouts are the compiler's, not the recording's
    changed: bool = False  # its op is the compiler's, in place of the recorded one
    left_out: tuple[int, ...] = ()  # arguments that the recorded op had a tensor for and the compiler's has None
    stage: int = 0  # nodes of different stages keep their order and share no kernel
    chapter: int = 0  # kernels of different chapters share no launch
    again: bool = False  # computes once more what another node has computed, for the nodes that follow it only
    twin: Node | None = field(default=None, repr=False)  # then the other node
    joins: Node | None = field(default=None, repr=False)  # so it does, but in this node's kernel, which reads what that takes

    @property
    def as_recorded(self) -> bool:
        """Is its op the recorded one, with what was recorded for it?"""
        return self.instr >= 0 and not self.changed

    @property
    def name(self) -> str:
        """The op without namespace and overload: "add" for "aten::add.out"."""
        return self.target.split("::")[-1].split(".")[0]

    def inputs(self) -> Iterator[Value]:
        """Every value it needs, bases of partial writes included; may repeat."""
        for operand in self.reads:
            yield operand.value
        for write in self.all_writes():
            if write.base is not None:
                yield write.base

    def all_writes(self) -> tuple[Write, ...]:
        return self.writes + self.effects

    def places(self) -> list[tuple[Value, Layout]]:
        """Every layout through which it reads or writes, reads first."""
        return [(place.value, place.layout) for place in (*self.reads, *self.writes)]

    def relay(self, layout_of: Callable[[Operand | Write], Layout]) -> None:
        """Put other layouts into everything that it reads and writes."""
        def seen(item: Any) -> Any:
            if isinstance(item, tuple):
                return tuple(map(seen, item))
            return replace(item, layout=layout_of(item)) if isinstance(item, (Operand, Write)) else item

        before = (self.reads, self.writes)
        self.args, self.reads, self.writes = seen(self.args), seen(self.reads), seen(self.writes)
        self.relaid = self.relaid or before != (self.reads, self.writes)

    def __str__(self) -> str:
        outs = ", ".join(map(str, self.writes))
        return f"{outs} = {self.target}({', '.join(map(show_arg, self.args))})"

    __repr__ = __str__


def leaves(arg: Arg) -> Iterator[Arg]:
    """What an argument holds, nested or not, in order."""
    if isinstance(arg, tuple):
        for item in arg:
            yield from leaves(item)
    else:
        yield arg


def show_arg(arg: Arg) -> str:
    """An argument as the printed IR shows it."""
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(show_arg, arg)) + "]"
    if isinstance(arg, Target):
        return f"out{arg.index}"
    if isinstance(arg, ScalarInput):
        return f"s{arg.index}:{arg.kind}"
    return str(arg)
