"""Matrix products with what follows them in one kernel, where that measured faster than the library's product and a kernel.

Imports `ir_nodes` and codegen's planning and measuring modules.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Mapping

from codegen import binaries, choices
from codegen.autotune import machine_name, size_class
from codegen.benchmark_fusion import copies_of
from codegen.contest import Contestant, Timer, decide, in_words
from codegen.expressions import Unsupported
from codegen.fuse import fused, plan_units, units_of, users_of, values_written_by
from codegen.group import Group
from codegen.kernel import KernelStep, Plan
from codegen.last_bits import may_reorder
from codegen.product import is_product, lower_product
from codegen.tuning import Tuning
from ir_nodes import Graph, settings
from ir_nodes.node import Node, Value
from ir_nodes.remarks import Remarks

BETTER = 0.97
LIBRARY = "library"
TILES = ("", "product_columns=256", "product_rows=64", "product_rows=64,product_columns=64")

Choices = Mapping[Node, str]
"""Products that kernels of ours multiply, with what their tiles change in the tuning."""


def measured_products(graph: Graph, tuning: Tuning, folder: Path, device: int, timer: Timer,
                      remarks: Remarks | None = None) -> Choices:
    """Which products pay on CUDA device ``device``; none unless LAZYSCHED_TEMPLATES asks for them."""
    if not settings.current().templates or not settings.enabled("templates") or not may_reorder():
        return {}
    return products_of(graph, tuning, machine_name(device), folder, timer, remarks)


def products_of(graph: Graph, tuning: Tuning, machine: str, folder: Path, timer: Timer,
                remarks: Remarks | None = None) -> Choices:
    """Which products pay, measured by ``timer`` or remembered; ``remarks`` are told."""
    remarks = remarks or Remarks()
    able = [node for node in graph.nodes if is_product(node) and can_lower(node)]
    units = units_of(graph, (), tuning, able) if able else []
    wanted = dict.fromkeys(graph.outputs())
    users = users_of(units)
    home = {unit: group for group in fused(units, tuning, {}).groups() for unit in group.units}
    found: dict[Node, str] = {}
    contests: dict[object, tuple[dict[str, Contestant], list[Node]]] = {}
    for group in dict.fromkeys(home.values()):
        if not group.multiplies or len(group.units) < 2:
            continue
        outside = [value for value in values_written_by(group) if value in wanted or any(
            home[user] is not group for user in users.get(value, ()))]
        ways = ways_of(group, outside, tuning)
        (node,) = (unit.node for unit in group.units if unit.part is not None and unit.part.multiplies)
        key = (*(step.kernel for way in ways.values() for step in way if isinstance(step, KernelStep)),
               *(size_class(step) for step in ways[""] if isinstance(step, KernelStep)), machine, binaries.toolchain())
        known = choices.recall(folder, "product", key)
        if known is None:
            contests.setdefault(key, (ways, []))[1].append(node)
            continue
        note(remarks, node, str(known["choice"]), known.get("microseconds", {}))
        if known["choice"] != LIBRARY:
            found[node] = str(known["choice"])
    for (key, (ways, nodes)), times in zip(contests.items(), timer([list(ways.values()) for ways, _ in contests.values()])):
        choice = decide(list(ways), times, BETTER)
        if choice != LIBRARY:
            found.update(dict.fromkeys(nodes, choice))
        if any(time is not None for time in times):
            told = {name: None if time is None else round(time * 1e6, 2) for name, time in zip(ways, times)}
            ops = list(dict.fromkeys(node.target for step in ways[""] if isinstance(step, KernelStep) for node in step.nodes))
            choices.remember(folder, "product", key, {"choice": choice, "ops": ops, "microseconds": told})
            for node in nodes:
                note(remarks, node, choice, told)
    return found


def note(remarks: Remarks, node: Node, choice: str, measured: Mapping[str, float | None]) -> None:
    took = in_words(choice, [LIBRARY], measured)
    if choice == LIBRARY:
        remarks.refused("templates", node.name, f"the library's product and a kernel are faster than one kernel: {took}")
    else:
        remarks.did("templates", node.name, f"one kernel with what follows it{choice and ', ' + choice}: {took}")


def can_lower(node: Node) -> bool:
    try:
        lower_product(node)
    except Unsupported:
        return False
    return True


def ways_of(group: Group, outside: list[Value], tuning: Tuning) -> dict[str, Contestant]:
    """Launches of the group's units, by name: the library's product with kernels, then one kernel in several tiles."""
    apart = copies_of(group)
    for unit in apart:
        if unit.part is not None and unit.part.multiplies:
            unit.part, unit.needs = None, tuple(unit.node.inputs())
    together = plan_units(copies_of(group), outside, tuning, {}).steps
    ways: dict[str, Contestant] = {LIBRARY: plan_units(apart, outside, tuning, {}).steps, "": together}
    for changes in TILES[1:]:
        steps = [tiled(step, changes) if isinstance(step, KernelStep) else step for step in together]
        if any(step is not old for step, old in zip(steps, together)):
            ways[changes] = steps
    return ways


def tiled(step: KernelStep, changes: str) -> KernelStep:
    other = step.retile(changes) if changes and step.retile is not None else None
    return step if other is None else replace(other, retile=None)


def with_tiles(plan: Plan, found: Choices) -> Plan:
    """The plan with every chosen product in its tile."""
    steps = []
    for step in plan.steps:
        chosen = [found[node] for node in step.nodes if node in found] if isinstance(step, KernelStep) else []
        steps.append(tiled(step, chosen[0]) if isinstance(step, KernelStep) and chosen else step)
    return replace(plan, steps=tuple(steps))
