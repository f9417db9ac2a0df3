"""Reads operands through a window of a larger index space, computing cheap elementwise producers anew instead of loading what
they store, so that slices, pads and concatenations take no memory of their own. Imports `ir_nodes` and codegen's leaf modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Callable, Iterable, Mapping, Sequence

import torch

from codegen.expressions import Unsupported
from codegen.forms import Form
from codegen.index_maps import Window, in_memory_order, repeated, through
from codegen.instructions import FULL, Instr, MemAccess, Part, place
from codegen.lowering import Lowering
from codegen.promotion import HALF, compute_dtype
from ir_nodes import settings
from ir_nodes.node import Buffer, Node, Operand, Value
from ir_nodes.ops import info

MAX_DEPTH, MAX_EXPRESSIONS, MAX_LOADS = 5, 10, 3
MAX_INSTRUCTIONS = 80
MOST_PARTS = 8
"""Parts, which are loaded under conditions of their own, that all readers of a value together have in its place at most. On an
H200 the gradient of an image's blur, three columns of three rows, takes 62 us from nine parts."""
MOST_MORE = 3
"""More loads than if it were stored that all readers of a value together make in its place at most, such as those of nine parts
of an image's edges."""
MOST_PIECES = 16
"""Of how many times as many elements a reader of costly values may walk, such as a concatenation of so many."""
_COSTLY = ("libdevice.", "pow", "_tanh", "_normal", "_logistic", "tl.exp", "tl.log", "div", "_ratio", "sqrt", "_root", "philox")

_SHARERS = ("pointwise", "copy")

Mapped = tuple[Form, int, int]
"""A form over the space being lowered, its byte offset, and how many elements each address has to be moved back by."""
Mapper = Callable[[Form, int, int], Mapped | None]
"""From (form over a producer's space, byte offset, item size)."""


@dataclass(slots=True)
class Known:
    """What has been lowered so far: the elementwise part that made a value, the newest value of each buffer, and narrow scratch
    values that say what wide ones do (`codegen.pooling`)."""

    parts: dict[Value, Part]
    newest: dict[Buffer, Value]
    narrow: dict[Value, Operand]

    def remember(self, node: Node, parts: list[Part]) -> None:
        for write in node.all_writes():
            self.newest[write.value.buffer] = write.value
        if len(parts) == 1 and parts[0].reduced is None and len(node.writes) == 1:
            self.parts[node.writes[0].value] = parts[0]

    def still_there(self, access: MemAccess) -> bool:
        """True where the value has not been overwritten."""
        return self.newest.get(access.value.buffer, access.value) is access.value


def nothing_known() -> Known:
    return Known({}, {}, {})


def identity_mapper(form: Form, byte_offset: int, itemsize: int) -> Mapped | None:
    return form, byte_offset, 0


def window_mapper(window: Window, numel: int, before: Mapper = identity_mapper) -> Mapper:
    """For operands that ``before`` maps to a space of ``numel`` elements, which lies in ``window``."""

    def mapper(form: Form, byte_offset: int, itemsize: int) -> Mapped | None:
        mapped = before(form, byte_offset, itemsize)
        wide = window.widen(mapped[0], numel) if mapped is not None else None
        if mapped is None or wide is None:
            return None
        return wide[0], mapped[1] - wide[1] * itemsize, mapped[2] + wide[1]

    return mapper


def spread_mapper(inner: int, step: int, numel: int) -> Mapper:
    """For operands over a space of ``numel`` elements, which stand ``step`` times ``inner`` apart in the large one."""

    def mapper(form: Form, byte_offset: int, itemsize: int) -> Mapped | None:
        wide = repeated(form, inner, step, numel)
        return None if wide is None else (wide, byte_offset, 0)

    return mapper


@dataclass(slots=True)
class Puller:
    """Writes into ``lowering`` what operands hold where ``valid`` (a bool instruction) is true; None: it reads nothing elsewhere
    that it does not read there, so that who reads it for the rest of the elements shares the load. ``held``: values that it has
    whole and reads only as they lie."""

    lowering: Lowering
    known: Known
    valid: Instr | None
    held: Mapping[Value, tuple[MemAccess, Instr]] = field(default_factory=dict)

    def operand(self, access: MemAccess, dtype: torch.dtype, rounded: torch.dtype | None, mapper: Mapper,
                depth: int = 0, alone: bool = True) -> Instr:
        """The elements that ``access`` addresses over the mapper's space. ``alone``: nobody else reads what it is needed for.
        Raises Unsupported where its dimensions do not fit."""
        part = self.known.parts.get(access.value)
        instrs = self.lowering.part.instrs
        once = read_once(access.value)
        alone &= once and not access.value.buffer.live
        held = self.held.get(access.value)
        fits = depth < MAX_DEPTH and len(instrs) < MAX_INSTRUCTIONS
        if part is not None and held is None and fits and self._is_cheap(part, access, alone):
            before = len(instrs)
            try:
                made = self.part(part, _chained(part, access, mapper), depth + 1, alone)
                if self._fewer(instrs[before:], 1 if once else len(access.value.users)):
                    return made
                del instrs[before:]
            except Unsupported:
                del instrs[before:]
        mapped = mapper(access.form, access.byte_offset, access.dtype.itemsize)
        if mapped is None:
            raise Unsupported("its operands' dimensions do not nest")
        if depth and not self.known.still_there(access):
            raise Unsupported("what it was computed from has been overwritten")
        form, byte_offset, shift = mapped
        if held is not None:
            return _as_it_lies(*held, (form, byte_offset, access.dtype))
        moved_back = access.shift + shift if byte_offset < 0 else 0
        seen = replace(access, form=form, byte_offset=byte_offset, shift=moved_back, level=FULL)
        conditions = () if self.valid is None else (self.valid,)
        return self.lowering.add(Instr("load", dtype, FULL, conditions, access=seen, rounded=rounded))

    def _fewer(self, instrs: Sequence[Instr], users: int) -> bool:
        """Are ``instrs`` in all of ``users`` better than to store the value once and load it there? Not if many are loads, or
        loads under conditions of their own, as parts of what is wanted."""
        loads = [one for one in instrs if one.kind in ("load", "take")]
        parts = sum(one.kind == "load" and bool(one.args) and one.args[0] is not self.valid for one in loads)
        return parts * users <= MOST_PARTS and (users - 1) * (len(loads) - 1) <= MOST_MORE

    def part(self, part: Part, mapper: Mapper, depth: int, alone: bool) -> Instr:
        """What ``part`` stores."""

        def leaf(instr: Instr, args: tuple[Instr, ...]) -> Instr | None:
            if instr.kind == "load" and len(args) < 2 and instr.access is not None:
                return self._where(args).operand(instr.access, instr.dtype, instr.rounded, mapper, depth, alone)
            if instr.kind == "take" and instr.access is not None:
                return self._taken(instr, args, mapper)
            if instr.kind == "coord":
                return self._place(instr.payload, mapper)  # type: ignore[arg-type]
            if instr.kind not in ("expr", "scalar", "size"):
                raise Unsupported("it looks elements up, or draws them")
            return None

        return copied(part, leaf, self.lowering.add)

    def _where(self, conditions: tuple[Instr, ...]) -> Puller:
        """For operands that are read only where these are true, too: a window within a window."""
        if not conditions:
            return self
        (valid,) = conditions
        return replace(self, valid=self.lowering.both(self.valid, valid))

    def _place(self, form: Form, mapper: Mapper) -> Instr:
        """The number that ``form`` gives each element."""
        mapped = mapper(form, 0, 1)
        if mapped is None:
            raise Unsupported("its operands' dimensions do not nest")
        return [self.lowering.add(instr) for instr in place(mapped[0], mapped[1])][-1]

    def _taken(self, take: Instr, args: tuple[Instr, ...], mapper: Mapper) -> Instr:
        """What ``take`` reads at these indices."""
        access = take.access
        assert access is not None
        mapped = mapper(access.form, access.byte_offset, access.dtype.itemsize)
        if mapped is None or mapped[2] or self.valid is not None or not self.known.still_there(access):
            raise Unsupported("what it looks up lies otherwise, is looked up under a condition, or has been overwritten")
        return self.lowering.add(replace(take, args=args, access=replace(access, form=mapped[0], byte_offset=mapped[1])))

    def _is_cheap(self, part: Part, access: MemAccess, alone: bool) -> bool:
        """Is it better to compute what ``access`` reads again? What costs many instructions only for one reader that reads each
        element about once: not the sines of a rotary embedding, which are few and read for each head of each sequence."""
        loads = [instr for instr in part.instrs if instr.kind in ("load", "take")]
        texts = [instr.text for instr in part.instrs if instr.kind == "expr" and instr.level == FULL]
        fits = len(loads) <= MAX_LOADS and len(texts) <= MAX_EXPRESSIONS
        once = alone and part.numel * MOST_PIECES >= self.lowering.part.numel
        plain = not any(costly in text for text in texts for costly in _COSTLY)
        stores = [instr for instr in part.instrs if instr.kind == "store"]
        return fits and (plain or once) and len(stores) == 1 and not access.shift


def read_once(value: Value) -> bool:
    """Is each element of ``value`` computed once although nobody stores it? It is read once, or elementwise readers share its
    elements out between them, as chunks'."""
    read = [operand.layout for user in value.users for operand in user.reads if operand.value is value]
    if len(read) <= 1 and len(value.users) == 1:
        return True
    bases = [write.base for user in value.users for write in user.all_writes()]
    if value in bases or any(info(user.target).kind not in _SHARERS for user in value.users):
        return False
    return sum(layout.numel * layout.itemsize for layout in read) <= value.buffer.nbytes


def read_through(lowering: Lowering, known: Known, operand: Operand) -> Instr:
    """The operand's elements over the whole space, or what makes them, where that is cheap, and perhaps not written otherwise or
    made of one operand."""
    maker, value = known.parts.get(operand.value), operand.value
    reads = sum(instr.kind == "load" for instr in maker.instrs) if maker is not None else 0
    if not settings.enabled("windows") or value.buffer.live or len(value.users) > 1 and reads > 1:
        return lowering.load(operand)
    dtype = operand.layout.dtype
    access = lowering.access(operand.value, operand.layout)
    return Puller(lowering, known, None).operand(access, compute_dtype(dtype), dtype if dtype in HALF else None, identity_mapper)


def sum_through(lowering: Lowering, known: Known, operands: Iterable[Operand], dtype: torch.dtype | None = None) -> Instr:
    """The sum of these operands' elements, one after the other, each read through; as ``dtype``, or as they are computed with."""
    terms = (read_through(lowering, known, operand) for operand in operands)
    first, *others = (term if dtype is None else lowering.cast(term, dtype) for term in terms)
    for other in others:
        first = lowering.expr("{0} + {1}", first, other, dtype=other.dtype)
    return first


def copied(part: Part, leaf: Callable[[Instr, tuple[Instr, ...]], Instr | None], add: Callable[[Instr], Instr]) -> Instr:
    """What ``part`` stores, made of its instructions, or of what ``leaf`` has in the place of one with these arguments, written
    with ``add``."""
    made: dict[int, Instr] = {}
    for instr in part.instrs:
        if instr.kind == "store":
            return made[id(instr.args[0])]
        args = tuple(made[id(arg)] for arg in instr.args)
        found = leaf(instr, args)
        if found is None:
            found = add(replace(instr, args=args, level=max((arg.level for arg in args), default=instr.level)))
        made[id(instr)] = found
    raise AssertionError("a part without a store")


def _chained(part: Part, access: MemAccess, mapper: Mapper) -> Mapper:
    """The mapper for operands of ``part``, whose result ``access`` reads."""
    (store,) = (instr.access for instr in part.instrs if instr.kind == "store")
    assert store is not None
    itemsize = access.dtype.itemsize
    start = (access.byte_offset - store.byte_offset) // itemsize
    same = access.form == store.form and start == 0
    inside = store.low <= access.low and access.high <= store.high
    if access.dtype is not store.dtype or not same and not inside:
        raise Unsupported("its producer stores another layout")

    def chained(form: Form, byte_offset: int, size: int) -> Mapped | None:
        if same:
            return mapper(form, byte_offset, size)
        dense = in_memory_order(form, store.form, part.numel)
        picked = through(dense, access.form, start) if dense is not None else None
        return None if picked is None else mapper(picked[0], byte_offset + picked[1] * size, size)

    return chained


def _as_it_lies(lies: MemAccess, whole: Instr, seen: tuple[Form, int, torch.dtype]) -> Instr:
    """``whole`` for a reader that sees these of its elements; what is only filled with a number has that everywhere."""
    filled = whole.kind != "load" and lies.dtype is seen[2]
    if not filled and (lies.form, lies.byte_offset, lies.dtype) != seen:
        raise Unsupported("it reads one part of what it writes another of")
    return whole
