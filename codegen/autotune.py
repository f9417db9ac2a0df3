"""Measures a plan's large kernels in several tiles and keeps the fastest. Imports torch, `codegen` and `ir_nodes.settings`.

A kernel is measured once for each structure, class of sizes and machine, all that is new of a graph together: its candidates
compile in parallel, run a few times each on scratch memory, and the choice is remembered on disk. A kernel that reduces may add
in another order in another tile, so where ranks have to stay equal, or the program asks for determinism, only kernels that reduce
nothing are tuned; their results are the same in every tile.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Mapping

import torch

from codegen import bench, binaries, choices
from codegen.contest import Timer, decide, in_words
from codegen.kernel import KernelStep, Plan, Size, Temporary
from codegen.last_bits import may_reorder
from ir_nodes import settings
from ir_nodes.remarks import Remarks

SMALLEST = 1 << 20  # bytes that a launch moves; below, launching takes longer than running
CANDIDATES = 5  # with the first, which the tuning gives
BETTER = 0.97  # share of the first one's time that makes another the winner
POINTWISE = ("pointwise_block=512", "pointwise_block=2048", "thread_bytes=64", "transpose_side=32")
REDUCTION = ("padded=100", "resident=32", "rewalked=48", "rewalked=0", "lane=8,wide_lane=16,loop_lane=16",
             "lane=32,wide_lane=64", "looped=8192,online=4096", "column_width=128", "persistent=4096",
             "tile=4096")
"""Changes such as have won on an H200, the most frequent first."""


def tune(plan: Plan, machine: str, folder: Path, timer: Timer, remarks: Remarks | None = None) -> Plan:
    """The plan with the fastest known tile for every launch that moves much. ``machine`` tells GPUs apart; ``remarks`` are
    told the choices."""
    steps = list(plan.steps)
    known: dict[object, str] = {}
    measured: dict[object, dict[str, float | None]] = {}
    contests: dict[object, dict[str, KernelStep]] = {}
    for step in steps:
        if isinstance(step, KernelStep) and worth_it(step):
            key = key_of(step, machine)
            if key not in known and key not in contests:
                found = choices.recall(folder, step.kernel.name, key)
                if found is not None:
                    known[key], measured[key] = str(found["choice"]), found.get("microseconds", {})
                else:
                    contests[key] = candidates(step)
    asked = [[[step] for step in contest.values()] for contest in contests.values()]
    for (key, contest), times in zip(contests.items(), timer(asked)):
        known[key] = decide(list(contest), times, BETTER)
        told = {name: None if time is None else round(time * 1e6, 2) for name, time in zip(contest, times)}
        if any(time is not None for time in times):
            measured[key] = told
            choices.remember(folder, contest[""].kernel.name, key, {"choice": known[key], "microseconds": told})
    for index, step in enumerate(steps):
        if isinstance(step, KernelStep) and worth_it(step):
            key = key_of(step, machine)
            steps[index] = chosen(step, known[key])
            if remarks is not None and key in measured:
                note(remarks, step, known[key], measured[key])
    return replace(plan, steps=tuple(steps))


def note(remarks: Remarks, step: KernelStep, choice: str, measured: Mapping[str, float | None]) -> None:
    took = in_words(choice, [""], measured)
    if choice:
        remarks.did("autotune", step.kernel.name, f"runs with {choice}: {took}")
    else:
        remarks.refused("autotune", step.kernel.name, f"the usual blocks are the fastest: {took}")


def worth_it(step: KernelStep) -> bool:
    return step.retile is not None and moved(step) >= SMALLEST and bench.can_time(step) and (not reduces(step) or may_reorder())


def moved(step: KernelStep) -> int:
    """Bytes of the memory that it reads and writes."""
    return sum(value.nbytes if isinstance(value, Temporary) else value.buffer.nbytes for value in (*step.reads, *step.writes))


def reduces(step: KernelStep) -> bool:
    return not step.kernel.name.startswith("pointwise")


def key_of(step: KernelStep, machine: str) -> tuple[object, ...]:
    """What a choice holds for: the kernel, its sizes to the next power of two, the machine and what compiles."""
    return (step.kernel, size_class(step), machine, binaries.toolchain(), POINTWISE, REDUCTION)


def size_class(step: KernelStep) -> tuple[int, ...]:
    return tuple((arg.value - 1).bit_length() for arg in step.args if isinstance(arg, Size))


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


def chosen(step: KernelStep, changes: str) -> KernelStep:
    other = step.retile(changes) if changes and step.retile is not None else None
    return step if other is None else other


def machine_name(device: int) -> str:
    return str(torch.cuda.get_device_name(device))


def tuned(plan: Plan, folder: Path, device: int, timer: Timer, remarks: Remarks | None = None) -> Plan:
    """`tune` by ``timer`` for CUDA device ``device``, unless it is switched off."""
    if not settings.current().autotune or not settings.enabled("autotune"):
        return plan
    return tune(plan, machine_name(device), folder, timer, remarks)
