"""Writes the loop of programs that walk rows and sum columns beside. Imports codegen's leaf modules.

The compiler loads elements of the next rows while it works on one, into the multiprocessor's memory. What there is one number a
row of, such as a norm's mean, is too narrow for that in 16 bits: each row would wait for it. It is loaded one row ahead here.
"""

from __future__ import annotations

import re
from typing import Iterable

from codegen.body import Step
from codegen.instructions import KEPT
from codegen.triton_instructions import InstructionWriter
from ir_nodes import settings

COPIED = 4
"""Bytes that the machine copies into a multiprocessor's memory by itself, at least."""

WORTH, FEW = 32, 2
"""Rows of a program that are worth a load before the first of them, and its warps at most: more hide what one waits for. On an
H200, bfloat16: layer norm's gradient over 65,536 rows of 1,024 takes 107 us, 111 otherwise; over 16,384 rows of 768, of which a
program has 16, 25.5 and 25.0; over 16,384 of 3,072, which four warps walk, 85.7 and 84.1."""

_ASSIGNED = re.compile(r"\s*(\w+(?:, \w+)*) = ")


def renamed(lines: Iterable[str], names: dict[str, None], suffix: str) -> list[str]:
    """The lines with ``suffix`` behind each of ``names``, to which those are added that the lines assign."""
    lines = list(lines)
    for line in lines:
        match = _ASSIGNED.match(line)
        if match:
            names.update(dict.fromkeys(match[1].split(", ")))
    known = re.compile(rf"\b({'|'.join(names)})\b")
    return [known.sub(rf"\1_{suffix}", line) for line in lines]


class AheadWriter(InstructionWriter):
    """Adds `_begin_rows`, the head of the loop."""

    def _begin_rows(self) -> None:
        """The loop over the program's rows, what is loaded for its first one before; lines behind this are within."""
        start, end, by = self._rows().split(", ")
        early, stages = self._row_numbers(), f", num_stages={self.tile.stages}" if self.tile.stages > 1 else ""
        if early:
            self._load_ahead(early, start)
        self._line(f"for r in tl.range({start}, {end}, {by}{stages}):")
        self._indent += 1
        self._row_index()
        if early:
            for step in early:
                self._line(f"{self._name(step)} = {self._name(step)}_next")
            self._load_ahead(early, f"r + {by}")

    def _row_numbers(self) -> list[Step]:
        """What is loaded for each row, too narrow for the compiler to do it, and not written by the kernel."""
        few = self.tile.num_warps <= FEW and self.tile.share >= WORTH
        if not few or self.tile.stages < 2 or not settings.enabled("loads_ahead"):
            return []
        written = {id(step.access.value.buffer) for step in self.body.steps if step.stage == "store" and step.access}
        return [step for step in self.body.steps if step.stage == "load" and step.level == KEPT and not (step.across or step.args)
                and step.access is not None and step.access.dtype.itemsize < COPIED
                and id(step.access.value.buffer) not in written]

    def _load_ahead(self, steps: list[Step], row: str) -> None:
        """The steps for the rows from ``row`` on, or for the last ones if there are no more."""
        self._line(f"ahead = tl.minimum({row}, {self._extent(0)} - 1)")
        begin = len(self._lines)
        self._row_index()
        for step in steps:
            self._emit(step)
        self._lines[begin:] = renamed([re.sub(r"\br\b", "ahead", line) for line in self._lines[begin:]], {}, "next")
