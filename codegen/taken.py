"""Computes what is read by index where it is read, instead of storing it for that: mirrored, rolled, resized and pooled operands,
picked rows. Imports codegen's leaf modules and `ir_nodes`.

Only what nobody else reads or what is made of no more bytes than it has, and what costs little, or is read once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Hashable, Mapping

import torch

from codegen import forms
from codegen.expressions import Unsupported
from codegen.forms import Form
from codegen.index_maps import through
from codegen.instructions import FULL, UNIFORM, Instr, MemAccess, Part, place, rewritten
from codegen.limits import check_part
from codegen.pulled import MAX_DEPTH, Known, copied
from codegen.reordering import stores
from ir_nodes.node import Value

OFTEN, MOST_READ = 4, 2
"""Up to how many reads of a value have two operands in its place; more of them have one."""
MOST_WORK = 48
"""Machine instructions that take about as long as to write an element to memory and read it again."""
MOST_INSTRUCTIONS = 200
PLAIN = frozenset(("load", "expr", "scalar", "size", "coord", "store"))


def compute_taken(part: Part, known: Known) -> Part:
    """The part with reads by index of cheap values replaced by what makes these; the same part where there are none, or where
    others would have to be stored instead."""
    made = part
    try:
        for _ in range(MAX_DEPTH):
            makers = {value: maker for value in _read(made)
                      if (maker := known.parts.get(value)) is not None and _is_cheap(made, maker, known)}
            if not makers:
                break
            made = _replaced(made, makers)
            check_part(made)
    except Unsupported:
        return part
    before, after = _read(part), _read(made)
    stored = sum(value.buffer.nbytes for value in after if value not in before and value in known.parts)
    spared = sum(value.buffer.nbytes for value in before if value not in after)
    return made if stored <= spared and len(made.instrs) <= MOST_INSTRUCTIONS else part


def _read(part: Part) -> dict[Value, None]:
    return dict.fromkeys(access.value for mode, access in part.accesses() if mode == "r")


def _replaced(part: Part, makers: Mapping[Value, Part]) -> Part:
    """The part with all reads by index of these values replaced."""
    shared: dict[Hashable, Instr] = {}

    def made_here(instr: Instr) -> list[Instr] | None:
        maker = makers.get(instr.access.value) if instr.kind == "take" and instr.access is not None else None
        return _Taker(instr, shared).made(maker) if maker is not None else None

    return rewritten(part, made_here)


def _is_cheap(part: Part, maker: Part, known: Known) -> bool:
    """Is it better to compute what ``maker`` stores for each read by index than to store it?"""
    stored = [*stores(maker).values()]
    if len(stored) != 1 or not maker.facts.kinds <= PLAIN or not _is_dense(stored[0], maker.numel):
        return False
    (store,) = stored
    takes = [instr for instr in part.instrs if instr.access is not None and instr.access.value is store.value]
    if any(instr.kind != "take" or instr.access is None or instr.access.dtype is not store.dtype for instr in takes):
        return False
    loads = [access for mode, access in maker.accesses() if mode == "r"]
    large = [access for access in loads if access.high - access.low > store.value.buffer.nbytes // 4]
    if len(large) > (MOST_READ if len(takes) <= OFTEN else 1) or not all(map(known.still_there, loads)):
        return False
    again = len(takes) * part.numel / maker.numel
    if len(store.value.users) > 1 or store.value.buffer.live:  # it is stored as well
        return again <= 1 and sum(access.dtype.itemsize for access in large) <= store.dtype.itemsize
    return again <= 1 or again * maker.facts.work <= MOST_WORK


def _is_dense(store: MemAccess, numel: int) -> bool:
    """Are all of a value's elements stored in order? What is written in place into a part of another value is not all that its
    readers see."""
    value = store.value
    whole = value.buffer.index >= 0 and not store.byte_offset and numel * store.dtype.itemsize == value.buffer.nbytes
    return whole and store.form == forms.collapse((numel,), (1,))


class _Taker:
    """Writes what a take reads as instructions that end in the element. ``shared``: what takes of a part have in common."""

    def __init__(self, take: Instr, shared: dict[Hashable, Instr]) -> None:
        assert take.access is not None
        self._take, self._access, self._shared, self._out = take, take.access, shared, list[Instr]()
        strides: tuple[tuple[int, int], ...] = take.payload  # type: ignore[assignment]
        self._indices = [(index, stride, extent) for index, (stride, extent) in zip(take.args, strides)]

    def made(self, maker: Part) -> list[Instr]:
        """What ``maker`` stores there; zero where an index is out of range. Raises Unsupported where dimensions do not nest."""
        return self._within(copied(maker, self._leaf, self._add))

    def _leaf(self, instr: Instr, _: tuple[Instr, ...]) -> Instr | None:
        if instr.kind == "load" and instr.access is not None:
            return self._element(instr, instr.access)
        if instr.kind == "coord":
            return self._number(instr.payload)  # type: ignore[arg-type]
        return None if instr.args else self._once(id(instr), instr)

    def _add(self, instr: Instr) -> Instr:
        self._out.append(instr)
        return instr

    def _once(self, key: Hashable, instr: Instr) -> Instr:
        if key not in self._shared:
            self._shared[key] = self._add(instr)
        return self._shared[key]

    def _size(self, number: int) -> Instr:
        return self._once(("size", number), Instr("size", torch.int64, UNIFORM, payload=number))

    def _element(self, load: Instr, access: MemAccess) -> Instr:
        if load.args or load.level != FULL or access.shift:
            raise Unsupported("it is loaded under a condition")
        form, start, strides = self._seen(access.form)
        seen = replace(access, form=form, byte_offset=access.byte_offset + start * access.dtype.itemsize)
        if not any(strides):
            return self._add(replace(load, access=seen))
        payload = tuple((stride, extent) for stride, (_, _, extent) in zip(strides, self._indices))
        return self._add(replace(load, kind="take", args=self._take.args, access=replace(seen, scattered=True), payload=payload))

    def _number(self, form: Form) -> Instr:
        """The number that ``form`` gives the element."""
        rest, start, strides = self._seen(form)
        found = [self._add(instr) for instr in place(rest, start)][-1]
        for (index, _, _), stride in zip(self._indices, strides):
            args = (found, index, self._size(stride))
            found = self._add(Instr("expr", torch.int32, FULL, args, "({0} + ({1} * {2}).to(tl.int32))")) if stride else found
        return found

    def _seen(self, form: Form) -> tuple[Form, int, list[int]]:
        """``form`` over the elements that the take reads: without the indices, its first element, and a stride for each index."""
        pairs = [*((extent, stride) for _, stride, extent in self._indices), *self._access.form]
        picked = forms.collapse(tuple(size for size, _ in pairs), tuple(stride for _, stride in pairs))
        found = through(form, picked, self._access.byte_offset // self._access.dtype.itemsize)
        if found is None:
            raise Unsupported("its producer's operands have other dimensions")
        (rest, start), strides, total = found, list[int](), math.prod(size for size, _ in pairs)
        for _, _, extent in self._indices:
            inner = total // extent
            split = forms.along(rest, (inner, total), total) if extent > 1 else (0, rest)
            if split is None:
                raise Unsupported("an index runs through several of its producer's operands' dimensions")
            strides.append(split[0])
            rest, total = split[1], inner
        return rest, start, strides

    def _within(self, value: Instr) -> list[Instr]:
        sizes = [self._size(extent) for _, _, extent in self._indices]
        args = tuple(one for (index, _, _), size in zip(self._indices, sizes) for one in (index, size))
        text = " & ".join(f"({{{n}}} >= 0) & ({{{n}}} < {{{n + 1}}})" for n in range(0, len(args), 2))
        valid = self._once(("valid", *map(id, args)), Instr("expr", torch.bool, FULL, args, f"({text})"))
        zero = "False" if value.dtype is torch.bool else "0.0" if value.dtype.is_floating_point else "0"
        self._add(replace(self._take, kind="expr", text=f"tl.where({{1}}, {{0}}, {zero})", args=(value, valid), access=None,
                          payload=None))
        return self._out
