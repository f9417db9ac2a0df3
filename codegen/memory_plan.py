"""Places values in slots and says when each slot is made and freed. Imports `ir_nodes` and codegen's memory modules.

A slot is a piece of device memory while a program runs. Every value of a buffer lives in its buffer's slot: a write
through a layout happens in place, which is right because steps keep each reader of an old value before the write that
replaces it (`ir_nodes.verify` checks that). A buffer may take over the slot of one that dies, and what only kernels touch
lies in one arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, NamedTuple, Sequence

from codegen.static_plan import Piece, guests, offsets, shared
from codegen.step_use import StepUse
from ir_nodes import BufferKind, Graph, settings

LITTLE = 1 << 20
"""Bytes that an arena may add to the peak."""
GUEST = 1 << 16
"""Bytes from which a value is placed where a result will be."""


class Place(NamedTuple):
    """A part of a slot that starts at ``offset``."""

    slot: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class MemoryPlan:
    """For each step: slots to allocate before it as (slot, nbytes), slots to free after it.

    ``places``: where buffers and temporaries lie that have no slot of their own. ``reused``: how many buffers are written over
    one that dies; ``not_reused``: why others, which a kernel could write so, are not. ``arena``: bytes of the slot that holds
    many; ``apart``: what these would take, each by itself. ``sizes``: bytes of each slot.
    """

    allocs: list[list[tuple[int, int]]]
    frees: list[list[int]]
    inputs: list[int] = field(default_factory=list)  # buffers bound when the program starts
    slots: int = 0
    places: dict[int, Place] = field(default_factory=dict)
    reused: int = 0
    not_reused: tuple[str, ...] = ()
    arena: int = 0
    apart: int = 0
    sizes: list[int] = field(default_factory=list)
    kept: frozenset[int] = frozenset()  # slots that are handed out at the end, and of inputs that stay

    def slot_of(self, slot: int) -> int:
        """The slot in which a buffer or temporary lies."""
        return self.places[slot].slot if slot in self.places else slot

    def held(self, uses: Sequence[StepUse]) -> list[int]:
        """Bytes in use while each step runs, inputs and results included."""
        now = sum(self.sizes[slot] for slot in self.inputs)
        found: list[int] = []
        for use, allocs, frees in zip(uses, self.allocs, self.frees):
            now += sum(nbytes for _, nbytes in allocs) + sum(self.sizes[slot] for slot in use.makes)
            found.append(now)
            now -= sum(self.sizes[slot] for slot in frees)
        return found


def plan_memory(
    graph: Graph, uses: Sequence[StepUse], temporaries: Sequence[int] = (), graphs: bool = False, donate: bool = True,
    runs: Sequence[tuple[int, int]] = (),
) -> MemoryPlan:  # fmt: skip
    """Allocate at first use, free after last. ``temporaries``: bytes of each extra slot, which follow the buffers' slots.
    ``graphs``: runs of steps may be replayed as CUDA graphs, which have a pool of their own instead of an arena. ``donate``:
    inputs that nobody holds any more may be written over: not where these may move from run to run under a CUDA graph. ``runs``:
    the steps of each CUDA graph that there may be, the first and the one behind the last; none: all may be in one.

    Live buffers are handed out at the end and never freed; inputs nobody holds any more are freed after their last use. An arena
    is there from the first use of what lies in it to the last; it is left out where that would raise the peak. The results of a
    CUDA graph have their memory all along, so what dies before one is made may lie there.
    """
    planner = Planner(graph, uses, temporaries, donate)
    if graphs and settings.enabled("static_plan"):
        planner.invite(runs or [(0, len(uses))])
    apart = planner.plan([])
    pieces = planner.pieces() if settings.enabled("static_plan") and not graphs else []
    if len(pieces) < 2:
        return apart
    together = planner.plan(pieces)
    if max(together.held(uses), default=0) <= max(apart.held(uses), default=0) + LITTLE:
        return together
    return planner.plan([piece for piece in pieces if piece.nbytes * len(pieces) <= LITTLE])


class Planner:
    """The lifetimes of slots, found once."""

    def __init__(self, graph: Graph, uses: Sequence[StepUse], temporaries: Sequence[int], donate: bool) -> None:
        self.uses, self.buffers = uses, graph.buffers
        self.sizes = [*(buffer.nbytes for buffer in graph.buffers), *temporaries]
        self.first, self.last = lifetimes(uses, len(graph.buffers))
        self.own_last = dict(self.last)
        able = settings.enabled("inplace")
        self.taken, self.refused = shared(uses, graph.buffers, self.first, self.last, donate) if able else ({}, {})
        self.live = {buffer.index for buffer in graph.buffers if buffer.live}
        self.guests: dict[int, int] = {}
        for new, slot in self.taken.items():
            self.last[slot] = max(self.last[slot], self.own_last[new])
            if new in self.live:
                self.live.add(slot)

    def invite(self, runs: Sequence[tuple[int, int]]) -> None:
        """Find values that can lie where results will be, both made in the same of the ``runs`` of steps: memory that
        a CUDA graph finds filled has to stay where it is."""
        fixed = {slot for use in self.uses for slot in (*use.makes, *(use.buffers if use.keeps else ()))}
        home = {step: number for number, (begin, end) in enumerate(runs) for step in range(begin, end)}
        sides: dict[int, tuple[list[Piece], list[Piece]]] = {}
        for slot in self._slots():
            if slot in self.taken or slot in fixed or self._is_input(slot) or self.sizes[slot] < GUEST:
                continue
            if self.first[slot] in home:
                both = sides.setdefault(home[self.first[slot]], ([], []))
                both[slot in self.live].append(Piece(slot, self.sizes[slot], self.first[slot], self.last[slot]))
        for others, results in sides.values():
            self.guests |= guests(others, results)

    def plan(self, pieces: Sequence[Piece]) -> MemoryPlan:
        """The plan with ``pieces`` in an arena."""
        plan = MemoryPlan([[] for _ in self.uses], [[] for _ in self.uses], slots=len(self.sizes), sizes=[*self.sizes],
                          reused=len(self.taken), not_reused=tuple(self.refused.values()), kept=frozenset(self.live))
        placed, plan.arena = offsets(pieces)
        inside = {piece.slot for piece in pieces}
        begin = {host: self.first[guest] for guest, host in self.guests.items()}
        for slot in self._slots():
            buffer = self.buffers[slot] if slot < len(self.buffers) else None
            if slot in inside or slot in self.taken or slot in self.guests:
                continue
            if buffer is not None and buffer.kind is BufferKind.INPUT:
                plan.inputs.append(slot)
            elif slot not in self.uses[self.first[slot]].makes:
                plan.allocs[begin.get(slot, self.first[slot])].append((slot, self.sizes[slot]))
            if slot not in self.live:
                plan.frees[self.last[slot]].append(slot)
        if pieces:
            arena, plan.slots = plan.slots, plan.slots + 1
            plan.sizes.append(plan.arena)
            plan.apart = sum(piece.nbytes for piece in pieces)
            plan.allocs[min(piece.first for piece in pieces)].append((arena, plan.arena))
            plan.frees[max(piece.last for piece in pieces)].append(arena)
            plan.places.update((slot, Place(arena, offset, self.sizes[slot])) for slot, offset in placed.items())
        plan.places.update((guest, Place(host, 0, self.sizes[guest])) for guest, host in self.guests.items())
        for new, slot in self.taken.items():
            plan.places[new] = plan.places.get(slot, Place(slot, 0, self.sizes[slot]))
        return plan

    def pieces(self) -> list[Piece]:
        """What only kernels touch, so that it may lie anywhere, and nobody holds at the end."""
        slots = dict.fromkeys(self._slots())
        for use in self.uses:
            for touched in () if use.by_address else (*use.buffers, *use.makes):
                slots.pop(self.taken.get(touched, touched), None)
        return [Piece(slot, self.sizes[slot], self.first[slot], self.last[slot]) for slot in slots
                if slot not in self.taken and slot not in self.live and not self._is_input(slot)]

    def _slots(self) -> Iterable[int]:
        return [slot for slot in range(len(self.sizes)) if slot in self.first and not (
            slot < len(self.buffers) and self.buffers[slot].kind is BufferKind.GENERATOR)]

    def _is_input(self, slot: int) -> bool:
        return slot < len(self.buffers) and self.buffers[slot].kind is BufferKind.INPUT


def lifetimes(uses: Sequence[StepUse], buffers: int) -> tuple[dict[int, int], dict[int, int]]:
    """First and last step of each slot."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, use in enumerate(uses):
        for slot in (*use.buffers, *use.makes, *(buffers + index for index in use.temporaries)):
            first.setdefault(slot, step)
            last[slot] = step
    return first, last
