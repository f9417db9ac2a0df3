"""Cuts a program into stretches that the driver may replay as CUDA graphs. Imports `codegen.memory_plan` and `ir_nodes`.

A stretch is a run of steps of which each only launches work. What ends one is told by `Emit.blocked`: random numbers that an ATen
kernel draws, Python, collectives; and the border between two segments, so that a profile still shows each. The native core
(csrc/graph.cpp) captures a stretch once its program has run a few times, and replays it as long as the memory that it reads stays
where it is; small memory that moves, such as a batch, is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

from codegen.memory_plan import MemoryPlan, StepUse
from ir_nodes import Graph, Node
from ir_nodes.node import ScalarInput

SHORTEST = 4  # steps worth a graph
MOVABLE = 1 << 26  # bytes: what moves and is larger is not worth the copy


class Step(Protocol):
    @property
    def use(self) -> StepUse: ...
    @property
    def nodes(self) -> tuple[Node, ...]: ...
    @property
    def blocked(self) -> str: ...
    @property
    def calls(self) -> bool: ...
    @property
    def segments(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """Program steps ``first`` to before ``last``; the slots that they find filled and touch, leave filled, and empty; the
    recorded numbers that their ATen calls take (those of kernels are set at every replay)."""

    first: int
    last: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    numbers: tuple[int, ...]


def stretches(steps: Sequence[Step], spans: Sequence[tuple[int, int]], plan: MemoryPlan, buffers: int) -> list[Stretch]:
    """``spans``: the program steps that belong to each of ``steps``, its allocations and frees included. ``buffers``: how many
    slots belong to buffers; temporaries follow."""
    out: list[Stretch] = []
    filled = set(plan.inputs)
    for first, last in runs(steps):
        if last - first >= SHORTEST and not steps[first].blocked:
            out.append(stretch(steps, spans, plan, buffers, range(first, last), filled))
        for index in range(first, last):
            filled.update(slot for slot, _ in plan.allocs[index])
            filled.update(steps[index].use.makes)
            filled.difference_update(plan.frees[index])
    return out


def runs(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Neighbours that are alike in being blocked or not, and in their segments."""
    borders = [0]
    for index in range(1, len(steps)):
        before, now = steps[index - 1], steps[index]
        if bool(before.blocked) != bool(now.blocked) or before.segments != now.segments:
            borders.append(index)
    return list(zip(borders, [*borders[1:], len(steps)])) if steps else []


def stretch(
    steps: Sequence[Step], spans: Sequence[tuple[int, int]], plan: MemoryPlan, buffers: int, indices: range, filled: set[int]
) -> Stretch:
    touched: dict[int, None] = {}
    made: dict[int, None] = {}
    gone: dict[int, None] = {}
    numbers: dict[int, None] = {}
    for index in indices:
        use = steps[index].use
        touched.update(dict.fromkeys((*use.buffers, *(buffers + number for number in use.temporaries))))
        made.update(dict.fromkeys((*(slot for slot, _ in plan.allocs[index]), *use.makes)))
        gone.update(dict.fromkeys(plan.frees[index]))
        if steps[index].calls:
            numbers.update(dict.fromkeys(scalars(steps[index].nodes)))
    return Stretch(
        spans[indices[0]][0],
        spans[indices[-1]][1],
        tuple(slot for slot in touched if slot in filled),
        tuple(slot for slot in made if slot not in gone),
        tuple(slot for slot in gone if slot in filled),
        tuple(numbers),
    )


def scalars(nodes: Sequence[Node]) -> list[int]:
    """The recorded numbers that ``nodes`` take."""
    found: list[int] = []

    def walk(arg: object) -> None:
        if isinstance(arg, tuple):
            for item in arg:
                walk(item)
        elif isinstance(arg, ScalarInput):
            found.append(arg.index)

    for node in nodes:
        walk(node.args)
    return found


def movable(graph: Graph, slots: int) -> list[int]:
    """For each slot whether its bytes may be copied to where a graph reads them: 1 where they are few and nobody writes them."""
    written = {write.value.buffer.index for node in graph.nodes for write in node.all_writes()}
    small = {buffer.index for buffer in graph.buffers if buffer.nbytes <= MOVABLE and buffer.index not in written}
    return [int(slot in small) for slot in range(slots)]
