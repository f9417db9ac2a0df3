"""Finds the steps of a program that may run before the recording that it belongs to has ended. Imports `ir_nodes` and codegen's
plan types.

A training loop that reads its loss at every step would leave the device idle while the host records the next one. A recording
mostly becomes what followed the one before it the last time, so the native core (csrc/flush.cpp) begins that program at a few
*cuts*: places in the recording where more of its inputs are known. What has begun is dropped if the recording becomes another
one. So a step may run early if it writes new memory, or a little of an input's, which is saved before, and launches work only: no
Python, no collective that others would wait for.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Iterable, Mapping, Protocol, Sequence

from codegen import cuda_graph
from codegen.cuda_graph import blocked_call, scalars
from codegen.memory_plan import MemoryPlan
from ir_nodes import BufferKind, Graph, Node
from ir_nodes.estimate import CUDA, cost
from ir_nodes.node import Buffer

PLACES = 1 / 64, 1 / 32, 1 / 16, *(part / 16 for part in range(2, 8)), 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0
"""Where a recording is looked at: often at first, when the device has nothing to do, and waits for each place until it falls
behind. At each what is recorded is copied, which takes some tens of microseconds late in a long recording. Between them lie
its chapters."""
WORTH, LEAST = 15e-6, 2e-3
"""Seconds that steps which begin early should take on the device at least, on average and together: launches one by one, instead
of in a CUDA graph, take the host some microseconds each."""
SHARE = 0.6
"""The part of a program's time that has to be among them: the rest is launched one by one, too, after the recording."""
LITTLE = 1 << 16
"""Bytes of an input that are worth a copy before they are written early, such as running statistics of a batch norm."""
LATE = 15 / 16
"""The part of a recording after which it is too late to begin anything."""
NEVER = 1 << 60


class Step(cuda_graph.Step, Protocol):
    @property
    def numbers(self) -> tuple[int, ...]: ...
    @property
    def draws(self) -> tuple[int, ...]: ...
    @property
    def early(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Known:
    """How many ops are recorded when each buffer, and each number, has been seen. ``late``: so many when the first input is
    updated behind the first op of backward; NEVER: none is, or nothing is to be apart. ``always``: cuts are made even where
    starting early can't pay, for tests. ``waits``: does somebody wait for the device at every step, as far as is known? None: it
    does not matter."""

    buffers: Mapping[int, int]
    numbers: Mapping[int, int]
    late: int
    always: bool = False
    waits: bool | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """Once ``ops`` ops are recorded, ``steps`` may run. ``saves``: inputs that they are the first to write; ``guessed``: numbers
    that they take and that are recorded later."""

    ops: int
    steps: tuple[int, ...]
    saves: tuple[int, ...] = ()
    guessed: tuple[int, ...] = ()


FIRST = Cut(1, ())
"""There the core looks whether somebody has waited for the device since the last recording."""


def known(graph: Graph, always: bool, backward: int = NEVER, waits: bool | None = None) -> Known:
    """``graph``: as recorded, before any pass; ``backward``: the first op that autograd recorded, if any; ``waits``: see `Known`.
    Where it is not true nothing is apart."""
    buffers: dict[int, int] = {}
    numbers: dict[int, int] = {}
    late = min((node.instr for node in graph.nodes if node.instr > backward and updates(node)), default=NEVER)
    for node in graph.nodes:
        for value in (*(operand.value for operand in node.reads), *(write.value for write in node.all_writes())):
            buffers.setdefault(value.buffer.index, node.instr + 1)
        for number in scalars([node]):
            numbers.setdefault(number, node.instr + 1)
    return Known(buffers, numbers, late if waits else NEVER, always, waits)


def updates(node: Node) -> bool:
    """Does it write what was there before the recording?"""
    return any(write.value.buffer.kind is not BufferKind.FRESH for write in node.writes)


def part(graph: Graph, seen: Known) -> bool:
    """Keep apart what can begin while the recording is made from what it would wait for, where somebody waits and all that runs
    takes as long as what begins early has to. Was that so? It costs kernels."""
    if not seen.waits or not seen.always and sum(cost(node, CUDA).seconds for node in graph.nodes) < LEAST:
        return False
    part_launches(graph, seen)
    if seen.late != NEVER:
        part_kernels(graph, seen)
    return True


def part_launches(graph: Graph, seen: Known) -> None:
    """Chapters, so that no launch waits for a small part of it that is recorded much later: casts of a model's weights, each of
    which autocast records where it is used."""
    last = min(seen.late, max((node.instr for node in graph.nodes), default=0))
    for node in graph.nodes:
        node.chapter = bisect.bisect(PLACES, node.instr / last) if last else 0


def part_kernels(graph: Graph, seen: Known) -> None:
    """A later stage for what can't begin while the recording is made, so that nothing which can shares a kernel with it and
    waits: backward of a bias, for the update of its moments, of which the host says last where they are."""
    late: set[Buffer] = set()  # what such nodes read or write
    written: set[Buffer] = set()  # what they write
    for node in graph.nodes:
        reads, writes = {value.buffer for value in node.inputs()}, {write.value.buffer for write in node.all_writes()}
        outside = [buffer.index for buffer in reads | writes if buffer.kind is not BufferKind.FRESH]
        ready = max([node.instr + 1 if updates(node) else 0, *(seen.buffers.get(buffer, NEVER) for buffer in outside)])
        if ready > seen.late or blocked_call(node) or reads & written or writes & late:
            node.stage = 1
            late |= reads | writes
            written |= writes
    for node in reversed(graph.nodes):
        if node.again:  # it shares a kernel with those that follow it
            node.stage = min((user.stage for write in node.writes for user in write.value.users), default=node.stage)


NOTHING = "all it runs waits for what is recorded last, or can't be taken back"
LITTLE_TIME = "what could begin early takes the GPU no longer than its launches take the host"
UNDECIDED = "; compiled anew should its loop wait for the device"
LITTLE_SHARE = "most of its time is in steps that wait for what is recorded last, or can't be taken back"


def cuts(steps: Sequence[Step], plan: MemoryPlan, graph: Graph, seen: Known, apart: bool) -> tuple[list[Cut], str]:
    """The cuts at which ``steps`` may begin, and why there are none where too little could. Then the first alone where the core
    is to have all compiled anew: should somebody wait for the device, as more may begin if it is compiled for that, or, where
    things were kept ``apart``, should nobody."""
    found, why = found_cuts(steps, plan, graph, seen)
    if why and seen.waits is False and seconds(steps, graph) >= LEAST:
        return [FIRST], why + UNDECIDED
    return [FIRST] if why and apart else found, why


def found_cuts(steps: Sequence[Step], plan: MemoryPlan, graph: Graph, seen: Known) -> tuple[list[Cut], str]:
    """Those at which ``steps`` may begin; none where too little could, and then why."""
    last = max((node.instr + 1 for step in steps for node in step.nodes), default=0) * LATE
    when = earliest(steps, plan, graph, seen)
    able = [index for index, at in enumerate(when) if at <= last]
    if not able:
        return [], NOTHING
    takes, whole = seconds([steps[index] for index in able], graph), seconds(steps, graph)
    if not seen.always and takes < max(LEAST, WORTH * len(able), SHARE * whole):
        return [], LITTLE_SHARE if takes < SHARE * whole else LITTLE_TIME
    found: dict[int, list[int]] = {}
    places = chosen(sorted({when[index] for index in able}))
    for index in able:
        found.setdefault(max(2, next(place for place in places if place >= when[index])), []).append(index)
    out, inputs = [FIRST], set(plan.inputs)
    for ops in sorted(found):
        saves = dict.fromkeys(slot for index in found[ops] for slot in slots_of(steps[index], plan, graph)[1] if slot in inputs)
        out.append(Cut(ops, tuple(found[ops]), tuple(saves), guessed(steps, found[ops], ops, seen)))
        inputs.difference_update(saves)
    return out, ""


def guessed(steps: Sequence[Step], which: Sequence[int], ops: int, seen: Known) -> tuple[int, ...]:
    """The numbers that the steps ``which`` take and that are not among the first ``ops`` ops."""
    return tuple(number for index in which for number in steps[index].numbers if seen.numbers.get(number, NEVER) > ops)


def chosen(places: Sequence[int]) -> list[int]:
    """Those of ``places``, which rise, that lie at PLACES or the closest before them: the first and the last are among them."""
    low, high = places[0], places[-1]
    return sorted({max(place for place in places if place <= low + (high - low) * part) for part in (0.0, *PLACES)})


def earliest(steps: Sequence[Step], plan: MemoryPlan, graph: Graph, seen: Known) -> list[int]:
    """For each step, how many ops have to be recorded before it may run; NEVER: all, for its inputs or what it waits for are
    never all known earlier, or it can't be dropped again.

    It runs after all steps before it that touch what it writes or frees, or write what it touches. Each random generator is
    drawn from in the program's order.
    """
    inputs = set(plan.inputs)
    touched_at: dict[int, int] = {}
    written_at: dict[int, int] = {}
    out: list[int] = []
    for index, step in enumerate(steps):
        touched, written = slots_of(step, plan, graph)
        able = step.early and not step.blocked and all(plan.sizes[slot] <= LITTLE for slot in written & inputs)
        written |= {slot for slot, _ in plan.allocs[index]} | set(plan.frees[index])
        touched |= written
        if not able:
            at = NEVER
        else:
            # An input that is written early is not to be read by others before the op that writes it is recorded.
            recorded = max((node.instr + 1 for node in step.nodes), default=0) if written & inputs else 0
            at = max([needed(step, graph, seen), recorded, *(written_at.get(slot, 0) for slot in touched),
                      *(touched_at.get(slot, 0) for slot in written)])
        for slot in touched:
            touched_at[slot] = max(touched_at.get(slot, 0), at)
        for slot in written:
            written_at[slot] = max(written_at.get(slot, 0), at)
        out.append(at)
    return out


def slots_of(step: Step, plan: MemoryPlan, graph: Graph) -> tuple[set[int], set[int]]:
    """What the step touches, and what of it it writes; the state of a generator counts as written."""
    temporaries = {len(graph.buffers) + number for number in step.use.temporaries}
    written = {*step.writes, *step.use.makes, *temporaries}
    return {plan.slot_of(slot) for slot in (*step.use.buffers, *written)}, {*map(plan.slot_of, written), *step.draws}


def needed(step: Step, graph: Graph, seen: Known) -> int:
    """How many ops are recorded when all memory that the step takes from outside is known. A call reads its arguments from its
    op; numbers of kernels are guessed, because constants that a kernel shares with later ones would hold up too many."""
    outside = [buffer for buffer in (*step.use.buffers, *step.draws)
               if buffer < len(graph.buffers) and graph.buffers[buffer].kind is not BufferKind.FRESH]
    ops = [node.instr + 1 for node in step.nodes if step.calls]
    return max([1, *(seen.buffers.get(buffer, NEVER) for buffer in outside), *ops])


def seconds(steps: Iterable[Step], graph: Graph) -> float:
    """What the steps take on the device, estimated: a call by its op, a kernel by the bytes that it touches."""
    total = 0.0
    for step in steps:
        if step.calls:
            total += sum(cost(node, CUDA).seconds for node in step.nodes)
        else:
            total += sum(graph.buffers[buffer].nbytes for buffer in step.use.buffers) / CUDA.memory
    return total
