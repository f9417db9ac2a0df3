"""How long each step of a program takes where it runs, for `explain(measure=True)`.

Imports torch, `codegen` and `lazy_backend.core`. A note of the time stands between all steps: CUDA events on a GPU, the clock
elsewhere. On a GPU the host first gets a head start, so that what is measured is the GPU's work and not the wait for a launch.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Sequence

import torch

from codegen.executable import Emit, Program
from codegen.step_use import StepUse
from ir_nodes import Node
from lazy_backend import core

_LEAD_CYCLES = 60_000  # for each step: about 30 us at 2 GHz
_MOST_CYCLES = 200_000_000
_ROUNDS = 5


class StepTimes:
    """The times of one program's last run. ``nodes``: what each step runs."""

    def __init__(self, nodes: Sequence[tuple[Node, ...]], device: int) -> None:
        self.nodes, self.device = list(nodes), device
        self.runs = 0
        self._now: list[Any] = []

    def note(self, number: int) -> None:
        if number == 0:
            self.runs, self._now = self.runs + 1, []
            if core.physical_is_cuda():
                torch.cuda._sleep(min(len(self.nodes) * _LEAD_CYCLES, _MOST_CYCLES))
        self._now.append(now())

    def read(self) -> list[tuple[tuple[Node, ...], float]]:
        """(what it runs, seconds) for each step of the last run; waits for the device."""
        if self._now and core.physical_is_cuda():
            self._now[-1].synchronize()
        return [(nodes, passed(before, after)) for nodes, before, after in zip(self.nodes, self._now, self._now[1:])]


def now() -> Any:
    """A moment in the current stream, or on the clock."""
    if not core.physical_is_cuda():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def passed(before: Any, after: Any) -> float:
    return float(after - before) if isinstance(before, float) else float(before.elapsed_time(after)) / 1e3


def with_times(steps: Sequence[Emit], device: int) -> tuple[list[Emit], StepTimes]:
    """``steps`` with a note of the time before each and at the end."""
    times = StepTimes([step.nodes for step in steps], device)
    timed: list[Emit] = []
    for number, step in enumerate(steps):
        timed += [_note(times, number, step.node.instr if step.node else -1), step]
    return [*timed, _note(times, len(steps), -1)], times


def _note(times: StepTimes, number: int, instr: int) -> Emit:
    def run(slots: list[Any], scalars: list[Any]) -> None:
        times.note(number)

    def add(program: Program) -> None:
        program.python(run, instr, ())

    return Emit(StepUse(()), (), add)


@functools.cache
def copy_rate(device: int) -> float:
    """Bytes per second, read and written, of a copy of a large piece of memory; measured once."""
    nbytes = 1 << 28 if core.physical_is_cuda() else 1 << 26
    source = torch.ones(nbytes, dtype=torch.uint8, device=core.physical_device(device))
    target = torch.empty_like(source)
    target.copy_(source)
    moments = []
    for _ in range(_ROUNDS):
        before = now()
        target.copy_(source)
        moments.append((before, now()))
    if core.physical_is_cuda():
        torch.cuda.synchronize(device)
    return 2 * nbytes / min(passed(before, after) for before, after in moments)
