"""The instructions a fused kernel is built of, before it has blocks or names. Imports torch, `ir_nodes` and `codegen.forms`.

Every node is lowered once, on its own, into a `Part` (or several, where it needs more than one iteration space). Fusion
looks only at a part's space and memory accesses; emission concatenates instructions and forwards what one part stores to
the parts that load it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Hashable, Mapping

import torch

from codegen.forms import Form, Reduced, reduced_extent
from ir_nodes.node import Buffer, BufferKind, Node, Value

UNIFORM, KEPT, FULL = 0, 1, 2
"""How often an instruction's result differs: never, per kept element of a reduction, per element of the whole space."""

IN_BITS = "bits"
"""The ``text`` of a take or put of a mask whose elements are bits: its last argument is an element's place among them."""


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
    "offset", "random" or "check".

    ``text`` is an expression over {0}, {1}, ... (expr) or the combining function's name (reduce, scan). ``dtype`` is what the
    result is held in. A load's argument, if it has one, says where there is something to load.
    ``payload`` is the kind's own datum: the form of a coord, the scalar's index, the size, the generator's buffer (seed),
    (buffer, increment) of an offset, whether a scan runs backwards, what a checked index has to stay below, the
    `codegen.draws.Stream` of a random number, (stride, extent) of each index that a take's or put's addresses depend on: the
    arguments of a take, and of a put behind its value; its ``text`` is "add" or "set". That of a check is what is said where it
    fails.
    """

    kind: str
    dtype: torch.dtype
    level: int
    args: tuple["Instr", ...] = field(default=(), repr=False)  # shared, so that showing them might never end
    text: str = ""
    access: MemAccess | None = None
    payload: object = None
    rounded: torch.dtype | None = None  # a 16-bit float dtype that the value is known to be representable in


Accesses = tuple[tuple[str, MemAccess], ...]
Named = Value | Buffer | int
"""What instructions name: a value, a generator's buffer, the index of a number input."""
Structure = tuple[Hashable, tuple[Named, ...]]
"""Equal for what differs in names only, and the names, each as often as it is used."""


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
    later: int = 0  # levels above what it waits for: room for others to share kernels below it
    apart: bool = False  # several programs share each reduction, so that what is made of it is a kernel of its own
    _facts: Facts | None = field(default=None, init=False, repr=False)
    _structure: Structure | None = field(default=None, init=False, repr=False)

    @property
    def kept(self) -> int:
        """How many results each of the part's reductions has."""
        return self.numel // reduced_extent(self.reduced or ())

    @property
    def facts(self) -> Facts:
        """What its instructions come to. They are complete: nothing is added to a part that somebody has asked."""
        if self._facts is None:
            self._facts = Facts.of(self.instrs)
        return self._facts

    @property
    def structure(self) -> Structure:
        """What it computes, whatever it is given: equal for parts that differ in ``names`` only."""
        if self._structure is None:
            self._structure = structure(self.instrs)
        return self._structure

    def renamed(self, names: Mapping[Named, Named]) -> Part:
        """The same with other values and number inputs, as ``names`` tells for each of its own."""
        made: dict[Instr, Instr] = {}
        accesses: list[tuple[str, MemAccess]] = []
        for i in self.instrs:
            access, payload = i.access, i.payload
            if access is not None:
                value: Any = names[access.value]
                access = MemAccess(value, access.form, access.dtype, access.byte_offset, access.level, access.low, access.high,
                                   access.index_stride, access.shift, access.scattered)
                accesses.append(("w" if i.kind in ("store", "put") else "r", access))
            if i.kind == "scalar":
                payload = names[payload]  # type: ignore[index]
            made[i] = Instr(i.kind, i.dtype, i.level, tuple([made[arg] for arg in i.args]), i.text, access, payload, i.rounded)
        other = Part(self.node, self.numel, self.reduced, list(made.values()), self.column, self.after, self.later, self.apart)
        key, old = self.structure
        other._structure = key, tuple([names[name] for name in old])
        facts = self.facts
        other._facts = Facts(tuple(accesses), facts.patterns, facts.kinds, facts.moved, facts.waits, facts.scans,
                             facts.work)
        return other

    def accesses(self) -> Accesses:
        """("r" or "w", access) in program order."""
        return self.facts.accesses

    def patterns(self) -> tuple[tuple[Form, int], ...]:
        """(form, level) of the indices that it computes with, which cut its space as memory accesses do."""
        return self.facts.patterns

    @property
    def reduces(self) -> bool:
        return "reduce" in self.facts.kinds

    @property
    def scans(self) -> int:
        """The directions in which it needs its rows whole: 1 from the first element on, 2 from the last, 3 both, 0 neither."""
        return self.facts.scans

    @property
    def multiplies(self) -> bool:
        """True where it is a matrix product."""
        return "dot" in self.facts.kinds

    @property
    def draws(self) -> bool:
        """True where it takes numbers from a generator, which it moves on."""
        return "offset" in self.facts.kinds

    @property
    def waits(self) -> bool:
        """True where something over the full space needs a finished reduction."""
        return self.facts.waits


@dataclass(frozen=True, slots=True)
class Facts:
    """What fusion asks of a part again and again: see the properties of `Part`. ``moved``: bytes that it loads and stores;
    ``work``: machine instructions that each element takes, by rule of thumb."""

    accesses: Accesses
    patterns: tuple[tuple[Form, int], ...]
    kinds: frozenset[str]
    moved: int
    waits: bool
    scans: int
    work: int

    @staticmethod
    def of(instrs: list[Instr]) -> Facts:
        kinds = frozenset([i.kind for i in instrs])
        accesses = tuple([("w" if i.kind in ("store", "put") else "r", i.access) for i in instrs if i.access is not None])
        patterns = [(i.payload, i.level) for i in instrs if i.kind == "coord"] if "coord" in kinds else []
        products: list[Any] = [i for i in instrs if i.kind == "dot"] if "dot" in kinds else []
        patterns += [(i.payload.pattern, i.level) for i in products]
        moved = sum([access.high - access.low for _, access in accesses])
        scans = sum({2 if i.payload else 1 for i in instrs if i.kind == "scan"}) if "scan" in kinds else 0
        late = "reduce" in kinds and waits(instrs)
        work = sum([_work(i) for i in instrs if i.level == FULL])
        return Facts(accesses, tuple(patterns), kinds, moved, late, scans, work)  # type: ignore[arg-type]


def _work(instr: Instr) -> int:
    return work_of(instr.text if instr.kind == "expr" else "")


def work_of(text: str) -> int:
    """About how many machine instructions an expression takes: a quick function few, one that is exact everywhere tens."""
    calls, fast, powers = (text.count(f"libdevice.{name}") for name in ("", "fast_", "exp("))
    calls += text.count("_pow")
    return 1 + 40 * (calls - fast - powers) + 4 * fast + 10 * (powers + text.count("_rn("))


def place(form: Form, start: int = 0) -> list[Instr]:
    """What makes the number that ``form`` gives each element of the full space, counted from ``start``; it is the last one."""
    at = Instr("coord", torch.int32, FULL, payload=form)
    if not start:
        return [at]
    number = Instr("size", torch.int64, UNIFORM, payload=start)
    narrow = Instr("expr", torch.int32, UNIFORM, (number,), "{0}.to(tl.int32)")
    return [at, number, narrow, Instr("expr", torch.int32, FULL, (at, narrow), "({0} + {1})")]


def rewritten(part: Part, instead: Callable[[Instr], list[Instr] | None]) -> Part:
    """``part`` with instructions replaced by those that ``instead`` gives for them, the last of which stands for it; None: it
    stays. Where arguments are of a lower level, so is what is made of them."""
    out: list[Instr] = []
    made: dict[Instr, Instr] = {}
    for instr in part.instrs:
        args = tuple([made[arg] for arg in instr.args])
        if args != instr.args:
            level = max([arg.level for arg in args]) if instr.kind == "expr" else instr.level
            new = replace(instr, args=args, level=level)
        else:
            new = instr
        out += instead(new) or [new]
        made[instr] = out[-1]
    return replace(part, instrs=out)


def waits(instrs: list[Instr]) -> bool:
    """True where something over the full space needs a finished reduction."""
    done: set[int] = set()
    for instr in instrs:
        late = any(id(arg) in done for arg in instr.args)
        if late and (instr.level == FULL or instr.kind == "reduce"):
            return True
        if late or instr.kind == "reduce":
            done.add(id(instr))
    return False


def structure(instrs: list[Instr]) -> Structure:
    """The structure of instructions in order."""
    place: dict[Instr, int] = {}
    rows: list[Hashable] = []
    names: list[Named] = []
    for instr in instrs:
        payload: Any = instr.payload
        if instr.kind == "scalar" or instr.kind == "seed":
            names.append(payload)
            payload = None
        elif instr.kind == "offset":
            names.append(payload[0])
            payload = payload[1]
        access = instr.access
        seen: Hashable = None
        if access is not None:
            names.append(access.value)
            seen = (access.form, access.dtype, access.byte_offset, access.level, access.low, access.high, access.index_stride,
                    access.shift, access.scattered)
        rows.append((instr.kind, instr.dtype, instr.level, instr.text, tuple([place[arg] for arg in instr.args]), seen, payload))
        place[instr] = len(place)
    return tuple(rows), tuple(names)


def scratch_value(index: int, nbytes: int, producer: Node) -> Value:
    """A value that only kernels of this plan know: what one part of a node hands to another. Negative buffer index."""
    return Value(Buffer(-1 - index, nbytes, BufferKind.FRESH, False), 1, producer)
