"""Which of several ways to do the same is fastest: compiles all, loads them, times them. Imports torch and codegen's `bench`,
`loading` and plan types."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Mapping, Sequence

import torch

from codegen import bench
from codegen.bench import Bench, Ready
from codegen.cuda_driver import DriverError, Function
from codegen.kernel import ExternStep, Kernel, KernelStep
from codegen.kernel_files import KernelCompileError
from codegen.loading import load_some

ROUNDS = 5

Contestant = Sequence[KernelStep | ExternStep]
"""Launches and ATen calls that run one after the other."""
Contest = Sequence[Contestant]
"""Contestants that do the same; the first is what would run without any measurement."""
Times = Sequence[float | None]
Timer = Callable[[Sequence[Contest]], Sequence[Times]]
"""Seconds of each contestant of each contest; None where one cannot run."""


def decide(names: Sequence[str], times: Times, better: float) -> str:
    """The fastest, or the first where none takes less than ``better`` of its time."""
    first = times[0]
    ran = [(time, name) for time, name in zip(times, names) if time is not None]
    if first is None or not ran:
        return min(ran)[1] if ran else names[0]
    best, name = min(ran)
    return name if best < better * first else names[0]


def remembered(contests: Sequence[Contest]) -> list[Times]:
    """A timer that measures nothing: what no earlier run has decided stays as it is."""
    return [[None] * len(contest) for contest in contests]


def in_words(choice: str, names: Sequence[str], microseconds: Mapping[str, float | None]) -> str:
    """What a contest between ``names``, of which the first is what would run without it, has chosen, and by how much."""
    best, first = microseconds.get(choice), microseconds.get(names[0])
    instead = f" instead of {first:.0f}" if first and choice != names[0] else ""
    return f"{best:.0f} us measured{instead}" if best else "measured"


def on_gpu(folder: Path, device: int) -> Timer:
    """A timer that launches on CUDA device ``device``; ``folder`` keeps what it compiles."""

    def times(contests: Sequence[Contest]) -> list[Times]:
        unknown: list[Times] = [[None] * len(contest) for contest in contests]
        room = bench.room(device) if contests else 0
        fits = [index for index, contest in enumerate(contests) if len(contest) > 1 and scratch_bytes(contest) <= room]
        if not fits or torch.cuda.is_current_stream_capturing():
            return unknown
        steps = [step for index in fits for contestant in contests[index] for step in contestant]
        loaded = load_some([step.kernel for step in steps if isinstance(step, KernelStep)], folder, device)
        try:
            with Bench(device, max(scratch_bytes(contests[index]) for index in fits)) as timed:
                for index in fits:
                    unknown[index] = _times(timed, contests[index], loaded)
        except DriverError:  # the memory has gone, say: what could not be measured stays as it is
            pass
        return unknown

    return times


def scratch_bytes(contest: Contest) -> int:
    return max(bench.scratch_bytes(contestant) for contestant in contest)


def _times(timed: Bench, contest: Contest, loaded: Mapping[Kernel, Function | KernelCompileError]) -> Times:
    able: dict[int, list[Ready]] = {}
    for index, contestant in enumerate(contest):
        found = [(step, loaded[step.kernel] if isinstance(step, KernelStep) else None) for step in contestant]
        ready = [(step, one) for step, one in found if not isinstance(one, KernelCompileError)]
        if len(ready) == len(contestant):
            able[index] = ready
    seconds = dict(zip(able, timed.seconds(list(able.values()), ROUNDS)))
    return [seconds.get(index) for index in range(len(contest))]
