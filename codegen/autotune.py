"""Measures a plan's large kernels in several tiles and keeps the fastest. Imports torch, `codegen` and `ir_nodes.settings`.

A kernel is measured once for each structure, class of sizes and machine, all that is new of a graph together: its candidates
compile in parallel, run a few times each on scratch memory, and the choice is remembered on disk. A kernel that reduces may add
in another order in another tile, so where ranks have to stay equal, or the program asks for determinism, only kernels that reduce
nothing are tuned; their results are the same in every tile.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Callable, Sequence

import torch

from codegen import bench, binaries, choices
from codegen.bench import Bench
from codegen.cuda_driver import DriverError, Function
from codegen.kernel import KernelStep, Plan, Size, Temporary
from codegen.loading import load_some
from ir_nodes import settings

SMALLEST = 1 << 20  # bytes that a launch moves; below, launching takes longer than running
CANDIDATES = 6  # with the first, which the tuning gives
BETTER = 0.97  # share of the first one's time that makes another the winner
ROUNDS = 5
POINTWISE = ("pointwise_lane=16", "pointwise_block=2048", "pointwise_block=512", "pointwise_block=4096,pointwise_lane=16",
             "transpose_side=32", "transpose_side=128,pointwise_lane=32")
REDUCTION = ("lane=8,loop_lane=16", "lane=32", "tile=4096", "persistent=4096", "looped=2048", "looped=8192,loop_lane=16",
             "column_width=32", "column_width=128", "column_tile=4096", "column_stages=2")

Contest = Sequence[KernelStep]
Times = Sequence[float | None]
Timer = Callable[[Sequence[Contest]], Sequence[Times]]
"""Seconds of each launch of each contest, all launches of which do the same; None where it cannot run."""


def tune(plan: Plan, machine: str, folder: Path, timer: Timer) -> Plan:
    """The plan with the fastest known tile for every launch that moves much. ``machine`` tells GPUs apart."""
    steps = list(plan.steps)
    known: dict[object, str] = {}
    contests: dict[object, dict[str, KernelStep]] = {}
    for step in steps:
        if isinstance(step, KernelStep) and worth_it(step):
            key = key_of(step, machine)
            if key not in known and key not in contests:
                found = choices.recall(folder, step.kernel.name, key)
                if found is not None:
                    known[key] = str(found["choice"])
                else:
                    contests[key] = candidates(step)
    for (key, contest), times in zip(contests.items(), timer([list(contest.values()) for contest in contests.values()])):
        known[key] = decide(list(contest), times)
        told = {name: None if time is None else round(time * 1e6, 2) for name, time in zip(contest, times)}
        if any(time is not None for time in times):
            choices.remember(folder, contest[""].kernel.name, key, {"choice": known[key], "microseconds": told})
    for index, step in enumerate(steps):
        if isinstance(step, KernelStep) and worth_it(step):
            steps[index] = chosen(step, known[key_of(step, machine)])
    return replace(plan, steps=tuple(steps))


def worth_it(step: KernelStep) -> bool:
    moved = sum(value.nbytes if isinstance(value, Temporary) else value.buffer.nbytes for value in (*step.reads, *step.writes))
    return step.retile is not None and moved >= SMALLEST and bench.can_time(step) and (not reduces(step) or may_reorder())


def reduces(step: KernelStep) -> bool:
    return not step.kernel.name.startswith("pointwise")


def may_reorder() -> bool:
    """May a sum be added up in another order than on another rank, or in another run of the program?"""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ranks and not torch.are_deterministic_algorithms_enabled()


def key_of(step: KernelStep, machine: str) -> tuple[object, ...]:
    """What a choice holds for: the kernel, its sizes to the next power of two, the machine and what compiles."""
    sizes = tuple((arg.value - 1).bit_length() for arg in step.args if isinstance(arg, Size))
    return (step.kernel, sizes, machine, binaries.toolchain(), POINTWISE, REDUCTION)


def candidates(step: KernelStep) -> dict[str, KernelStep]:
    """Launches that differ, by what they change in the tuning, the plan's own ("") first."""
    assert step.retile is not None
    found, seen = {"": step}, {(step.kernel, step.grid)}
    for changes in REDUCTION if reduces(step) else POINTWISE:
        other = step.retile(changes) if len(found) < CANDIDATES else None
        if other is not None and (other.kernel, other.grid) not in seen:
            seen.add((other.kernel, other.grid))
            found[changes] = other
    return found


def decide(names: Sequence[str], times: Times) -> str:
    """The fastest, or the first where none is clearly faster."""
    first = times[0]
    ran = [(time, name) for time, name in zip(times, names) if time is not None]
    if first is None or not ran:
        return min(ran)[1] if ran else names[0]
    best, name = min(ran)
    return name if best < BETTER * first else names[0]


def chosen(step: KernelStep, changes: str) -> KernelStep:
    other = step.retile(changes) if changes and step.retile is not None else None
    return step if other is None else other


def on_gpu(folder: Path, device: int) -> Timer:
    """A timer that launches on CUDA device ``device``; ``folder`` keeps what it compiles."""

    def times(contests: Sequence[Contest]) -> list[Times]:
        room = bench.room(device) if contests else 0
        fits = [contest for contest in contests if len(contest) > 1 and bench.scratch_bytes(contest[0]) <= room]
        if not fits or torch.cuda.is_current_stream_capturing():
            return [[None] * len(contest) for contest in contests]
        loaded = load_some([step.kernel for contest in fits for step in contest], folder, device)
        try:
            with Bench(device, max(bench.scratch_bytes(contest[0]) for contest in fits)) as timed:
                done = {id(contest): _time(timed, contest, loaded) for contest in fits}
        except DriverError:  # the memory has gone, say: what could not be measured stays as it is
            done = {}
        return [done.get(id(contest), [None] * len(contest)) for contest in contests]

    return times


def _time(timed: Bench, contest: Contest, loaded: dict[object, object]) -> Times:
    ran = [(step, function) for step in contest if isinstance(function := loaded[step.kernel], Function)]
    seconds = dict(zip((id(step) for step, _ in ran), timed.seconds(ran, ROUNDS)))
    return [seconds.get(id(step)) for step in contest]


def machine_name(device: int) -> str:
    return str(torch.cuda.get_device_name(device))


def tuned(plan: Plan, folder: Path, device: int) -> Plan:
    """`tune` on CUDA device ``device``, unless it is switched off."""
    if not settings.current().autotune or not settings.enabled("autotune"):
        return plan
    return tune(plan, machine_name(device), folder, on_gpu(folder, device))
