"""Finds what lies between a norm and the gradient that comes back, so that the norm's backward computes it anew. Imports
`ir_nodes` and codegen's leaf modules.

The norm's input is read there anyhow. So neither what an activation was given has to be read again, which then is not stored
unless others want it, nor the gradient behind the activation, which the norm's backward reads twice, to be stored at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch

from codegen import forms
from codegen.expressions import Unsupported
from codegen.forms import Form
from codegen.instructions import Instr, MemAccess, Part
from codegen.limits import check_part
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF
from codegen.pulled import Known, copied
from codegen.reductions import operand_of
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand, Value, Write

DEEPEST = 6
"""At most so many ops between a norm and its gradient, of so many instructions, are computed anew."""
MOST_INSTRUCTIONS = 80

_PLAIN = ("expr", "scalar", "size", "store")
_POWER = "_pow("
"""What takes a hundred instructions and more, for which a kernel of a few bytes an element waits."""

Lies = tuple[Form, int, torch.dtype]
"""A value's elements one after the other, by form, offset in bytes and type."""

Normal = Callable[[], Instr]
"""Writes what the norm gave for the element at hand, as it was before it was stored."""


def widened(operand: Operand, known: Known) -> Operand:
    """What ``operand`` is a copy of, element by element, of as many bytes or fewer, as autocast makes for norms; else itself."""
    node = operand.value.producer
    if node is None or node.name not in ("copy_", "_to_copy", "clone") or not settings.enabled("recompute"):
        return operand
    wrote, read = node.writes[0], next(iter(node.reads), None)
    if read is None or len(node.writes) != 1 or wrote.value is not operand.value or wrote.layout != operand.layout:
        return operand
    was, now = read.layout, operand.layout
    exact = was.dtype is now.dtype or was.dtype in HALF and now.dtype is torch.float32
    alike = (was.size, was.stride, was.flipped) == (now.size, now.stride, now.flipped)
    if not exact or not alike or known.newest.get(read.value.buffer, read.value) is not read.value:
        return operand
    return widened(read, known)


@dataclass(slots=True)
class Behind:
    """The gradient ``grad`` that a norm's backward takes. ``made``: values on the way from the norm to it that are computed anew,
    by the parts that made them; ``out``: what the norm wrote, None where that is not known; ``args``: the norm's arguments."""

    grad: Operand
    known: Known
    out: Write | None = None
    args: dict[str, Any] = field(default_factory=dict)
    made: frozenset[Value] = frozenset()

    def layouts(self) -> list[Layout]:
        """How that lies which is read for each element."""
        if not self.made:
            return [self.grad.layout]
        reads = [read for value in self.made if value.producer is not None for read in value.producer.reads]
        return [read.layout for read in reads if read.value not in self.made and read.layout.size == self.grad.layout.size]

    def load(self, lowering: Lowering, layout: Layout, normal: Normal) -> Instr:
        """The gradient of the element at hand, seen through ``layout``."""
        instrs = lowering.part.instrs
        before = len(instrs)
        if self.made:
            try:
                made = _Maker(self, lowering, normal).part(self.known.parts[self.grad.value])
                if len(instrs) - before <= MOST_INSTRUCTIONS:
                    check_part(replace(lowering.part))  # facts of what is there so far
                    return made
            except Unsupported:
                pass
            del instrs[before:]
        return lowering.load(Operand(self.grad.value, layout))


@dataclass(slots=True)
class _Maker:
    """Writes what lies ``behind`` a norm into ``lowering``."""

    behind: Behind
    lowering: Lowering
    normal: Normal
    out: Instr | None = None

    def part(self, part: Part) -> Instr:
        return copied(part, self._leaf, self.lowering.add)

    def _leaf(self, instr: Instr, _: tuple[Instr, ...]) -> Instr | None:
        access = instr.access
        if instr.kind != "load" or access is None:
            return None
        if access.value in self.behind.made and _stored(self.behind.known.parts[access.value]) == [_seen(access)]:
            return self.part(self.behind.known.parts[access.value])
        if not _sees_all(access, self.behind.out):
            return self.lowering.add(replace(instr, args=()))
        if self.out is None:
            assert self.behind.out is not None
            self.out = self.lowering.cast(self.normal(), self.behind.out.layout.dtype)
        return self.out


def behind(args: dict[str, Any], known: Known, statistics: tuple[str, str]) -> Behind:
    """How a norm's backward with these arguments, of which ``statistics`` name the mean and the reciprocal deviation, gets its
    gradient."""
    grad = widened(operand_of(args["grad_out"]), known)
    plain = Behind(grad, known)
    if not settings.enabled("recompute") or not _is_alone(grad.value):
        return plain
    norm = _norm(args, known, statistics)
    for whole in (True, False):
        found = _Finder(known, _first(norm) if norm is not None else None, whole)
        if grad.layout.flipped or not found.is_made_anew(grad.value, _lies(grad.layout)):
            return plain
        found.follow(grad.value, 0)
        if found.is_cheaper(grad):
            made = frozenset(found.made)
            return Behind(grad, known, found.out, arguments(norm), made) if norm and found.reaches else replace(plain, made=made)
    return plain


def _norm(args: dict[str, Any], known: Known, statistics: tuple[str, str]) -> Node | None:
    """The norm whose backward has these arguments, if all that its elements were made of is still there, and the statistics were
    kept in the numbers' own precision."""
    kept = [args[name] for name in statistics]
    norm = kept[0].value.producer if isinstance(kept[0], Operand) else None
    if norm is None or norm.name not in ("native_batch_norm", "native_group_norm") or _first(norm) is None:
        return None
    forward = arguments(norm)
    made = [None if place is None else norm.writes[place] for place in norm.returns[1:]]
    saved = all(write is not None and isinstance(operand, Operand) and write.value is operand.value
                and write.layout.dtype in (torch.float32, torch.float64) for write, operand in zip(made, kept))
    alike = (widened(forward["input"], known) == widened(args["input"], known)
             and forward.get("weight") == args.get("weight") and forward.get("group") == args.get("group"))
    needed = [forward[name] for name in ("weight", "bias") if forward.get(name) is not None]
    there = all(known.newest.get(one.value.buffer, one.value) is one.value for one in (*needed, widened(args["input"], known)))
    return norm if saved and alike and there and forward.get("training", True) is True else None


def _first(norm: Node) -> Write | None:
    return norm.writes[norm.returns[0]] if norm.returns[0] is not None else None


def _is_alone(value: Value) -> bool:
    """Does one node read it, and nobody else?"""
    return len(value.users) == 1 and not value.buffer.live


class _Finder:
    """Walks from a gradient to the norm that ``out`` is of; if ``whole``, also to what the gradient itself was made of."""

    def __init__(self, known: Known, out: Write | None, whole: bool) -> None:
        self.known, self.out, self.whole = known, out, whole
        self.made: dict[Value, None] = {}
        self.loaded: dict[tuple[object, ...], tuple[MemAccess, int]] = {}  # and how often more than otherwise
        self.spared: dict[Value, None] = {}  # what forward kept, for others, too
        self.reaches = False  # is anything made of the norm's result?

    def follow(self, value: Value, depth: int, further: bool = False) -> None:
        """Note what makes ``value``, as far back as that is cheap. ``further``: it is made of what forward kept."""
        self.made[value] = None
        for read in _loads(self.known.parts[value]):
            leads, alone = _sees_all(read, self.out) or self._leads(read, depth + 1), _is_alone(read.value)
            kept = leads and not alone and not further
            if kept:
                self.spared[read.value] = None
            if _sees_all(read, self.out):
                self.reaches = True
                continue
            if depth < DEEPEST and (leads or self.whole and alone and self.is_made_anew(read.value, _seen(read))):
                self.follow(read.value, depth + 1, further or kept)
            else:
                before = self.loaded.get(read.key, (read, 2))[1]
                self.loaded[read.key] = read, min(before, 2 if further else 1)

    def is_made_anew(self, value: Value, seen: Lies) -> bool:
        """Do plain instructions make all of ``value``, as it is ``seen``?"""
        part = self.known.parts.get(value)
        if part is None:
            return False
        plain = all(one.kind in _PLAIN and _POWER not in one.text or one.kind == "load" and not one.args for one in part.instrs)
        return plain and _stored(part) == [seen]

    def is_cheaper(self, grad: Operand) -> bool:
        """Two kernels would read it all. Otherwise the first reads the gradient's part of it and what forward kept, and writes
        what the second reads."""
        if not all(self.known.still_there(access) for access, _ in self.loaded.values()):
            return False
        more = sum(forms.touched(access.form) * access.dtype.itemsize * times for access, times in self.loaded.values())
        return more < 2 * grad.value.buffer.nbytes + sum(value.buffer.nbytes for value in self.spared)

    def _leads(self, access: MemAccess, depth: int) -> bool:
        """Is what ``access`` reads made of the norm's result?"""
        return depth <= DEEPEST and self.is_made_anew(access.value, _seen(access)) and any(
            _sees_all(read, self.out) or self._leads(read, depth + 1) for read in _loads(self.known.parts[access.value]))


def _sees_all(access: MemAccess, out: Write | None) -> bool:
    """Does ``access`` read what a norm has written, element after element?"""
    return out is not None and access.value is out.value and _lies(out.layout) == _seen(access)


def _stored(part: Part) -> list[Lies]:
    return [_seen(one.access) for one in part.instrs if one.kind == "store" and one.access is not None]


def _loads(part: Part) -> list[MemAccess]:
    return [one.access for one in part.instrs if one.kind == "load" and one.access is not None]


def _lies(layout: Layout) -> Lies:
    return forms.collapse(layout.size, layout.stride), layout.offset * layout.itemsize, layout.dtype


def _seen(access: MemAccess) -> Lies:
    return access.form, access.byte_offset, access.dtype
