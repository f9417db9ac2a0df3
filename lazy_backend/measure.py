"""`LazyScheduler(measure=True)`: how long each segment takes on the device. Joins `barriers` and `codegen`.

Python steps between segments note the time: CUDA events on a GPU, the clock elsewhere. So segments share no kernels while this
lasts, and each note costs some microseconds.
"""

from __future__ import annotations

import time
from typing import Any, Sequence

import torch

from barriers.calls import Measured
from barriers.order import Ordered
from codegen.executable import Emit, Program
from codegen.step_use import StepUse
from ir_nodes import Graph, SegmentCall
from ir_nodes.ops import info
from lazy_backend import core


def part_segments(graph: Graph) -> None:
    """A new stage wherever another segment begins, so that no kernel belongs to two."""
    extra, last = 0, graph.nodes[0].segment if graph.nodes else None
    for node in graph.nodes:
        if node.segment is not last:
            extra, last = extra + 1, node.segment
        node.stage += extra


class Clock:
    """The times of one program's last run: one more than there are stretches (segment, "does it wait for a collective?")."""

    def __init__(self, stretches: Sequence[tuple[SegmentCall | None, bool]]) -> None:
        self.stretches = list(stretches)
        self.times: list[Any] = []
        self.last: list[Any] = []

    def note(self, number: int) -> None:
        if number == 0:
            self.times = []
        if core.physical_is_cuda():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.times.append(event)
        else:
            self.times.append(time.perf_counter())
        if number == len(self.stretches):
            self.last = self.times

    def read(self) -> list[Measured]:
        """Each stretch of the last run; waits for the device."""
        if not self.last:
            return []
        if isinstance(self.last[0], float):
            seconds = [after - before for before, after in zip(self.last, self.last[1:])]
        else:
            self.last[-1].synchronize()
            seconds = [before.elapsed_time(after) / 1e3 for before, after in zip(self.last, self.last[1:])]
        return [Measured(call, waits, took) for (call, waits), took in zip(self.stretches, seconds)]


def with_times(steps: Sequence[Emit], report: Ordered) -> list[Emit]:
    """``steps`` with a note of the time wherever another segment begins or a collective is waited for, and at the end."""
    timed: list[Emit] = []
    stretches: list[tuple[SegmentCall | None, bool]] = []
    marks: list[tuple[int, int]] = []  # before which of `timed`, after which recorded op
    for step in steps:
        found = (step.node.segment, info(step.node.target).kind == "wait") if step.node else (None, False)
        if not stretches or found != stretches[-1]:
            marks.append((len(timed) + len(marks), step.node.instr if step.node else -1))
            stretches.append(found)
        timed.append(step)
    clock = Clock(stretches)
    for number, (place, instr) in enumerate(marks):
        timed.insert(place, mark(clock, number, instr))
    timed.append(mark(clock, len(stretches), -1))
    report.measured = clock.read
    return timed


def mark(clock: Clock, number: int, instr: int) -> Emit:
    def run(slots: list[Any], scalars: list[Any]) -> None:
        clock.note(number)

    def add(program: Program) -> None:
        program.python(run, instr, ())

    return Emit(StepUse(()), (), add)
