"""Writes elementwise kernels that draw for elements which lie far apart. Imports codegen's leaf modules.

For a tensor of an odd number of elements, a thread of ATen's dropout gives the four numbers of a call to elements that lie the
launch's number of threads apart. A program here takes what so many threads do in one call: four strips of a block each.
"""

from __future__ import annotations

from typing import Callable

from codegen.body import Step
from codegen.draws import WORDS
from codegen.instructions import UNIFORM
from codegen.random_source import call_line, uniform
from codegen.strip_source import StripWriter


class WordWriter(StripWriter):
    """Adds `_in_words`, a whole kernel behind the prologue."""

    def _in_words(self, settle: Callable[[], None] | None) -> None:
        """The calls, then every instruction for each of their words, with masks only where the elements end; ``settle`` is called
        before anything is stored, where that has to wait."""
        early = [step for step in self.body.steps if step.level == UNIFORM and step.stage != "store"]
        for step in early:
            self._emit(step)
        (draw,) = (step for step in self.body.steps if step.stage == "random")
        name, (seed, offset) = self._name(draw), map(self._name, draw.args)
        self._line(f"across = {self._apart()} // B1")
        self._line(f"{name}_thread = pid % across * B1 + tl.arange(0, B1)")
        self._line(f"{name}_count = {offset} // 4 + pid // across")
        self._line(call_line(name, seed))
        self._line(f"begin = pid // across * {WORDS} * {self._apart()} + pid % across * B1")
        stores = [step for step in self.body.steps if step.stage == "store"]
        rest = [step for step in self.body.steps if step not in early and step not in stores]
        for head in (f"if {self._strip_start(WORDS - 1)} + B1 <= {self._extent(1)}:", "else:"):
            self._line(head)
            self._indent += 1
            self._cut = head == "else:"
            self._strips(self._strip_index)
            self._row(rest, stores, settle)
            self._indent -= 1

    def _emit(self, step: Step) -> None:
        if step.stage == "random" and self.tile.words:
            self._line(f"{self._name(step)} = {uniform(self._name(step), self._strip)}")
        else:
            super()._emit(step)

    def _apart(self) -> str:
        return self.arguments.stride(self.tile.words)

    def _strip_start(self, strip: int) -> str:
        return f"begin + {strip} * {self._apart()}" if self.tile.words else super()._strip_start(strip)

    def _full(self, strip: int) -> bool:
        return not self._cut if self.tile.words else super()._full(strip)
