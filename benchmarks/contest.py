"""One program beside torch.compile: run by each contestant, timed in turns, its results compared with float64's. Imports torch,
lazy_backend, `benchmarks.shapes`, `benchmarks.timing`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm

import lazy_backend
from benchmarks.shapes import distance
from benchmarks.timing import gpu_seconds

Run = Callable[[Sequence[Tensor]], list[Tensor]]


class Contest:
    """``run`` from ``inputs``, gradients that it asks for included. torch.compile is given what that records in ATen's ops,
    forward and backward in one graph. Raises RuntimeError where ``run`` does."""

    def __init__(self, run: Run, inputs: Sequence[Tensor]) -> None:
        self._run, self._inputs = run, inputs
        self._graph = make_fx(lambda *given: run(given))(*inputs)
        self._graph.graph.eliminate_dead_code()
        self._graph.recompile()
        self._compiled = torch.compile(self._graph, dynamic=False)
        self._lazy = [one.to("lazysched") for one in inputs]
        lazy_backend.mark_step()

    def eager(self, _: int = 0) -> list[Tensor]:
        return self._graph(*self._inputs)

    def compiled(self, _: int = 0) -> list[Tensor]:
        return self._compiled(*self._inputs)

    def lazysched(self, _: int = 0) -> list[Tensor]:
        results = self._run(self._lazy)
        lazy_backend.mark_step()
        return results

    def refused(self) -> str:
        """Why torch.compile can't compile it; "": it can."""
        try:
            self.compiled()
        except BackendCompilerFailed as error:
            return str(error).splitlines()[0]
        return ""

    def left_out(self, name: str) -> bool:
        """Says so where torch.compile can't compile it."""
        if why := self.refused():
            tqdm.write(f"{name}: torch.compile fails, left out: {why}")
        return bool(why)

    def first(self) -> None:
        """Runs the program once by each contestant, so that its kernels are on disk."""
        self.lazysched(), self.refused()
        lazy_backend.mark_step(wait=True)

    def row(self, wanted: list[Tensor]) -> dict[str, Any]:
        """Microseconds of each contestant, and how far the two results are from ``wanted``, float64's, at most."""
        ours, eager = [one.to(self._inputs[0].device) for one in self.lazysched()], self.eager()
        apart, off, usual = (max(map(distance, *pair), default=0.0) for pair in ((ours, eager), (ours, wanted), (eager, wanted)))
        del ours, eager, wanted
        for _ in range(2):
            self.lazysched(), self.compiled()
        times: dict[str, list[float]] = {"lazysched": [], "compile": []}
        for _ in range(3):
            times["compile"].append(gpu_seconds(self.compiled, 3, 1e-3))
            times["lazysched"].append(gpu_seconds(self.lazysched, 3, 6e-3))
        return {**{name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}, "apart": apart,
                "ours from float64": off, "eager from float64": usual}  # fmt: skip


def ratio(row: dict[str, Any]) -> float:
    return row["lazysched"] / row["compile"]
