"""Random programs of a dozen ops beside torch.compile: which take longer, and which come out otherwise? Imports torch,
lazy_backend, `benchmarks.common`, `.compositions`, `.shapes`, `.timing`.

    python -m benchmarks.composed --seconds 200

Programs are drawn one by one from ``--seed`` on: elementwise ops, reductions, views, indices, gradients of all that, over usual
and odd shapes (`benchmarks.compositions`). Microseconds on the GPU alone, launches queued, contestants in turns. Both compile in
``--workers`` processes first. Results are compared with float64's, from which eager mode's may be as far.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm

import lazy_backend
from benchmarks.common import in_workers, save, table
from benchmarks.compositions import LARGEST, TINY, Composition, sizes
from benchmarks.shapes import APART, DEVICE, distance
from benchmarks.timing import gpu_seconds

SLOWER = 1.1


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


def wrong(row: dict[str, Any]) -> bool:
    """Is ours further from float64 than rounding in another order explains?"""
    return not row["ours from float64"] <= max(3 * row["eager from float64"], APART)


def drawn(seed: int, largest: int) -> Program | None:
    """None where eager mode refuses the program, as where a gradient needs what was overwritten."""
    try:
        return Program(seed, largest)
    except RuntimeError:
        return None


def report(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        print("No program was measured: --seconds is too short for the first.")
        return
    ratios = sorted(row["lazysched"] / row["compile"] for row in rows)
    shown = [row for row in rows if row["lazysched"] > SLOWER * row["compile"] or wrong(row)]
    shown.sort(key=lambda row: row["compile"] / row["lazysched"])
    print(table(["seed", "sizes", "lazysched, us", "torch.compile, us", "ratio", "apart", ""],
                [(row["seed"], "x".join(map(str, row["sizes"])), f"{row['lazysched']:.1f}", f"{row['compile']:.1f}",
                  f"{row['lazysched'] / row['compile']:.2f}", f"{row['apart']:.1e}", "WRONG" if wrong(row) else "")
                 for row in shown]))  # fmt: skip
    low, high = (ratios[len(ratios) * tenth // 10] for tenth in (1, 9))
    print(f"{len(rows)} programs, time against torch.compile's: median {statistics.median(ratios):.2f}, a tenth below {low:.2f}, "
          f"a tenth above {high:.2f}. The table shows the {len(shown)} that are above {SLOWER} or wrong.")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0, help="of measuring; programs that are left then are left out")
    parser.add_argument("--count", type=int, default=100, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a look at the program")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    seeds, largest = range(asked.seed, asked.seed + asked.count), TINY if asked.tiny else LARGEST
    if asked.worker is not None:
        for seed in seeds[asked.worker :: asked.workers]:
            program = drawn(seed, largest)
            if program is not None:
                program.compiled(), program.lazysched()
                lazy_backend.mark_step(wait=True)
        return 0
    if asked.workers > 1:
        same = ["--seed", str(asked.seed), "--count", str(asked.count), *(["--tiny"] if asked.tiny else [])]
        in_workers("benchmarks.composed", same, asked.workers, asked.seconds)
    rows, end = [], time.monotonic() + asked.seconds
    for seed in tqdm(seeds, desc="measuring", unit="program"):
        if time.monotonic() > end:
            break
        program = drawn(seed, largest)
        rows += [program.row()] if program is not None else []
    report(rows)
    save("composed", {"programs": rows}, asked.output)
    return 1 if any(map(wrong, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
