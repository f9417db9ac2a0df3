"""Random programs of a dozen ops beside torch.compile: which take longer, and which come out otherwise? Imports
`benchmarks.common`, `.compositions`, `.contest`, `.drawn`, `.shapes`.

    python -m benchmarks.composed --seconds 200

Programs are drawn one by one from ``--seed`` on: elementwise ops, reductions, views, indices, gradients of all that, over usual
and odd shapes (`benchmarks.compositions`). Microseconds on the GPU alone, launches queued, contestants in turns. Both compile in
``--workers`` processes first. Results are compared with float64's, from which eager mode's may be as far.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.common import table
from benchmarks.compositions import LARGEST, TINY, Composition, sizes
from benchmarks.contest import Contest, ratio
from benchmarks.drawn import options, rows_of, slower_or_wrong, summary, told
from benchmarks.shapes import DEVICE, wrong


class Program(Contest):
    """One composition. Raises RuntimeError where its draw makes no valid program."""

    def __init__(self, seed: int, largest: int) -> None:
        self.seed, self.largest = seed, largest
        self.sizes = sizes(seed, largest)
        self.composition = Composition(seed, self.sizes, largest)
        super().__init__(self.composition, self.composition.inputs(DEVICE))

    def compared(self) -> dict[str, Any]:
        exact = Composition(self.seed, self.sizes, self.largest, exact=True)
        row = self.row(exact(exact.inputs(DEVICE)))
        return {"seed": self.seed, "sizes": self.sizes, "program": list(self.composition.log), **row}


def drawn(seed: int, largest: int) -> Program | None:
    """None where eager mode refuses the program, as where a gradient needs what was overwritten."""
    try:
        return Program(seed, largest)
    except RuntimeError:
        return None


def compiled(seed: int, largest: int) -> None:
    program = drawn(seed, largest)
    if program is not None:
        program.first()


def measured(seed: int, largest: int) -> dict[str, Any] | None:
    program = drawn(seed, largest)
    return None if program is None or program.left_out(str(seed)) else program.compared()


def report(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        print("No program was measured: --seconds is too short for the first.")
        return
    shown = slower_or_wrong(rows, ratio, wrong)
    print(table(["seed", "sizes", "lazysched, us", "torch.compile, us", "ratio", "apart", ""],
                [(row["seed"], "x".join(map(str, row["sizes"])), f"{row['lazysched']:.1f}", f"{row['compile']:.1f}",
                  f"{ratio(row):.2f}", f"{row['apart']:.1e}", "WRONG" if wrong(row) else "")
                 for row in shown]))  # fmt: skip
    print(summary(rows, ratio, "program", "torch.compile", len(shown)))


def main(words: Sequence[str] | None = None) -> int:
    asked = options(__doc__, words, "program", 200.0, 100)
    seeds, largest = range(asked.seed, asked.seed + asked.count), TINY if asked.tiny else LARGEST
    rows = rows_of("benchmarks.composed", "program", asked, seeds, partial(compiled, largest=largest),
                   partial(measured, largest=largest))  # fmt: skip
    return told("composed", "programs", rows, report, wrong, asked.output)


if __name__ == "__main__":
    sys.exit(main())
