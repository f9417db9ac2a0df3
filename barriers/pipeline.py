"""The one list of passes and the loop around it. Imports `ir_nodes` and `barriers.passes` only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Sequence

from barriers.passes.dead import eliminate_dead
from barriers.passes.noops import eliminate_noops
from ir_nodes import Graph
from ir_nodes.verify import verify

Pass = Callable[[Graph], Graph]
Observer = Callable[["PassRun", Graph], None]

PASSES: tuple[Pass, ...] = (
    eliminate_noops,
    eliminate_dead,
)


@dataclass(frozen=True, slots=True)
class PassRun:
    """What one pass did: its name, how long it took in milliseconds, and the node counts around it."""

    name: str
    milliseconds: float
    nodes_before: int
    nodes_after: int

    @property
    def removed(self) -> int:
        return self.nodes_before - self.nodes_after

    def __str__(self) -> str:
        return f"{self.name}: {self.nodes_before} -> {self.nodes_after} nodes, {self.milliseconds:.2f} ms"


def run_passes(
    graph: Graph, passes: Sequence[Pass] = PASSES, check: bool = False, observe: Observer | None = None
) -> tuple[Graph, list[PassRun]]:
    """Run ``passes`` in order; ``check`` verifies the graph before and after each, ``observe`` sees the graph after each.

    Returns the last graph and one `PassRun` for each pass. Raises VerificationError, which names the pass, under ``check``.
    """
    if check:
        verify(graph)
    runs: list[PassRun] = []
    for step in passes:
        before, start = len(graph.nodes), time.perf_counter()
        graph = step(graph)
        runs.append(PassRun(step.__name__, (time.perf_counter() - start) * 1e3, before, len(graph.nodes)))
        if check:
            verify(graph, after=step.__name__)
        if observe is not None:
            observe(runs[-1], graph)
    return graph, runs
