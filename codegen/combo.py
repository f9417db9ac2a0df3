"""Kernels that do not depend on one another share a launch. Imports `ir_nodes` and codegen's kernel modules.

A pass over a finished plan. Steps carry a level that rises along every dependency, as late as what waits for them allows; steps
of one level cannot depend on one another, and a step joins others where a level is found that fits them all, which is a local
test. First steps that run the same kernel join (an optimizer's parameters), then small ones of any kernels.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Callable, Hashable, Iterator, Sequence

from codegen.combo_launches import KernelKey, Step, kernel_key, launches
from codegen.combo_source import MAX_LANES
from codegen.kernel import ExternStep, KernelStep, Plan, Refusal, Temporary
from ir_nodes import settings
from ir_nodes.node import Value

Held = Value | Temporary

TINY = 1 << 20
"""Bytes that a step may touch to share a launch with other kernels: what is larger does not wait for launches."""

HELD, FAR = 4 << 20, 16 << 20
"""A step with more than ``HELD`` bytes of intermediate results is not moved past ``FAR`` bytes of other steps' work: they would
be held for longer, and be read from memory instead of from the cache, where that costs more than the launch: about a
microsecond for so many."""

FEW, HELD_BY_FEW = 132, 16 << 20
"""A step of at most ``FEW`` programs leaves much of a large GPU idle and may hold so many bytes: beside others of its kind it
takes a part of the time, even if it reads from memory. Second halves of split sums are such steps."""

WAITING = 64 << 20
"""Bytes of intermediate results that steps which hold few may hold together for a launch that they share."""

TRIES, MAX_DEGREE, WARPS_APART = 4, 256, 4


@dataclass(slots=True, eq=False)
class Item:
    """Steps that will run together, by position. ``low`` is above the level of all that they wait for, ``high`` the level of the
    first that waits for them. ``ready`` and ``due``: the positions between which they could run; ``reading`` and ``writing``:
    the same of those among them whose many bytes should neither wait nor be made early."""

    steps: list[int]
    stage: int
    chapter: int
    level: int = 0
    low: int = 0
    high: int = 1
    before: list["Item"] = field(default_factory=list)
    after: list["Item"] = field(default_factory=list)
    ready: int = 0
    due: int = 0
    reading: int | None = None
    writing: int | None = None
    nbytes: int = 0
    held: int = 0  # bytes of intermediate results of steps that have few
    warps: tuple[int, ...] = ()  # what its kernels were laid out for, those that have no preference left out
    kernels: dict[KernelKey, None] = field(default_factory=dict)
    joined: "Item | None" = None

    def root(self) -> "Item":
        item = self
        while item.joined is not None:
            item = item.joined
        return item


def combine(plan: Plan) -> Plan:
    """The plan with fewer launches, or the same plan where nothing can be combined or the optimisation is off."""
    if not settings.enabled("combo") or len(plan.steps) < 2 or len(plan.needs) != len(plan.steps):
        return plan
    items = items_of(plan)
    joiner = Joiner(plan.steps)
    roots = items
    for key_of in (same_kernel, same_source, tiny):
        joiner.join(roots, key_of)
        roots = [item for item in roots if item.joined is None]
    if len(roots) == len(items):
        return replace(plan, refusals=plan.refusals + tuple(joiner.refusals))
    steps: list[Step] = []
    for item in in_order(roots):
        steps += launches([plan.steps[index] for index in item.steps])
    return replace(plan, steps=tuple(steps), refusals=plan.refusals + tuple(joiner.refusals), needs=())


def same_kernel(item: "Item") -> Hashable | None:
    return (item.stage, item.chapter, *item.kernels) if item.kernels else None


def same_source(item: "Item") -> Hashable | None:
    """Kernels that differ in nothing but which arguments are known to be multiples of 16."""
    return (item.stage, item.chapter, *(key[1:3] + key[4:] for key in item.kernels)) if item.kernels else None


def tiny(item: "Item") -> Hashable | None:
    return (item.stage, item.chapter) if item.kernels and item.nbytes <= TINY * len(item.steps) else None


def place_of(step: Step) -> tuple[int, int]:
    """Its stage, and the last of its nodes' chapters."""
    nodes = (step.node,) if isinstance(step, ExternStep) else step.nodes
    return nodes[0].stage, max(node.chapter for node in nodes)


def touched(step: Step) -> tuple[list[Held], list[Held]]:
    """(read, written)."""
    if isinstance(step, KernelStep):
        return list(step.reads), list(step.writes)
    return list(step.node.inputs()), [write.value for write in step.node.all_writes()]


def size_of(value: Held) -> int:
    return value.nbytes if isinstance(value, Temporary) else value.buffer.nbytes


def moved(step: Step, value: Held) -> int:
    """Bytes of ``value`` that ``step`` reads or writes."""
    return step.bytes_of(value) if isinstance(step, KernelStep) else size_of(value)


def items_of(plan: Plan) -> list[Item]:
    """One item for each step, with its level and where it could run."""
    items = [Item([index], *place_of(step), ready=-1, due=len(plan.steps)) for index, step in enumerate(plan.steps)]
    for index, (item, needs) in enumerate(zip(items, plan.needs)):
        for need in needs:
            item.before.append(items[need])
            items[need].after.append(item)
            item.ready = max(item.ready, need)
            items[need].due = min(items[need].due, index)
    for item in reversed(items):
        item.high = min((other.level for other in item.after), default=1)
        item.level = item.high - 1
    for item in items:
        item.low = max((other.level for other in item.before), default=-len(items) - 1) + 1
    made = {value for step in plan.steps for value in touched(step)[1]}
    used = {value for step in plan.steps for value in touched(step)[0]}
    for item, step in zip(items, plan.steps):
        _describe(item, step, made, used)
    return items


def _describe(item: Item, step: Step, made: set[Held], used: set[Held]) -> None:
    read, written = touched(step)
    item.nbytes = sum(moved(step, value) for value in (*read, *written))
    taken, left = (sum(map(size_of, values)) for values in (made.intersection(read), used.intersection(written)))
    few = isinstance(step, KernelStep) and math.prod(step.grid) <= FEW
    most = HELD_BY_FEW if few else HELD
    item.reading = item.ready if taken > most else None
    item.writing = item.due if left > most else None
    item.held = sum(size for size in (taken, left) if size <= most)
    key = kernel_key(step)
    if key is not None and isinstance(step, KernelStep):
        item.kernels[key] = None
        item.warps = () if step.flat else (step.kernel.num_warps,)


class Joiner:
    """Joins items whose key is the same, where dependencies and memory allow."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.refusals: list[Refusal] = []
        self._steps = steps
        self._work = [0, *accumulate(sum(moved(step, one) for one in sum(touched(step), [])) for step in steps)]

    def join(self, items: Sequence[Item], key_of: Callable[[Item], Hashable | None]) -> None:
        """Each item joins one of the last few with its key, or is one that others may join."""
        open_items: dict[Hashable, list[Item]] = {}
        for item in items:
            key = key_of(item)
            if key is None:
                continue
            known = open_items.setdefault(key, [])
            reasons = [self._refuse(other, item) for other in reversed(known[-TRIES:])]
            fitting = next((other for other, reason in zip(reversed(known[-TRIES:]), reasons) if not reason), None)
            if fitting is None:
                if reasons:
                    self._note(known[-1], item, reasons[0])
                known.append(item)
                continue
            unite(fitting, item)

    def _note(self, one: Item, two: Item, reason: str) -> None:
        first, second = (self._steps[item.steps[0]] for item in (one, two))
        assert isinstance(first, KernelStep) and isinstance(second, KernelStep)
        self.refusals.append(Refusal(first.nodes[0], second.nodes[0], f"no shared launch: {reason}"))

    def _refuse(self, group: Item, item: Item) -> str:
        """Why the item does not join the group; "" where it does."""
        if len({**group.kernels, **item.kernels}) > MAX_LANES:
            return f"more than {MAX_LANES} kernels"
        warps = group.warps + item.warps
        if warps and max(warps) > WARPS_APART * min(warps):
            return "they need programs of different sizes"
        if shared_level(group, item) is None:
            return "what lies between them has to run between them"
        if group.held + item.held > WAITING or not self._near(group, item):
            return "large results would be held for longer"
        return ""

    def _near(self, group: Item, item: Item) -> bool:
        """Whether neither's large operands would wait, or be made early, for the other. Neighbours' do not."""
        if self._between(min(group.steps + item.steps), max(group.steps + item.steps) - 1) <= FAR:
            return True
        ready, due = max(group.ready, item.ready), min(group.due, item.due)
        starts = [start for start in (group.reading, item.reading) if start is not None]
        ends = [end for end in (group.writing, item.writing) if end is not None]
        return self._between(min(starts, default=ready), ready) <= FAR and self._between(due, max(ends, default=due)) <= FAR

    def _between(self, first: int, last: int) -> int:
        """Bytes touched by the steps behind ``first`` up to ``last``."""
        return self._work[min(last + 1, len(self._steps))] - self._work[first + 1] if last > first else 0


def shared_level(group: Item, item: Item) -> int | None:
    """A level at which both can stand, the group's if possible; None where there is none."""
    low, high = max(group.low, item.low), min(group.high, item.high)
    if low <= group.level < high:
        return group.level
    cheap = len(group.before) + len(group.after) <= MAX_DEGREE
    return item.level if cheap and low <= item.level < high else None


def unite(group: Item, item: Item) -> None:
    """Make the item a part of the group."""
    level = shared_level(group, item)
    assert level is not None
    for side in (group, item):
        if side.level != level:
            for other in side.before:
                other.root().high = min(other.root().high, level)
            for other in side.after:
                other.root().low = max(other.root().low, level + 1)
    group.level, group.low, group.high = level, max(group.low, item.low), min(group.high, item.high)
    group.steps += item.steps
    group.before += item.before
    group.after += item.after
    group.ready, group.due = max(group.ready, item.ready), min(group.due, item.due)
    group.reading = min((start for start in (group.reading, item.reading) if start is not None), default=None)
    group.writing = max((end for end in (group.writing, item.writing) if end is not None), default=None)
    group.nbytes += item.nbytes
    group.held += item.held
    group.warps = tuple(dict.fromkeys(group.warps + item.warps))
    group.kernels.update(item.kernels)
    item.joined = group


def in_order(items: Sequence[Item]) -> Iterator[Item]:
    """Dependency order, otherwise by stage and each item's first step."""
    before = {item: {other.root() for other in item.before} for item in items}
    after: dict[Item, list[Item]] = {item: [] for item in items}
    for item, others in before.items():
        for other in others:
            after[other].append(item)
    waiting = {item: len(others) for item, others in before.items()}
    ready = [(item.stage, item.steps[0], item) for item in items if not waiting[item]]
    heapq.heapify(ready)
    left = len(items)
    while ready:
        *_, item = heapq.heappop(ready)
        yield item
        left -= 1
        for follower in after[item]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (follower.stage, follower.steps[0], follower))
    assert not left, "combining made a cycle"
