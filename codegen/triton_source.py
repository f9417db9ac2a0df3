"""Writes a body laid out on a tile as the source of one Triton kernel. Imports codegen's leaf modules.

Sizes and strides become arguments; the text depends on structure only: which dimensions an operand moves along, which
strides are 1, in which order things happen.
"""

from __future__ import annotations

from typing import Mapping

from codegen.body import Body, Step
from codegen.branches import Sides, choices, outside
from codegen.cluster_source import ClusterWriter
from codegen.helpers import used
from codegen.instructions import FULL
from codegen.kernel import WAIT
from codegen.random_source import PHILOX
from codegen.source_args import ArgumentList
from codegen.tile import Tile
from ir_nodes import settings

_HEADER = '''"""{title}"""

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.language.extra.cuda import libdevice


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


'''


class SourceWriter(ClusterWriter):
    """Writes one kernel: its passes over the tile. ``settles``: all threads read what they pick before one of them stores."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList, settles: bool = False) -> None:
        super().__init__(body, tile, arguments)
        self._settles = settles

    def source(self, name: str, title: str) -> str:
        """The whole file."""
        if self.tile.overlaps:
            self._line(f"{WAIT}  # for the kernel before this one")
        self._prologue()
        self._passes()
        self._store_apart()
        blocks = ["B0", "B1", "BK"] if self.tile.depth else ["B0", "B1"]
        parameters = ", ".join([*self.arguments.names(), *(f"{block}: tl.constexpr" for block in blocks)])
        text = "\n".join(self._lines)
        helpers = (PHILOX if any(step.stage == "random" for step in self.body.steps) else "") + used(text, self.tile.overlaps)
        helpers += self._helpers(text)
        return _HEADER.format(title=title) + helpers + f"@triton.jit\ndef {name}({parameters}):\n{text}\n"

    # Passes over the reduced dimensions

    def _passes(self) -> None:
        stores = [step for step in self.body.steps if step.stage == "store"]
        if self.tile.mixed:
            self._mixed(stores)
            return
        if self.tile.words:
            self._in_words(self._settle if self._settles else None)
            return
        if not self.tile.looped:
            if self.tile.peel:
                end = f"{self._extent(1)}"
                inside = f"(begin >= shift) & (begin - shift + B1 <= {end})" if self.tile.peel > 1 else f"begin + B1 <= {end}"
                self._branch(f"if {inside}:", inside=True)
                self._branch("else:", inside=False)
            elif self.tile.strips:
                self._in_strips(self._settle if self._settles else None)
            else:
                self._whole()
            return
        placed = self._store_passes(stores)
        reduces = [step for step in self.body.steps if step.stage == "reduce"]
        last = max([step.phase - 1 for step in reduces] + list(placed.values()), default=-1)
        if self._several():
            self._outer(0)  # what divides and asserts here would move what is held out of registers and back
            self._hold_all()
        elif self.tile.share and self.tile.peel:
            self._line("last = begin + tl.maximum(end - begin - 1, 0) // B1 * B1")  # some programs may have no summands
        elif self.tile.peel:
            shift = " + shift" if self.tile.peel > 1 else ""
            self._line(f"last = ({self._extent(1)}{shift} - 1) // B1 * B1")
        cached = self.tile.walk is not None and not self._several()
        if cached:
            self._outer(0, [])
            self._hold()
        for number in range(last + 1):
            here = [step for step in reduces if step.phase - 1 == number]
            now = [step for step in stores if placed.get(id(step)) == number]
            self._outer(number, self._waits_for(here, now, number == last) if cached else None)
            if number == last and self._several() < 2:  # programs that exchange sums have met already
                self._settle()
            self._loop(here, now, number == last)
        self._outer(last + 1)
        for step in stores:
            if id(step) not in placed:
                self._store(step)

    def _mixed(self, stores: list[Step]) -> None:
        """Rows, step by step: each reduced on its own, columns into accumulators."""
        if self.tile.strips:
            self._mixed_in_strips(self._settle if self._settles else None)
            return
        columns = [step for step in self.body.steps if step.across and step.stage == "reduce"]
        for step in self.body.steps:
            if self._for_all_rows(step):
                self._emit(step)
        for step in columns:
            self._begin_column(step)
        self._begin_rows()
        hoisted = set(self._emitted)
        for step in self.body.steps:
            if step in columns:
                self._count(step)
            elif step.stage != "store" and id(step) not in hoisted:
                self._emit(step)
        self._settle()
        for step in stores:
            if not step.across:
                self._store(step)
        self._indent -= 1
        for step in columns:
            self._end_column(step)
        for step in stores:
            if step.across:
                self._store(step)

    def _whole(self) -> None:
        """Every instruction, once."""
        steps, stores = ([step for step in self.body.steps if (step.stage == "store") is kind] for kind in (False, True))
        soon = {} if self._settles else self._soon(steps, stores)
        chosen = self._choices()
        for step in outside(steps, chosen):
            self._emit_or_choose(step, chosen)
            for store in soon.get(step, ()):
                self._store(store)
        self._settle()
        done = dict.fromkeys(store for early in soon.values() for store in early)
        for store in self._crossing_first(stores):
            if store not in done:
                self._store(store)

    def _choices(self) -> dict[Step, Sides]:
        """What only some of the programs that walk squares compute."""
        squares = self.tile.reduced_axis is None and self.tile.axes[2] is not None
        if not squares or self._settles or not settings.enabled("branches"):
            return {}
        return choices(self.body.steps, lambda step: self._axes(step.args[0]) <= {2} and all(
            arg.dtype is step.dtype and {0, 1} <= self._axes(arg) for arg in step.args[1:]))

    def _emit_or_choose(self, step: Step, chosen: Mapping[Step, Sides]) -> None:
        """The ``step``; a choice with what makes either value in a branch."""
        if step not in chosen:
            self._emit(step)
            return
        condition, *values = step.args
        for head, side, value in zip((f"if {self._name(condition)}:", "else:"), chosen[step], values):
            self._line(head)
            self._indent += 1
            for one in outside(side, chosen):
                self._emit_or_choose(one, chosen)
            self._line(f"{self._name(step)} = {self._name(value)}")
            self._indent -= 1
        self._emitted.add(id(step))

    def _crossing_first(self, stores: list[Step]) -> list[Step]:
        """Stores that walk across the reduced rows before those of a number for each row.

        Behind them Triton 3.6 fails to compile some kernels (two norms of rows, stored with what is divided by them, of
        which one is transposed: "operand does not dominate this use", when layouts' conversions are taken out)."""
        along = self.tile.axes[1].dims
        buffers = [id(store.access.value.buffer) for store in stores if store.access is not None]
        if not along or all(store.level == FULL for store in stores) or len(dict.fromkeys(buffers)) < len(stores):
            return stores
        crossing = [store for store in stores if store.level == FULL and self.tile.strides[id(store)][along[-1]] != 1]
        return [*crossing, *(store for store in stores if store not in crossing)]

    def _settle(self) -> None:
        """Where results may replace what some threads have yet to pick."""
        if self._settles:
            self._line("tl.debug_barrier()  # what is picked by an index may be overwritten from here on")

    def _branch(self, head: str, inside: bool) -> None:
        """Every instruction for a program whose block lies within its row, or for the others."""
        self._line(head)
        self._indent += 1
        self._inside = inside
        self._index(1, "begin")
        self._whole()
        self._inside = False
        self._indent -= 1

    def _store_passes(self, stores: list[Step]) -> dict[int, int]:
        """The pass that each store over the full space belongs to: no earlier than the last that loads from its buffer."""
        full = [step for step in stores if step.level == FULL]
        last = max([step.phase for step in full] + [s.phase - 1 for s in self.body.steps if s.stage == "reduce"], default=0)
        loaded = {id(step.access.value.buffer) for step in self.body.steps if step.stage == "load" and step.access}
        return {id(step): last if id(step.access.value.buffer) in loaded else step.phase for step in full if step.access}

    def _loop(self, reduces: list[Step], stores: list[Step], last: bool) -> None:
        """One pass; ``last``: none comes behind it."""
        if self._several():
            self._walk_held(reduces, stores)
            return
        reduced = self.tile.reduced_axis
        assert reduced is not None
        self._begin(reduces)
        self._carry([*reduces, *stores])
        stages = f", num_stages={self.tile.stages}" if self.tile.stages > 1 else ""
        if self.tile.walk is not None:
            self._walk_cached(reduces, stores, last)
        elif self.tile.peel:
            ordered = any(step.stage == "scan" for step in self.body.steps)
            if self.tile.peel > 1:
                self._walk("0, B1, B1" if ordered else "0, last + B1, tl.maximum(last, B1)", [*reduces, *stores], "")
            first = "begin" if self.tile.share else "B1" if self.tile.peel > 1 else "0"
            self._walk(f"{first}, last, B1{stages}", [*reduces, *stores], "", inside=True)
            if self.tile.peel == 1:
                self._index(1, "last", "end" if self.tile.share else "")
                self._block(reduces, stores)
            elif ordered:
                self._walk("last, last + tl.minimum(last, B1), B1", [*reduces, *stores], "")
        else:
            start, end = ("begin", "end") if self.tile.share else ("0", self._extent(reduced))
            steps = self._rows() if self.tile.covered else f"{start}, {end}, B{reduced}"
            self._walk(f"{steps}{stages}", [*reduces, *stores], end)
        for step in reduces:
            self._finish(step, reduced, self._sums(reduces))
