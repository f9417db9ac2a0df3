"""Fusion decided by measurement, where it is doubtful: a large reduction and the work around it, in one kernel or in several.

In one kernel a value need not go through memory; but it may be computed again in each pass over a row, or take registers that the
reduction needs. Both ways compile, run on scratch memory, and what is faster is remembered on disk. Imports `ir_nodes` and
codegen's planning and measuring modules.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Callable, Iterable, Mapping

from codegen import bench, binaries, choices
from codegen.autotune import machine_name, moved, size_class
from codegen.contest import Timer, decide, in_words
from codegen.fuse import Sides, fused, plan_units, units_of, users_of, values_written_by
from codegen.group import Group, Unit
from codegen.kernel import KernelStep
from codegen.last_bits import may_reorder
from codegen.tuning import Tuning
from ir_nodes import Graph, settings
from ir_nodes.node import Value
from ir_nodes.remarks import Remarks

SMALLEST = 4 << 20  # bytes that a kernel moves; below, a second launch costs more than anything can bring
BETTER = 0.95  # share of the one kernel's time that makes two of them the winner
TOGETHER = "together"

Cut = dict[int, int]
"""Units by position, each on side 0 or 1."""


def measured_sides(graph: Graph, tuning: Tuning, folder: Path, device: int, timer: Timer,
                   remarks: Remarks | None = None) -> Sides:
    """What `plan` should keep apart on CUDA device ``device``; nothing unless LAZYSCHED_BENCHMARK_FUSION asks for it."""
    if not settings.current().benchmark_fusion or not settings.enabled("fusion") or not may_reorder():
        return {}
    return sides_of(graph, tuning, machine_name(device), folder, timer, remarks)


def sides_of(graph: Graph, tuning: Tuning, machine: str, folder: Path, timer: Timer, remarks: Remarks | None = None) -> Sides:
    """What is faster apart, measured by ``timer`` or remembered; ``remarks`` are told."""
    remarks = remarks or Remarks()
    units = units_of(graph, (), tuning)
    wanted = dict.fromkeys(graph.outputs())
    users = users_of(units)
    home = {unit: group for group in fused(units, tuning, {}).groups() for unit in group.units}
    sides: dict[int, tuple[int, int]] = {}
    contests: list[tuple[object, int, dict[str, Cut], list[list[KernelStep]]]] = []
    for number, group in enumerate(dict.fromkeys(home.values())):
        cuts = doubtful_cuts(group)
        if not cuts:
            continue
        outside = [value for value in values_written_by(group) if value in wanted or any(
            home[user] is not group for user in users.get(value, ()))]
        ways = [steps_of(group, outside, tuning, cut) for cut in ({}, *cuts.values())]
        if not worth_it(ways[0]) or not all(map(bench.can_time, (step for way in ways for step in way))):
            continue
        key = (*((step.kernel, size_class(step)) for way in ways for step in way), machine, binaries.toolchain())
        found = choices.recall(folder, "fusion", key)
        if found is None:
            contests.append((key, number, cuts, ways))
        else:
            keep_apart(sides, number, cuts.get(str(found["choice"]), {}))
            note(remarks, ways[0][0], str(found["choice"]), found.get("microseconds", {}))
    for (key, number, cuts, ways), times in zip(contests, timer([ways for _, _, _, ways in contests])):
        names = [TOGETHER, *cuts]
        choice = decide(names, times, BETTER)
        keep_apart(sides, number, cuts.get(choice, {}))
        if any(time is not None for time in times):
            told = {name: None if time is None else round(time * 1e6, 2) for name, time in zip(names, times)}
            kernels = [step.kernel.name for step in ways[0]]
            note(remarks, ways[0][0], choice, told)
            choices.remember(folder, "fusion", key, {"choice": choice, "kernels": kernels, "microseconds": told})
    return sides


def note(remarks: Remarks, step: KernelStep, choice: str, measured: Mapping[str, float | None]) -> None:
    took = in_words(choice, [TOGETHER], measured)
    if choice == TOGETHER:
        remarks.did("fusion", step.kernel.name, f"one kernel is faster than any two: {took}")
    else:
        remarks.refused("fusion", step.kernel.name, f"two kernels, cut {choice}, are faster: {took}")


def keep_apart(sides: dict[int, tuple[int, int]], number: int, cut: Cut) -> None:
    sides.update((position, (number, side)) for position, side in cut.items())


def worth_it(steps: list[KernelStep]) -> bool:
    return len(steps) == 1 and moved(steps[0]) >= SMALLEST


def doubtful_cuts(group: Group) -> dict[str, Cut]:
    """Ways to cut a group in two, by name: in front of its reductions, and behind them."""
    reducing = [unit for unit in group.units if unit.part is not None and unit.part.reduces]
    if not reducing or group.split or group.draws or len(group.units) < 2:
        return {}
    before = closure(reducing, lambda unit: unit.before, group)
    after = closure(reducing, users_within(group), group)
    front = {unit for unit in group.units if unit in before and unit not in after and unit not in reducing}
    back = {unit for unit in group.units if unit in after and unit not in before and unit not in reducing
            and unit not in group.kept_units}
    cuts = {"before reducing": {unit.position: int(unit not in front) for unit in group.units},
            "after reducing": {unit.position: int(unit in back) for unit in group.units}}
    return {name: cut for name, cut in cuts.items() if len(set(cut.values())) == 2}


def users_within(group: Group) -> Callable[[Unit], Iterable[Unit]]:
    users: dict[Unit, list[Unit]] = {}
    for unit in group.units:
        for other in unit.before:
            users.setdefault(other, []).append(unit)
    return lambda unit: users.get(unit, ())


def closure(start: Iterable[Unit], step: Callable[[Unit], Iterable[Unit]], group: Group) -> set[Unit]:
    """The group's units that are reached from ``start`` in one step or more."""
    mine, found, stack = set(group.units), set(), list(start)
    while stack:
        for unit in step(stack.pop()):
            if unit in mine and unit not in found:
                found.add(unit)
                stack.append(unit)
    return found


def steps_of(group: Group, outside: Iterable[Value], tuning: Tuning, cut: Cut) -> list[KernelStep]:
    """The launches of a group's units alone, with what ``cut`` separates apart."""
    sides = {position: (0, side) for position, side in cut.items()}
    made = plan_units(copies_of(group), outside, tuning, sides)
    return [step for step in made.steps if isinstance(step, KernelStep)]


def copies_of(group: Group) -> list[Unit]:
    """The group's units, waiting for one another only."""
    copies: dict[Unit, Unit] = {}
    for unit in group.units:
        copies[unit] = replace(unit, before={copies[other]: None for other in unit.before if other in copies})
    for unit, copy in copies.items():
        copy.followers = {copies.get(other, other): None for other in unit.followers}
    return list(copies.values())
