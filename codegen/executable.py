"""Assembles a program for the native core from planned steps. Imports torch, `ir_nodes` and `codegen`'s plan types only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Protocol, Sequence

from codegen.memory_plan import StepUse, node_use, plan_memory
from ir_nodes import Graph, Node
from ir_nodes.node import Operand, Target


class Program(Protocol):
    """The native core's program builder (csrc/bind.cpp). ``order``: the number of the report on its segments, or -1."""

    order: int

    def call(self, instr: int, slots: list[int]) -> None: ...
    def launch(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, args: list[tuple[str, int, int]], instr: int
    ) -> None: ...
    def python(self, run: Callable[[list[object], list[object]], None], instr: int) -> None: ...
    def alloc(self, slot: int, nbytes: int) -> None: ...
    def free(self, slot: int) -> None: ...
    def finish(
        self, slots: int, inputs: list[tuple[int, int]], outputs: list[tuple[int, int, int]], nodes: int, dead: int
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Emit:
    """A step ready to be put into a program: what it touches, and how it adds itself."""

    use: StepUse
    writes: tuple[int, ...]  # buffers
    add: Callable[[Program], None]
    node: Node | None = None  # the first that it runs


def emit_call(node: Node) -> Emit:
    """``node`` as one ATen call on the physical device."""
    slots = operand_slots(node)
    return Emit(node_use(node), written_buffers(node), lambda program: program.call(node.instr, slots), node)


def operand_slots(node: Node) -> list[int]:
    """The slot of each tensor operand in argument order, then of each new output; -1 where there is none."""
    slots: list[int] = []

    def walk(arg: object) -> None:
        if isinstance(arg, tuple):
            for item in arg:
                slots.append(-1) if item is None else walk(item)
        elif isinstance(arg, Operand):
            slots.append(arg.value.buffer.index)
        elif isinstance(arg, Target):
            slots.append(node.writes[arg.index].value.buffer.index)

    for arg in node.args:
        walk(arg)
    slots += [-1 if index is None else node.writes[index].value.buffer.index for index in node.returns]
    return slots


def written_buffers(node: Node) -> tuple[int, ...]:
    return tuple(write.value.buffer.index for write in node.writes)


def assemble(graph: Graph, program: Program, steps: Sequence[Emit], dead: int, temporaries: Sequence[int] = ()) -> None:
    """Add ``steps`` to ``program`` with the allocations, frees, inputs and outputs that they need."""
    plan = plan_memory(graph, [step.use for step in steps], temporaries)
    ready: dict[int, int] = {}
    position = 0
    for index, step in enumerate(steps):
        position += len(plan.allocs[index])
        for slot, nbytes in plan.allocs[index]:
            program.alloc(slot, nbytes)
        step.add(program)
        for buffer in step.writes:
            ready[buffer] = position
        position += 1 + len(plan.frees[index])
        for slot in plan.frees[index]:
            program.free(slot)
    bound = set(plan.inputs)
    outputs = [(b.index, b.index, ready[b.index]) for b in graph.buffers if b.live and b.index in ready and b.index not in bound]
    program.finish(plan.slots, [(b, b) for b in plan.inputs], outputs, len(steps), dead)
