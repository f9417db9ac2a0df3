"""Writes loops over the blocks of a reduced axis. Imports codegen's leaf modules."""

from __future__ import annotations

from typing import Collection, Sequence

from codegen.aligned import in_a_vector, in_vectors
from codegen.body import Body, Step
from codegen.instructions import FULL
from codegen.monoids import COMBINE, identity
from codegen.online import ONLINE, end_lines, loop_lines
from codegen.promotion import TRITON_TYPES
from codegen.source_args import ArgumentList
from codegen.tile import Tile
from codegen.unloaded import along, loads_nothing
from codegen.word_source import WordWriter


class LoopWriter(WordWriter):
    """Writes accumulators, the loop that fills them and the results; and around loops, what is one number for a row."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList) -> None:
        super().__init__(body, tile, arguments)
        self._in_place: dict[Step, tuple[Step, ...]] = {}  # exponentials in the elements' places, and what these are less

    def _outer(self, phase: int, needed: Collection[Step] | None = None) -> None:
        """Emit what does not change along the reduced dimensions and is known after ``phase`` passes: all of it, or what is
        loaded and waits for nothing, and what is ``needed``."""
        for step in self.body.steps:
            if step.level != FULL and step.phase <= phase and step.stage not in ("store", "reduce"):
                now = needed is None or step in needed or step.stage == "load" and not step.args
                if now and id(step) not in self._emitted:
                    self._emit(step)

    def _sums(self, reduces: list[Step]) -> dict[Step, dict[str, str]]:
        """For each maximum the sums that are relative to it: name and exponential."""
        sums: dict[Step, dict[str, str]] = {}
        for step in reduces:
            if step.text == ONLINE:
                sums.setdefault(step.args[1], {})[self._name(step)] = str(step.payload)
        return sums

    def _own_maxima(self) -> bool:
        """Does each lane keep a maximum of its own, because several threads hold parts of a column, and would wait for each other
        in each block? Where a thread has whole columns, one for them spares every element an exponential."""
        if self.tile.reduced_axis != 0:
            return False
        full = [step for step in self.body.steps if step.level == FULL and step.access is not None]
        vector = in_a_vector(full) if in_vectors(self.tile, self.body) else 1
        return 32 * self.tile.num_warps * vector > self._axis(1).block

    def _begin(self, reduces: list[Step]) -> None:
        """Accumulators: one a lane; of a maximum that sums are relative to, one a result, or they both one for neighbours."""
        shared = {id(step.args[1]) for step in reduces if step.text == ONLINE}
        for step in reduces:
            how = "add" if step.text == ONLINE else step.text
            alone = id(step) in shared and not self._own_maxima()
            shape = "[B0, B1]" if not alone else "[B0, 1]" if self.tile.reduced_axis == 1 else "[1, B1]"
            if self.tile.near and (step.text == ONLINE or id(step) in shared):
                shape = f"[B0, B1 // {self.tile.near}]"
            self._line(f"{self._name(step)}_acc = tl.full({shape}, {identity(how, step.dtype)}, {TRITON_TYPES[step.dtype]})")

    def _carry(self, sinks: list[Step]) -> None:
        """What the pass's scans start from: one number a row, or the same for each lane where nothing is loaded."""
        wanted = self._slice(sinks)
        for step in self.body.steps:
            if step.stage == "scan" and id(step) in wanted:
                shape = "[B0, B1]" if loads_nothing(self.body.steps) else "[B0, 1]" if self.tile.reduced_axis == 1 else "[1, B1]"
                start = f"{identity(step.text, step.dtype)}, {TRITON_TYPES[step.dtype]}"
                self._line(f"{self._name(step)}_carry = tl.full({shape}, {start})")

    def _walk(self, steps: str, sinks: list[Step], end: str, inside: bool = False) -> None:
        """A loop over blocks of the reduced axis; ``inside``: all of them lie within the row."""
        reduced = self.tile.reduced_axis
        assert reduced is not None
        before = self._before_loop(sinks)
        for step in before:
            self._emit(step)
        self._line(f"for r in tl.range({steps}):")
        self._indent += 1
        self._inside = inside
        if self.tile.covered:
            self._row_index()
        elif self.body.backwards:
            self._line(f"at = ({end} - 1) // B{reduced} * B{reduced} - r")
            self._index(reduced, "at", end)
        else:
            self._index(reduced, "r", end)
        reduces, stores = ([step for step in sinks if step.stage == stage] for stage in ("reduce", "store"))
        self._block(reduces, stores, before)
        self._inside = False
        self._indent -= 1

    def _before_loop(self, sinks: list[Step]) -> list[Step]:
        """Loads of numbers that a program's columns keep from row to row, which the compiler would leave in the loop."""
        if self.tile.reduced_axis != 0 or self.tile.covered or self.tile.peel:
            return []
        wanted = self._slice(sinks)
        return [step for step in self.body.steps if id(step) in wanted and step.stage == "load" and not step.args
                and 0 not in self._terms(step)]

    def _block(self, reduces: list[Step], stores: list[Step], known: Sequence[Step] = ()) -> None:
        """One block of the reduced axis, whose index is defined. ``known``: what is loaded already."""
        wanted = self._slice([*reduces, *stores]) - {id(step) for step in known}
        for step in self.body.steps:
            if id(step) in wanted and step.level == FULL and step.stage not in ("store", "reduce"):
                self._emit(step)
        sums, axis, own = self._sums(reduces), self.tile.reduced_axis, self._own_maxima()
        for step in reduces:
            if step in sums:
                assert axis is not None
                for line in loop_lines(self._name(step), self._masked(step), sums[step], axis, self.tile.near, own):
                    self._line(line)
            elif step.text != ONLINE:
                name = self._name(step)
                self._line(f"{name}_acc = {COMBINE[step.text].format(f'{name}_acc', self._masked(step))}")
        for step in stores:
            self._store(step)

    def _finish(self, step: Step, axis: int, sums: dict[Step, dict[str, str]]) -> None:
        """The result from the lanes' accumulators; ``sums`` are the pass's, by their maximum."""
        name = self._name(step)
        self._emitted.add(id(step))
        lanes = self.tile.near or self._own_maxima()
        if lanes and step in sums:
            for line in end_lines(name, sums[step], self.tile.walk is not None, axis):
                self._line(line)
        elif step in sums:
            self._line(f"{name} = {name}_acc")
        elif not (lanes and step.text == ONLINE):
            self._line(f"{name} = tl.reduce({name}_acc, {along(step, self.tile)})")

    def _slice(self, sinks: list[Step]) -> set[int]:
        """Steps over the full space that the sinks need within this pass."""
        wanted: set[int] = set()
        stack = [arg for sink in sinks for arg in sink.args]
        while stack:
            step = stack.pop()
            if id(step) not in wanted and step.level == FULL:
                wanted.add(id(step))
                stack.extend(step.args if step not in self._in_place else ())
        return wanted
