"""Writes kernels whose programs hold a row in registers in several strips. Imports codegen's leaf modules.

Only the strips at a row's ends need masks. Each instruction over whole rows is written once for each strip, with the strip's
number behind the names that are its own; what is known of a row as a whole is written once.
"""

from __future__ import annotations

from typing import Callable, Iterable, Sequence

from codegen.ahead_source import AheadWriter, renamed
from codegen.body import Body, Step
from codegen.instructions import FULL, IN_BITS
from codegen.monoids import COMBINE
from codegen.source_args import ArgumentList
from codegen.tile import Tile
from codegen.unloaded import along
from ir_nodes import settings


class StripWriter(AheadWriter):
    """Writes what a strip of a row needs; `_in_strips` and `_mixed_in_strips` are whole kernels, behind the prologue."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList) -> None:
        super().__init__(body, tile, arguments)
        self._own: dict[str, None] = {}  # names that each strip has its own of
        self._strip = 0  # the one that is being written

    def _in_strips(self, settle: Callable[[], None] | None) -> None:
        """Every instruction; ``settle`` is called before anything is stored, where that has to wait."""
        self._strips(self._strip_index)
        stores = [step for step in self.body.steps if step.stage == "store"]
        self._row([step for step in self.body.steps if step.stage != "store"], stores, settle)

    def _mixed_in_strips(self, settle: Callable[[], None] | None) -> None:
        """Rows, step by step, each reduced on its own, columns into accumulators."""
        self._strips(self._strip_index)
        stores = [step for step in self.body.steps if step.stage == "store"]
        columns = [step for step in self.body.steps if step.across and step.stage == "reduce"]
        early = [step for step in self.body.steps if step.stage != "store" and self._for_all_rows(step)]
        self._row(early, [], None)
        self._strips(lambda: [self._begin_column(step) for step in columns])
        self._begin_rows()
        late = [step for step in self.body.steps if step.stage != "store" and step not in early and id(step) not in self._emitted]
        self._row(late, [step for step in stores if not step.across], settle)
        self._indent -= 1
        self._strips(lambda: [self._end_column(step) for step in columns])
        self._strips(lambda: [self._store(step) for step in stores if step.across])

    def _row(self, steps: Sequence[Step], stores: Sequence[Step], settle: Callable[[], None] | None) -> None:
        """The steps in order, but first what they load for all strips of the row; then the stores."""
        plain = [step for step in steps if step.stage == "load" and step.level == FULL and not step.args]
        loads = [step for step in plain if self.tile.words or 0 in self._terms(step)]
        loads += [step for step in steps if step.takes_bits]
        self._each(loads)
        soon = self._soon(steps, stores, loads) if settle is None else {}
        waiting: list[Step] = []
        for step in steps:
            if step.stage == "reduce" and not step.across:
                self._each(waiting)
                waiting = []
                self._reduce_strips(step)
            elif step.level == FULL or step.across:
                waiting += [step] * (step not in loads) + soon.get(step, [])
            else:
                self._emit(step)
        if settle is not None:
            self._each(waiting)
            settle()
            waiting = []
        done = dict.fromkeys(store for early in soon.values() for store in early)
        self._each([*waiting, *(step for step in stores if step.level == FULL and step not in done)])
        for step in stores:
            if step.level != FULL:
                self._store(step)

    def _soon(self, steps: Sequence[Step], stores: Sequence[Step], loaded: Sequence[Step] = ()) -> dict[Step, list[Step]]:
        """Stores of what is there before anything is reduced, by the step behind which they may be written: all that may lie in
        the same memory has been loaded then, ``loaded`` before any step. Written behind the reductions, they would keep elements
        in registers: dropout, sum and norm of rows of 768 take 153 for each thread so, and 107 otherwise, which lets 18 programs
        run beside each other instead of 13."""
        place = {step: number for number, step in enumerate(steps)}
        reduces = [number for step, number in place.items() if step.stage == "reduce" and not step.across]
        if not reduces or not settings.enabled("early_stores"):
            return {}
        last = max([number for step, number in place.items() if step.level == FULL and step not in loaded
                    and step.stage in ("load", "gather", "take") and (step.args or 0 in self._terms(step))], default=0)
        found: dict[Step, list[Step]] = {}
        for store in stores:
            value, scattered = store.args[0], store.access is not None and store.access.scattered
            if store.level == FULL == value.level and value in place and (store.text == IN_BITS or not scattered):
                behind = max(last, place[value])
                if behind < reduces[0] and steps[behind].level == FULL:
                    found.setdefault(steps[behind], []).append(store)
        return found

    def _each(self, steps: Sequence[Step]) -> None:
        """The steps for one strip after the other."""
        if steps:
            self._strips(lambda: [self._write(step) for step in steps])

    def _write(self, step: Step) -> None:
        if step.stage == "store":
            self._store(step)
        elif step.stage == "reduce":
            self._count(step)
        else:
            self._emit(step)

    def _strips(self, write: Callable[[], object]) -> None:
        """What ``write`` writes for each strip, with the strip's number behind the names that are its own."""
        for strip in range(self.tile.strips):
            start, self._strip, self._inside = len(self._lines), strip, self._full(strip)
            self._starts[1] = self._strip_start(strip)
            write()
            self._inside = False
            self._lines[start:] = self._renamed(self._lines[start:], strip)

    def _reduce_strips(self, step: Step) -> None:
        """Strips are added element by element before lanes are."""
        name = self._name(step)
        self._emitted.add(id(step))
        total = ""
        for strip in range(self.tile.strips):
            self._inside = self._full(strip)
            one = self._renamed([self._masked(step)], strip)[0]
            total = COMBINE[step.text].format(total, one) if total else one
            self._line(f"{name}_strips = {total}")
            total = f"{name}_strips"
        self._inside = False
        self._line(f"{name} = tl.reduce({total}, {along(step, self.tile)})")

    def _strip_start(self, strip: int) -> str:
        """The strip's first element."""
        return str(strip * self._axis(1).block) if strip else ""

    def _full(self, strip: int) -> bool:
        """Has the row an element for each of the strip's lanes, wherever it starts?"""
        return (strip + 1) * self._axis(1).block <= self._axis(1).extent and not (self.tile.covered and strip == 0)

    def _strip_index(self) -> None:
        start = self._starts[1]
        if not self.tile.covered:
            self._index(1, start)
            return
        if not self._inside:
            self._vectors(self.tile.covered)
            return
        self._line(f"at = {start}{' + ' * bool(start)}{self._arange(1)}")
        self._line("i1 = at - shift")
        self._split(1)

    def _renamed(self, lines: Iterable[str], strip: int) -> list[str]:
        """The lines with the strip's number behind each name that every strip has."""
        return renamed(lines, self._own, str(strip))
