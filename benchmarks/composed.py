"""Random programs of a dozen ops beside torch.compile: which take longer, and which come out otherwise? Imports torch,
lazy_backend, `benchmarks.common`, `.compositions`, `.drawn`, `.shapes`, `.timing`.

    python -m benchmarks.composed --seconds 200

Programs are drawn one by one from ``--seed`` on: elementwise ops, reductions, views, indices, gradients of all that, over usual
and odd shapes (`benchmarks.compositions`). Microseconds on the GPU alone, launches queued, contestants in turns. Both compile in
``--workers`` processes first. Results are compared with float64's, from which eager mode's may be as far.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm

import lazy_backend
from benchmarks.common import save, table
from benchmarks.compositions import LARGEST, TINY, Composition, sizes
from benchmarks.drawn import options, rows_of, slower_or_wrong, summary
from benchmarks.shapes import DEVICE, distance, wrong
from benchmarks.timing import gpu_seconds


class Program:
    """One composition, ready to run by each contestant. Raises RuntimeError where its draw makes no valid program."""

    def __init__(self, seed: int, largest: int) -> None:
        self.seed, self.largest = seed, largest
        self.sizes = sizes(seed, largest)
        self._composition = Composition(seed, self.sizes, largest)
        self._inputs = self._composition.inputs(DEVICE)
        self._graph = make_fx(lambda *inputs: self._composition(inputs))(*self._inputs)
        self._graph.graph.eliminate_dead_code()
        self._graph.recompile()
        self._compiled = torch.compile(self._graph, dynamic=False)
        self._lazy = [one.to("lazysched") for one in self._inputs]
        lazy_backend.mark_step()

    def eager(self, _: int = 0) -> list[Tensor]:
        return self._graph(*self._inputs)

    def compiled(self, _: int = 0) -> list[Tensor]:
        return self._compiled(*self._inputs)

    def lazysched(self, _: int = 0) -> list[Tensor]:
        results = self._composition(self._lazy)
        lazy_backend.mark_step()
        return results

    def refused(self) -> str:
        """Why torch.compile can't compile it; "": it can."""
        try:
            self.compiled()
        except BackendCompilerFailed as error:
            return str(error).splitlines()[0]
        return ""

    def row(self) -> dict[str, Any]:
        """Microseconds of each contestant, and how far the two results are from float64's at most."""
        ours = [one.to(DEVICE) for one in self.lazysched()]
        exact = Composition(self.seed, self.sizes, self.largest, exact=True)
        wanted = exact(exact.inputs(DEVICE))
        eager = self.eager()
        apart, off, usual = (max(map(distance, *pair), default=0.0) for pair in ((ours, eager), (ours, wanted), (eager, wanted)))
        del ours, eager, wanted
        for _ in range(2):
            self.lazysched(), self.compiled()
        times: dict[str, list[float]] = {"lazysched": [], "compile": []}
        for _ in range(3):
            times["compile"].append(gpu_seconds(self.compiled, 3, 1e-3))
            times["lazysched"].append(gpu_seconds(self.lazysched, 3, 6e-3))
        found = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
        return {"seed": self.seed, "sizes": self.sizes, "program": list(self._composition.log), **found, "apart": apart,
                "ours from float64": off, "eager from float64": usual}  # fmt: skip


def drawn(seed: int, largest: int) -> Program | None:
    """None where eager mode refuses the program, as where a gradient needs what was overwritten."""
    try:
        return Program(seed, largest)
    except RuntimeError:
        return None


def compiled(seed: int, largest: int) -> None:
    """Runs the program once by each contestant, so that its kernels are on disk."""
    program = drawn(seed, largest)
    if program is not None:
        program.lazysched(), program.refused()
        lazy_backend.mark_step(wait=True)


def measured(seed: int, largest: int) -> dict[str, Any] | None:
    program = drawn(seed, largest)
    if program is None:
        return None
    if why := program.refused():
        tqdm.write(f"{seed}: torch.compile fails, left out: {why}")
        return None
    return program.row()


def report(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        print("No program was measured: --seconds is too short for the first.")
        return
    shown = slower_or_wrong(rows, _ratio, wrong)
    print(table(["seed", "sizes", "lazysched, us", "torch.compile, us", "ratio", "apart", ""],
                [(row["seed"], "x".join(map(str, row["sizes"])), f"{row['lazysched']:.1f}", f"{row['compile']:.1f}",
                  f"{_ratio(row):.2f}", f"{row['apart']:.1e}", "WRONG" if wrong(row) else "")
                 for row in shown]))  # fmt: skip
    print(summary(rows, _ratio, "program", "torch.compile", len(shown)))


def _ratio(row: dict[str, Any]) -> float:
    return row["lazysched"] / row["compile"]


def main(words: Sequence[str] | None = None) -> int:
    asked = options(__doc__, words, "program", 200.0, 100)
    seeds, largest = range(asked.seed, asked.seed + asked.count), TINY if asked.tiny else LARGEST
    rows = rows_of("benchmarks.composed", "program", asked, seeds, partial(compiled, largest=largest),
                   partial(measured, largest=largest))  # fmt: skip
    if rows is None:
        return 0
    report(rows)
    save("composed", {"programs": rows}, asked.output)
    return 1 if any(map(wrong, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
