"""Assembles a program for the native core from planned steps. Imports torch, `ir_nodes` and `codegen`'s plan types only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol, Sequence

import torch

from codegen.cuda_graph import capturable, stretches
from codegen.early import Known, cuts
from codegen.memory_plan import Place, plan_memory
from codegen.step_use import StepUse
from ir_nodes import Graph, Node

Chosen = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""A layout as the native core takes it: dtype, size, stride, offset."""
Own = tuple[str, list[Any], int]
"""An op that was not recorded: its name, for each argument a constant or, of tensors, how many slots it takes, and how many
tensors it newly returns."""


ARGUMENT_KINDS = ("ptr", "fp32", "fp64", "i64", "seed", "offset")
"""What a launch takes, numbered as by the native core (`LaunchArg` in csrc/program.h)."""
POINTER = ARGUMENT_KINDS.index("ptr")


class Program(Protocol):
    """The native core's program builder (csrc/bind.cpp).

    ``order``: the number of the report on its segments, or -1. ``apart``: what may begin early was kept apart, which is to be
    undone should nobody wait. ``rest``: recorded instructions that it leaves recorded, and ``kept`` the buffers that these need.
    ``inputs``: (buffer, slot); ``outputs``: (buffer, slot, last step that writes it).
    """

    order: int
    apart: bool
    rest: list[int]
    kept: list[int]
    slots: int
    inputs: list[tuple[int, int]]
    outputs: list[tuple[int, int, int]]
    guessed: list[int]
    nodes: int
    dead: int

    def call(self, instr: int, slots: list[int], layouts: list[Chosen], alone: bool) -> None: ...
    def own(self, op: Own, slots: list[int], layouts: list[Chosen], alone: bool, instr: int) -> None: ...
    def launch(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, args: list[tuple[int, int, int]], instr: int
    ) -> None: ...
    def python(
        self, run: Callable[[list[object], list[object]], torch.Tensor | None], instr: int, slots: Sequence[int]
    ) -> None: ...  # the memory of what ``run`` returns fills the last of ``slots``
    def alloc(self, slot: int, nbytes: int) -> None: ...
    def free(self, slot: int) -> None: ...
    def mark(self, depth: int, name: str) -> None: ...
    def graph(
        self, first: int, last: int, uses: tuple[tuple[int, ...], ...], bytes_of: tuple[Sequence[int], Sequence[int]],
        block: tuple[int, int],
    ) -> None: ...
    def cut(self, ops: int, steps_and_saves: tuple[Sequence[int], Sequence[int]]) -> None: ...


@dataclass(frozen=True, slots=True)
class Emit:
    """A step ready to be put into a program: what it touches, and how it adds itself."""

    use: StepUse
    writes: tuple[int, ...]  # buffers
    add: Callable[[Program], None]
    nodes: tuple[Node, ...] = ()  # what it runs
    blocked: str = "it runs Python"  # why it can't be a part of a CUDA graph; "": it can
    calls: bool = True  # numbers reach it through ATen, which a graph can't change
    numbers: tuple[int, ...] = ()  # the recorded ones that it takes
    draws: tuple[int, ...] = ()  # buffers of the generators that it draws from
    python: bool = False  # only Python can call what it runs
    early: bool = True  # it may run while others record: Python would wait for them

    @property
    def node(self) -> Node | None:
        return self.nodes[0] if self.nodes else None

    @property
    def segments(self) -> tuple[str, ...]:
        """The segments that all its nodes belong to, the outermost first; where they share none, one name that tells them all."""
        chains = [[str(call) for call in node.segment.chain()][::-1] if node.segment else [] for node in self.nodes]
        apart = dict.fromkeys(chain[0] for chain in chains if chain)
        return tuple(os.path.commonprefix(chains)) or ((" + ".join(apart),) if apart else ())


class Placed:
    """Adds steps to ``program`` whose slots are a part of others', or others altogether."""

    def __init__(self, program: Program, places: Mapping[int, Place]) -> None:
        self._program, self.places = program, places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def call(self, instr: int, slots: list[int], layouts: list[Chosen], alone: bool) -> None:
        """``layouts``: of all ``slots`` if one of them is inside another, since a call finds what it takes by them."""
        self._program.call(instr, *self._moved(slots, layouts), alone)

    def own(self, op: Own, slots: list[int], layouts: list[Chosen], alone: bool, instr: int) -> None:
        self._program.own(op, *self._moved(slots, layouts), alone, instr)

    def launch(self, function: int, grid: tuple[int, int, int, int], threads: int, shared: int, overlaps: bool,
               args: list[tuple[int, int, int]], instr: int) -> None:
        self._program.launch(function, grid, threads, shared, overlaps, [self._address(*arg) for arg in args], instr)

    def python(
        self, run: Callable[[list[object], list[object]], torch.Tensor | None], instr: int, slots: Sequence[int]
    ) -> None:
        moving = [(slot, self.places[slot]) for slot in slots if slot in self.places]

        def moved(found: list[Any], scalars: list[object]) -> torch.Tensor | None:
            seen = list(found)
            for slot, place in moving:
                memory = found[place.slot]
                seen[slot] = None if memory is None else memory[place.offset : place.offset + place.nbytes]
            return run(seen, scalars)

        whole = [self.places[slot].slot if slot in self.places else slot for slot in slots]
        self._program.python(moved if moving else run, instr, whole)

    def _moved(self, slots: list[int], layouts: list[Chosen]) -> tuple[list[int], list[Chosen]]:
        moved = [(dtype, size, stride, offset + (self.places[slot].offset if slot in self.places else 0) // dtype.itemsize)
                 for slot, (dtype, size, stride, offset) in zip(slots, layouts)]
        return [self.places[slot].slot if slot in self.places else slot for slot in slots], moved

    def _address(self, kind: int, slot: int, offset: int) -> tuple[int, int, int]:
        place = self.places.get(slot) if kind == POINTER else None
        return (kind, slot, offset) if place is None else (kind, place.slot, place.offset + offset)


def assemble(
    graph: Graph, program: Program, steps: Sequence[Emit], dead: int, temporaries: Sequence[int] = (), graphs: bool = False,
    donate: bool = True, seen: Known | None = None, refused: Callable[[str], None] = lambda why: None,
) -> None:  # fmt: skip
    """Add ``steps`` to ``program`` with the allocations, frees, inputs and outputs that they need; ``graphs``: they may be
    replayed as CUDA graphs; ``donate``: inputs that nobody holds any more may be written over; ``seen``: what is known of the
    recording at which place, where steps may run before it has ended; ``refused`` is told why none does."""
    plan = plan_memory(graph, [step.use for step in steps], temporaries, graphs, donate and not graphs,
                       capturable(steps, graph) if graphs else ())
    placed: Any = Placed(program, plan.places) if plan.places else program
    ready: dict[int, int] = {}
    position = 0
    inside: tuple[str, ...] = ()
    spans: list[tuple[int, int]] = []
    for index, step in enumerate(steps):
        position += mark(program, inside, step.segments)
        spans.append((position, position + len(plan.allocs[index]) + 1 + len(plan.frees[index])))
        position += len(plan.allocs[index])
        inside = step.segments
        for slot, nbytes in plan.allocs[index]:
            program.alloc(slot, nbytes)
        step.add(placed)
        for buffer in step.writes:
            ready[buffer] = position
        position += 1 + len(plan.frees[index])
        for slot in plan.frees[index]:
            program.free(slot)
    mark(program, inside, ())
    bound = set(plan.inputs)
    program.outputs = [
        (b.index, plan.places[b.index].slot if b.index in plan.places else b.index, ready[b.index])
        for b in graph.buffers if b.live and b.index in ready and b.index not in bound
    ]
    program.inputs = [(b, b) for b in sorted(plan.inputs)]  # as they were recorded
    program.slots, program.nodes, program.dead = plan.slots, len(steps), dead
    if graphs:
        for part in stretches(steps, spans, plan, graph):
            program.graph(part.first, part.last, (part.reads, part.makes, part.frees, part.numbers, part.movable),
                          ([plan.sizes[slot] for slot in part.makes], part.offsets), part.block)
    early, why = cuts(steps, plan, graph, seen, program.apart) if seen is not None else ([], "")
    if why:
        refused(why)
    for cut in early:
        program.cut(cut.ops, ([at for index in cut.steps for at in range(*spans[index])], cut.saves))
    program.guessed = list(dict.fromkeys(number for cut in early for number in cut.guessed))


def mark(program: Program, before: tuple[str, ...], now: tuple[str, ...]) -> int:
    """Tell the profiler which segments end and begin. Returns how many steps that takes."""
    shared = len(os.path.commonprefix([before, now]))
    for depth, name in enumerate(now[shared:], start=shared):
        program.mark(depth, f"{name} (lazysched)")
    if len(now) > shared or len(before) == len(now):
        return len(now) - shared
    program.mark(shared, "")
    return 1
