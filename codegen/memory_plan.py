"""Places values in slots and says when each slot is made and freed. Imports `ir_nodes` and codegen's memory modules.

A slot is a piece of device memory while a program runs. Every value of a buffer lives in its buffer's slot: a write
through a layout happens in place, which is right because steps keep each reader of an old value before the write that
replaces it (`ir_nodes.verify` checks that). A buffer may take over the slot of one that dies, and what only kernels touch
lies in one arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Mapping, NamedTuple, Sequence

from codegen.guests import Block, lodge
from codegen.static_plan import Piece, offsets, shared
from codegen.step_use import StepUse
from ir_nodes import BufferKind, Graph, settings

LITTLE = 1 << 20
"""Bytes that an arena may add to the peak."""
GUEST = 1 << 16
"""Bytes from which a value is placed where results will be, and a result among others."""


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
    many; ``apart``: what these would take, each by itself. ``sizes``: bytes of each slot. ``blocks``: by slot, memory in which a
    CUDA graph's results lie once it is captured; until then it is there for their guests only. ``standing``: such results.
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
    blocks: dict[int, Block] = field(default_factory=dict)
    standing: frozenset[int] = frozenset()

    def slot_of(self, slot: int) -> int:
        """The slot in which a buffer or temporary lies."""
        return self.places[slot].slot if slot in self.places else slot

    def share(self, offsets: Mapping[int, int], nbytes: int, first: int, last: int) -> int:
        """A new slot that is there from step ``first`` to ``last``, in which others lie, at these ``offsets``."""
        new, self.slots = self.slots, self.slots + 1
        self.places.update((slot, Place(new, offset, self.sizes[slot])) for slot, offset in offsets.items())
        self.sizes.append(nbytes)
        self.allocs[first].append((new, nbytes))
        self.frees[last].append(new)
        return new

    def held(self, uses: Sequence[StepUse]) -> list[int]:
        """Bytes in use while each step runs, inputs and results included; a CUDA graph's, as if it were captured, all along."""
        now = sum(self.sizes[slot] for slot in (*self.inputs, *self.standing))
        there = self.standing | self.blocks.keys()
        found: list[int] = []
        for use, allocs, frees in zip(uses, self.allocs, self.frees):
            now += sum(self.sizes[slot] for slot in (*(slot for slot, _ in allocs), *use.makes) if slot not in there)
            found.append(now)
            now -= sum(self.sizes[slot] for slot in frees if slot not in there)
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
    CUDA graph have their memory all along, so what dies before they are made may lie there.
    """
    planner = Planner(graph, uses, temporaries, donate)
    if graphs:
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
        self.blocks: list[Block] = []
        self.standing: frozenset[int] = frozenset()
        for new, slot in self.taken.items():
            self.last[slot] = max(self.last[slot], self.own_last[new])
            if new in self.live:
                self.live.add(slot)

    def invite(self, runs: Sequence[tuple[int, int]]) -> None:
        """Lay the results of each of the ``runs`` of steps, which may become a CUDA graph, into a block where values lie that die
        before; both are made in the same run: memory that a graph finds filled has to stay where it is."""
        home = {step: number for number, (begin, end) in enumerate(runs) for step in range(begin, end)}
        made = [slot for slot in self._slots()
                if slot not in self.taken and not self._is_input(slot) and self.first[slot] in home]
        self.standing = frozenset(slot for slot in made if slot in self.live)
        if not settings.enabled("static_plan"):
            return
        fixed = {slot for use in self.uses for slot in (*use.makes, *(use.buffers if use.keeps or use.whole else ()))}
        fixed.update(self.taken[new] for new in self.taken if new in fixed)
        sides: dict[int, tuple[list[Piece], list[Piece]]] = {}
        for slot in made:
            if slot not in fixed and self.sizes[slot] >= GUEST:
                both = sides.setdefault(home[self.first[slot]], ([], []))
                both[slot in self.live].append(Piece(slot, self.sizes[slot], self.first[slot], self.last[slot]))
        held = self.plan([]).held(self.uses)
        blocks = [lodge(others, results, held, range(*runs[number])) for number, (others, results) in sides.items() if results]
        self.blocks = [block for block in blocks if block is not None]

    def plan(self, pieces: Sequence[Piece]) -> MemoryPlan:
        """The plan with ``pieces`` in an arena."""
        plan = MemoryPlan([[] for _ in self.uses], [[] for _ in self.uses], slots=len(self.sizes), sizes=[*self.sizes],
                          reused=len(self.taken), not_reused=tuple(self.refused.values()), kept=frozenset(self.live),
                          standing=self.standing)
        placed, plan.arena = offsets(pieces)
        inside = {piece.slot for piece in pieces}.union(*(block.guests for block in self.blocks))
        for slot in self._slots():
            buffer = self.buffers[slot] if slot < len(self.buffers) else None
            if slot in inside or slot in self.taken:
                continue
            if buffer is not None and buffer.kind is BufferKind.INPUT:
                plan.inputs.append(slot)
            elif slot not in self.uses[self.first[slot]].makes:
                plan.allocs[self.first[slot]].append((slot, self.sizes[slot]))
            if slot not in self.live:
                plan.frees[self.last[slot]].append(slot)
        if pieces:
            plan.apart = sum(piece.nbytes for piece in pieces)
            plan.share(placed, plan.arena, min(piece.first for piece in pieces), max(piece.last for piece in pieces))
        for block in self.blocks:
            plan.blocks[plan.share(block.guests, block.extent, block.first, block.last)] = block
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
