"""Writes kernels whose programs hold a row in registers in several parts, the last of which is the only one that need not be
full. Imports codegen's leaf modules.

A block's size is a power of two. Rows of 768 elements held as one block waste a quarter of all lanes, rows of 5,003 two fifths;
three blocks of 256, or five of 1,024, waste next to nothing, and only the blocks at a row's ends need masks.
"""

from __future__ import annotations

import re
from typing import Callable, Iterable, Sequence

from codegen.body import Step
from codegen.instructions import FULL, UNIFORM
from codegen.promotion import TRITON_TYPES
from codegen.triton_instructions import COMBINE, InstructionWriter, identity

_ASSIGNED = re.compile(r"\s*(\w+(?:, \w+)*) = ")


class PartWriter(InstructionWriter):
    """Writes each instruction over whole rows once for each part, with names of its own."""

    def _in_parts(self, settle: Callable[[], None] | None) -> None:
        """Every instruction; ``settle`` is called before anything is stored, where that has to wait."""
        self._parts(self._part_index)
        stores = [step for step in self.body.steps if step.stage == "store"]
        self._row([step for step in self.body.steps if step.stage != "store"], stores, settle)

    def _mixed_in_parts(self, loop: str, settle: Callable[[], None] | None) -> None:
        """Rows, step by step, each reduced on its own, columns into accumulators."""
        self._parts(self._part_index)
        stores = [step for step in self.body.steps if step.stage == "store"]
        columns = [step for step in self.body.steps if step.across and step.stage == "reduce"]
        early = [step for step in self.body.steps if step.stage != "store" and (
            step.level == UNIFORM or step.stage == "load" and step.level == FULL and 0 not in self._terms(step))]
        self._row(early, [], None)
        self._parts(lambda _: [self._line(f"{self._name(step)}_acc = tl.full([B0, B1], {identity(step.text, step.dtype)}, "
                                          f"{TRITON_TYPES[step.dtype]})") for step in columns])
        self._line(f"for r in tl.range({loop}):")
        self._indent += 1
        self._row_index()
        late = [step for step in self.body.steps if step.stage != "store" and step not in early]
        self._row(late, [step for step in stores if not step.across], settle)
        self._indent -= 1
        self._parts(lambda _: [self._line(f"{self._name(step)} = tl.reduce({self._name(step)}_acc, 0, _{step.text}, "
                                          "keep_dims=True)") for step in columns])
        self._parts(lambda _: [self._store(step) for step in stores if step.across])

    def _row(self, steps: Sequence[Step], stores: Sequence[Step], settle: Callable[[], None] | None) -> None:
        """The steps in order, but first what they load for all parts of the row; then the stores."""
        loads = [step for step in steps if step.stage == "load" and step.level == FULL and not step.args and 0 in self._terms(step)]
        self._each(loads)
        waiting: list[Step] = []
        for step in steps:
            if step.stage == "reduce" and not step.across:
                self._each(waiting)
                waiting = []
                self._reduce_parts(step)
            elif step.level == FULL or step.across:
                waiting += [step] * (step not in loads)
            else:
                self._emit(step)
        if settle is not None:
            self._each(waiting)
            settle()
            waiting = []
        self._each([*waiting, *(step for step in stores if step.level == FULL)])
        for step in stores:
            if step.level != FULL:
                self._store(step)

    def _each(self, steps: Sequence[Step]) -> None:
        """The steps for one part after the other."""
        if steps:
            self._parts(lambda _: [self._write(step) for step in steps])

    def _write(self, step: Step) -> None:
        if step.stage == "store":
            self._store(step)
        elif step.stage == "reduce":
            self._count(step)
        else:
            self._emit(step)

    def _parts(self, write: Callable[[int], object]) -> None:
        """What ``write`` writes for each part, with the part's number behind the names that are its own."""
        for part in range(self.tile.parts):
            start, self._inside = len(self._lines), self._full(part)
            write(part)
            self._inside = False
            self._lines[start:] = self._renamed(self._lines[start:], part)

    def _reduce_parts(self, step: Step) -> None:
        """Parts are added element by element before lanes are."""
        name, (value,) = self._name(step), step.args
        self._emitted.add(id(step))
        total = ""
        for part in range(self.tile.parts):
            self._inside = self._full(part)
            one = self._renamed([self._masked(step)], part)[0]
            total = COMBINE[step.text].format(total, one) if total else one
            self._line(f"{name}_parts = {total}")
            total = f"{name}_parts"
        self._inside = False
        self._line(f"{name} = tl.reduce({total}, {self.tile.reduced_axis}, _{step.text}, keep_dims=True)")

    def _full(self, part: int) -> bool:
        """Has the row an element for each of the part's lanes, wherever it starts?"""
        return (part + 1) * self._axis(1).block <= self._axis(1).extent and not (self.tile.covered and part == 0)

    def _part_index(self, part: int) -> None:
        start = str(part * self._axis(1).block) if part else ""
        if not self.tile.covered:
            self._index(1, start)
            return
        self._starts[1] = start
        self._line(f"at = {start}{' + ' * bool(start)}{self._arange(1)}")
        if self._inside:
            self._line("i1 = at - shift")
        else:
            self._vectors(self.tile.covered)
        self._split(1)

    def _renamed(self, lines: Iterable[str], part: int) -> list[str]:
        """The lines with the part's number behind each name that every part has."""
        found = list(lines)
        for line in found:
            match = _ASSIGNED.match(line)
            if match:
                self._own.update(dict.fromkeys(match[1].split(", ")))
        names = re.compile(rf"\b({'|'.join(self._own)})\b")
        return [names.sub(rf"\1_{part}", line) for line in found]
