"""Joins the parts of a group into one body: what one part stores reaches the next in a register, and only what somebody
outside needs is written to memory. Imports codegen's leaf modules and `ir_nodes`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from codegen import forms, mixing
from codegen.forms import Form, Reduced
from codegen.group import Group, Unit, level_in
from codegen.instructions import FULL, IN_BITS, KEPT, UNIFORM, Instr, MemAccess
from codegen.picked import pick
from ir_nodes.node import Value

PlaceKey = tuple[int, Form, torch.dtype, int]


@dataclass(slots=True, eq=False)
class Step:
    """An instruction of a body. ``form`` is the address pattern over the full space (loads, stores, gathers, coords).

    ``phase`` counts the reductions that must be complete before it. ``stage``: "load", "store", "gather", "take", "factor",
    "dot", "expr", "reduce", "scan", "coord", "scalar", "size", "seed", "offset", "random", "check" as for
    `codegen.instructions.Instr`. A put is a store with indices behind its value.
    """

    stage: str
    dtype: torch.dtype
    level: int
    phase: int = 0
    args: tuple["Step", ...] = field(default=(), repr=False)  # shared, so that showing them might never end
    text: str = ""
    access: MemAccess | None = None
    form: Form = ()
    kept_form: Form = ()  # the same over the kept elements only, for steps at that level
    payload: object = None
    partial: bool = False  # a store of one program's share of a split reduction
    across: bool = False  # a column's number where rows are reduced, too

    @property
    def takes_bits(self) -> bool:
        return self.stage == "take" and self.text == IN_BITS


@dataclass(slots=True, eq=False)
class Body:
    """A kernel's instructions in dependency order over ``numel`` elements, stores last."""

    numel: int
    reduced: Reduced | None
    steps: list[Step] = field(default_factory=list)
    stored: list[Value] = field(default_factory=list)
    elided: list[Value] = field(default_factory=list)
    column: bool = False
    mixed: bool = False  # columns are reduced beside the rows

    @property
    def kept(self) -> int:
        return self.numel // forms.reduced_extent(self.reduced or ())

    @property
    def extent(self) -> int:
        return forms.reduced_extent(self.reduced or ())

    @property
    def backwards(self) -> bool:
        """True where blocks of a row are walked from the last to the first."""
        return any(step.stage == "scan" and step.payload for step in self.steps)

    @property
    def crowded(self) -> bool:
        """True where so many elements are gathered for each result that fewer at a time are enough to wait for."""
        return sum(step.stage == "take" for step in self.steps) >= 4

    def add(self, step: Step) -> Step:
        """Append, with level and phase following from the arguments."""
        if step.args:
            step.phase = max(arg.phase for arg in step.args) + (step.stage == "reduce")
        if step.stage in ("expr", "check") and step.args:
            step.level = max(arg.level for arg in step.args)
        step.across |= any(arg.across for arg in step.args)
        self.steps.append(step)
        return step

    def drop_unused(self, draws: bool = True) -> None:
        """Remove what no store needs; with ``draws`` an offset stays, for it moves its generator, used or not."""
        used: set[int] = set()
        for step in reversed(self.steps):
            if step.stage == "store" or draws and step.stage == "offset" or id(step) in used:
                used.update(id(arg) for arg in step.args)
                used.add(id(step))
        self.steps = [step for step in self.steps if id(step) in used]


class BodyBuilder:
    """Concatenates a group's units."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.body = Body(group.numel, group.reduced)
        self._made: dict[int, Step] = {}
        self._current: dict[PlaceKey, Step] = {}  # what the group wrote to a place
        self._loaded: dict[tuple[PlaceKey, int], Step] = {}
        self._conditional: dict[tuple[PlaceKey, int], Step] = {}  # the first load of a place under a condition
        self._written: dict[PlaceKey, list[tuple[MemAccess, int]]] = {}
        self._puts: list[Step] = []
        self._writes = {access.value.buffer for unit in group.units if unit.part for mode, access in unit.part.accesses()
                        if mode == "w"}
        self._computed: dict[tuple[object, ...], Step] = {}  # inputs, indices and expressions

    def build(self, outside: set[Value]) -> Body:
        """The body; ``outside``: the group's values that somebody else needs."""
        for unit in self.group.units:
            assert unit.part is not None
            self.body.column |= unit.part.column and unit.part.reduced is not None and not self.group.crossed
            for instr in unit.part.instrs:
                self._made[id(instr)] = self._translate(unit, instr)
        needed = {id(value.buffer) for value in outside}
        for place, writes in self._written.items():
            values = [access.value for access, _ in writes]
            access, level = writes[-1]
            if id(access.value.buffer) in needed and not self._unchanged(place):
                self._store(place, access, level)
                values.pop()
            self.body.elided += values
        for put in self._puts:
            if put.access is not None and id(put.access.value.buffer) in needed:
                self.body.add(put)
                self.body.stored.append(put.access.value)
        self.body.drop_unused()
        return self.body

    def _full(self, form: Form, level: int, crossed: bool = False) -> Form:
        found = mixing.embedded(form, self.group.reduced or (), self.group.numel, crossed, FULL if level != KEPT else KEPT)
        assert found is not None
        return found

    def _translate(self, unit: Unit, instr: Instr) -> Step:
        args = tuple(self._made[id(arg)] for arg in instr.args)
        level = level_in(self.group, unit, instr.level)
        crossed = unit in self.group.crossed
        across = crossed and level == KEPT
        if instr.kind == "load":
            return self._load(instr, level, args, across)
        if instr.kind == "store":
            return self._write(instr, args[0], level, crossed)
        if instr.kind == "gather":
            return self._gather(instr, args[0])
        if instr.kind in ("take", "put"):
            return self._scattered(instr, args, level)
        if instr.kind == "coord":
            kept = across or unit in self.group.kept_units
            return self._coordinate(instr.payload, level, kept, across)  # type: ignore[arg-type]
        if instr.kind == "random":
            seed, offset, place = args
            return self.body.add(Step("random", instr.dtype, level, 0, (seed, offset), form=place.form,
                                      kept_form=place.kept_form, payload=instr.payload))
        if instr.kind in ("scalar", "size", "seed", "offset"):
            key = (instr.kind, instr.payload, instr.dtype)
            if key not in self._computed:
                self._computed[key] = self.body.add(Step(instr.kind, instr.dtype, UNIFORM, payload=instr.payload))
            return self._computed[key]
        if instr.kind == "factor":
            return self.body.add(Step("factor", instr.dtype, UNIFORM, access=instr.access))
        if instr.kind == "dot":
            form = instr.payload.pattern  # type: ignore[attr-defined]
            return self.body.add(Step("dot", instr.dtype, level, 0, args, form=form, kept_form=form, payload=instr.payload))
        if instr.kind == "reduce":
            return self.body.add(Step("reduce", instr.dtype, level, 0, args, instr.text, across=crossed))
        key = (instr.kind, instr.text, instr.dtype, instr.payload, *map(id, args))
        if key not in self._computed:
            self._computed[key] = self.body.add(Step(instr.kind, instr.dtype, level, 0, args, instr.text, payload=instr.payload))
        return self._computed[key]

    def _place(self, access: MemAccess, form: Form) -> PlaceKey:
        return (id(access.value.buffer), form, access.dtype, access.byte_offset)

    def _load(self, instr: Instr, level: int, valid: tuple[Step, ...], across: bool) -> Step:
        access = instr.access
        assert access is not None
        form = self._full(access.form, level, across)
        place = self._place(access, form)
        if place in self._current:
            return self._current[place]
        key = (place, level if self.group.split or across else FULL)  # where there are two kernels, each loads for itself
        if key in self._loaded:
            return self._loaded[key]
        if valid and any(stride for _, stride in form):
            return self._where(Step("load", instr.dtype, level, 0, valid, access=access, form=form, kept_form=access.form), key)
        if key in self._conditional:
            return self._everywhere(key)
        loosest = level if across else self._loosest(form, level)
        step = Step("load", instr.dtype, loosest, access=access, form=form, kept_form=access.form, across=across)
        self._loaded[key] = self.body.add(step)
        return self._loaded[key]

    def _where(self, load: Step, key: tuple[PlaceKey, int]) -> Step:
        """The ``load`` under a condition; under none where it is made under another one, too, and nothing lies outside memory."""
        first = self._conditional.setdefault(key, load)
        if first is not load and first.args == load.args:
            return first
        return self.body.add(load) if first is load or not _inside(load) else self._everywhere(key)

    def _everywhere(self, key: tuple[PlaceKey, int]) -> Step:
        """The load of a place under a condition, made under none."""
        found = self._loaded[key] = self._conditional[key]
        found.args = ()
        return found

    def _loosest(self, form: Form, level: int) -> int:
        """A load that does not change along the reduced dimensions belongs outside the loop over them."""
        if not any(stride for _, stride in form):
            return UNIFORM if self.group.reduced is None or self.group.split else KEPT
        if self.group.split or self.group.reduced is None or level == KEPT:
            return level
        dims = forms.dims_of(self._cuts(form), self.group.numel)
        strides = forms.strides_over(form, dims)
        flags = reduced_flags(dims, self.group.reduced)
        return FULL if any(stride for stride, flag in zip(strides, flags) if flag) else KEPT

    def _cuts(self, form: Form) -> tuple[int, ...]:
        merged = forms.merge_cuts(forms.reduced_cuts(self.group.reduced or (), self.group.numel), forms.cuts(form))
        assert merged is not None
        return merged

    def _write(self, instr: Instr, value: Step, level: int, crossed: bool) -> Step:
        access = instr.access
        assert access is not None
        place = self._place(access, self._full(access.form, level, crossed))
        self._current[place] = value
        self._written.setdefault(place, []).append((access, level))
        return value

    def _unchanged(self, place: PlaceKey) -> bool:
        """Whether the group leaves there what it found."""
        value = self._current[place]
        plain = value.stage == "load" and not value.args  # a condition loads zeros elsewhere
        return plain and value.access is not None and self._place(value.access, value.form) == place

    def _scattered(self, instr: Instr, args: tuple[Step, ...], level: int) -> Step:
        access = instr.access
        assert access is not None
        stage = "store" if instr.kind == "put" else "take"
        step = Step(stage, instr.dtype, level, 0, args, instr.text, access, self._full(access.form, level), access.form,
                    instr.payload)
        if stage == "take":
            return self.body.add(step)
        self._puts.append(step)
        return step

    def _store(self, place: PlaceKey, access: MemAccess, level: int) -> None:
        value = self._current[place]
        self.body.add(Step("store", value.dtype, level, 0, (value,), access=access, form=place[1], kept_form=access.form))
        self.body.stored.append(access.value)

    def _gather(self, instr: Instr, index: Step) -> Step:
        access = instr.access
        assert access is not None
        interval, rest = instr.payload  # type: ignore[misc]
        source = self._current.get(self._place(access, access.form))
        if source is None:
            step = Step("gather", instr.dtype, KEPT, 0, (index,), access=access, form=self._full(rest, KEPT),
                        kept_form=rest, payload=instr.payload)
            return self.body.add(step)
        alone = pick(self.body, source, index, interval, self._writes) if source.level == FULL else None
        if alone is not None:
            return alone
        lower, upper = interval
        form = forms.collapse((self.group.numel // upper, upper // lower, lower), (0, 1, 0))
        column = self._coordinate(form, access.level, False)
        text = "tl.where({0} == {1}, {2}, 0.0)"
        picked = self.body.add(Step("expr", source.dtype, FULL, 0, (column, index, source), text))
        return self.body.add(Step("reduce", source.dtype, KEPT, 0, (picked,), "add"))

    def _coordinate(self, form: Form, level: int, kept: bool, across: bool = False) -> Step:
        full = self._full(form, KEPT if kept else FULL, across)
        key = ("coord", full, level, across)
        if key not in self._computed:
            self._computed[key] = self.body.add(Step("coord", torch.int32, level, form=full, kept_form=form, across=across))
        return self._computed[key]


def _inside(load: Step) -> bool:
    """Does it stay within its buffer whatever the condition?"""
    access = load.access
    assert access is not None
    end = access.byte_offset + forms.reach(load.form) * access.dtype.itemsize
    forward = access.byte_offset >= 0 and all(stride >= 0 for _, stride in load.form)
    return forward and end <= access.value.buffer.nbytes


def reduced_flags(dims: tuple[int, ...], reduced: Reduced | None) -> tuple[bool, ...]:
    """For each dimension whether it lies inside a reduced interval."""
    flags, position = [], 1
    for extent in reversed(dims):
        flags.append(any(lower <= position and position * extent <= upper for lower, upper in reduced or ()) and extent > 1)
        position *= extent
    return tuple(reversed(flags))
