"""Places values in slots and says when each slot is made and freed. Imports `ir_nodes` and `codegen.kernel`.

A slot is a piece of device memory while a program runs. Every value of a buffer lives in its buffer's slot: a write
through a layout happens in place, which is right because steps keep each reader of an old value before the write that
replaces it (`ir_nodes.verify` checks that).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

from codegen.kernel import KernelStep, Temporary
from ir_nodes import BufferKind, Graph, Node


@dataclass(frozen=True, slots=True)
class StepUse:
    """What one step touches: buffers it reads or writes in memory, buffers it makes itself, temporaries."""

    buffers: tuple[int, ...]
    makes: tuple[int, ...] = ()  # new outputs of an extern op: ATen allocates them
    temporaries: tuple[int, ...] = ()


@dataclass(slots=True)
class MemoryPlan:
    """For each step: slots to allocate before it as (slot, nbytes), slots to free after it."""

    allocs: list[list[tuple[int, int]]]
    frees: list[list[int]]
    inputs: list[int] = field(default_factory=list)  # buffers bound when the program starts
    slots: int = 0


def plan_memory(graph: Graph, uses: Sequence[StepUse], temporaries: Sequence[int] = ()) -> MemoryPlan:
    """Allocate at first use, free after last. ``temporaries``: bytes of each extra slot, which follow the buffers' slots.

    Live buffers are handed out at the end and never freed; inputs nobody holds any more are freed after their last use.
    """
    first, last = lifetimes(uses, len(graph.buffers))
    plan = MemoryPlan([[] for _ in uses], [[] for _ in uses], slots=len(graph.buffers) + len(temporaries))
    for buffer in graph.buffers:
        if buffer.index not in first or buffer.kind is BufferKind.GENERATOR:
            continue
        if buffer.kind is BufferKind.INPUT:
            plan.inputs.append(buffer.index)
        elif buffer.index not in uses[first[buffer.index]].makes:
            plan.allocs[first[buffer.index]].append((buffer.index, buffer.nbytes))
        if not buffer.live:
            plan.frees[last[buffer.index]].append(buffer.index)
    for index, nbytes in enumerate(temporaries):
        slot = len(graph.buffers) + index
        if slot in first:
            plan.allocs[first[slot]].append((slot, nbytes))
            plan.frees[last[slot]].append(slot)
    return plan


def lifetimes(uses: Sequence[StepUse], buffers: int) -> tuple[dict[int, int], dict[int, int]]:
    """First and last step of each slot."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, use in enumerate(uses):
        for slot in (*use.buffers, *use.makes, *(buffers + index for index in use.temporaries)):
            first.setdefault(slot, step)
            last[slot] = step
    return first, last


def kernel_use(step: KernelStep) -> StepUse:
    """What a launch touches."""
    touched = dict.fromkeys((*step.reads, *step.writes))
    buffers = dict.fromkeys(item.buffer.index for item in touched if not isinstance(item, Temporary))
    return StepUse(tuple(buffers), (), tuple(item.id for item in touched if isinstance(item, Temporary)))


def node_use(node: Node) -> StepUse:
    """What an ATen call of ``node`` touches."""
    returned = {node.writes[index].value.buffer.index: None for index in node.returns if index is not None}
    touched = dict.fromkeys(value.buffer.index for value in node.inputs())
    touched.update(dict.fromkeys(write.value.buffer.index for write in node.writes))
    return StepUse(tuple(b for b in touched if b not in returned), tuple(returned))
