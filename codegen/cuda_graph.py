"""Cuts a program into stretches that the driver may replay as CUDA graphs. Imports torch, `ir_nodes` and codegen's memory
modules.

A stretch is a run of steps of which each only launches work. What ends one is told by `Emit.blocked`: Python, collectives, ATen
kernels that draw random numbers in a way of their own, or at which a capture has failed before; and the border between two
segments, so that a profile still shows each.
The native core (csrc/graph.cpp) captures a stretch once its program has run a few times, and replays it as long as the memory
that it reads stays where it is; small memory that moves, such as a batch, is copied.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Iterable, Protocol, Sequence

import torch

from codegen.guests import Block
from codegen.memory_plan import MemoryPlan
from codegen.static_plan import padded
from codegen.step_use import StepUse
from ir_nodes import BufferKind, Graph, Node, own
from ir_nodes.node import Operand, ScalarInput, leaves

SHORTEST = 4  # steps worth a graph, unless one of them would run Python
MOVABLE, MOVABLE_INPUT = 1 << 20, 1 << 28  # bytes: what moves and is larger is not worth the copy; an input moves once a step
LAUNCH_WORTH, PYTHON_WORTH = 1 << 22, 1 << 24  # bytes that a GPU copies while a host launches a kernel; while it runs Python
FINE = 6  # bits: memory for results comes in sizes at most so fine a part of it apart
KEPT = 1 << 26  # bytes of intermediate results that may stay in memory because a later stretch reads them


Call = tuple[str, tuple[tuple[torch.dtype, int], ...]]
"""An op, and the dtype and the number of dimensions of each tensor that it reads."""


class Step(Protocol):
    @property
    def use(self) -> StepUse: ...
    @property
    def writes(self) -> tuple[int, ...]: ...
    @property
    def nodes(self) -> tuple[Node, ...]: ...
    @property
    def blocked(self) -> str: ...
    @property
    def calls(self) -> bool: ...
    @property
    def python(self) -> bool: ...
    @property
    def segments(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """Program steps ``first`` to before ``last``; the slots that they find filled and touch, leave filled, and empty; the
    recorded numbers that their ATen calls take (those of kernels are set at every replay); for each slot read, whether its bytes
    may be brought from elsewhere; the slot and the bytes of the block in which its results lie, -1: nobody else lies there; where
    in that each of ``makes`` lies."""

    first: int
    last: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    numbers: tuple[int, ...]
    movable: tuple[int, ...]
    block: tuple[int, int] = (-1, 0)
    offsets: tuple[int, ...] = ()


_PHILOX = frozenset("""
    _cudnn_attention_forward _flash_attention_forward _fused_dropout _scaled_dot_product_cudnn_attention
    _scaled_dot_product_flash_attention bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ native_dropout normal_
    random_ uniform_
""".split())
"""Ops whose kernels find seed and offset in the GPU's memory while they are captured, and answer alike if they are not."""
_SEED_ELSEWHERE = frozenset(("_efficient_attention_forward", "_scaled_dot_product_efficient_attention"))
"""Ops that hand their seed and offset, the third and the fourth result, to their backward: in the GPU's memory where they are
captured, else in the host's. So both have to be captured, or neither."""

_learned: set[Call] = set()
"""Calls during which a capture has failed in this process, because they wait for the GPU or ask the driver for what it can't do
then. PyTorch does not tell which ops do, and it changes with sizes and versions."""

_INDEXED, _MASKS = frozenset(("index_put", "index_put_", "_index_put_impl_")), (torch.bool, torch.uint8)


def keep_out(nodes: Iterable[Node]) -> None:
    """No CUDA graph of a program that is assembled from now on holds a call like one of ``nodes``."""
    _learned.update(map(call_of, nodes))


def call_of(node: Node) -> Call:
    """What calls that act alike in a capture have in common; sizes are left out, so that one failure is enough for all."""
    return node.target, tuple((operand.layout.dtype, len(operand.layout.size)) for operand in node.reads)


def blocked_call(node: Node) -> str:
    """Why a CUDA graph can't hold the ATen call of ``node``; "": it can."""
    if node.target in (own.RNG_STATE, own.SET_RNG_STATE):
        return f"{node.target} keeps a random generator's state, or puts it back, which the host does"
    if node.effects and node.name not in _PHILOX | _SEED_ELSEWHERE:
        return f"{node.target} draws random numbers as no CUDA graph can"
    if node.name in _INDEXED and any(isinstance(index, Operand) and index.layout.dtype in _MASKS for index in node.args[1]):
        return f"{node.target} waits for the GPU to tell how many elements its mask chooses"
    if call_of(node) in _learned:
        return f"a capture of {node.target} has failed"
    return "" if node.target.startswith("aten::") else f"{node.target} is not PyTorch's own"


def stretches(steps: Sequence[Step], spans: Sequence[tuple[int, int]], plan: MemoryPlan, graph: Graph) -> list[Stretch]:
    """``spans``: the program steps that belong to each of ``steps``, its allocations and frees included."""
    out: list[Stretch] = []
    filled = set(plan.inputs)
    left = left_out(steps, graph)
    for first, last in runs(steps, left):
        worth = worth_it([step.python for step in steps[first:last]])
        if worth and not steps[first].blocked and first not in left:
            part = stretch(steps, spans, plan, graph, range(first, last), filled)
            if stays(part, plan) <= KEPT:
                out.append(part)
        for index in range(first, last):
            filled.update(slot for slot, _ in plan.allocs[index])
            filled.update(steps[index].use.makes)
            filled.difference_update(plan.frees[index])
    return out


def worth_it(run: Sequence[bool]) -> bool:
    """Does a graph of these steps save more than it costs? Given is which of them run Python where no graph holds them."""
    return len(run) >= SHORTEST or any(run)


def left_out(steps: Sequence[Step], graph: Graph) -> frozenset[int]:
    """Steps that could be captured, but hand a seed to others that could not be in the same graph."""
    left = frozenset[int]()
    while torn := torn_apart(steps, runs(steps, left), graph) - left:
        left |= torn
    return left


def capturable(steps: Sequence[Step], graph: Graph) -> list[tuple[int, int]]:
    """The runs of steps that may become graphs; where there is none, an empty one."""
    left = left_out(steps, graph)
    return [(first, last) for first, last in runs(steps, left) if not steps[first].blocked and first not in left] or [(0, 0)]


def runs(steps: Sequence[Step], left: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """Neighbours that are alike in being blocked, or ``left`` out, or not, and in their segments."""
    kinds = [(bool(step.blocked) or index in left, step.segments) for index, step in enumerate(steps)]
    borders = [index for index in range(len(steps)) if index == 0 or kinds[index - 1] != kinds[index]]
    return list(zip(borders, [*borders[1:], len(steps)]))


def torn_apart(steps: Sequence[Step], found: Sequence[tuple[int, int]], graph: Graph) -> frozenset[int]:
    """Steps that hand a seed to others which are not in the same one of the runs ``found``, or to a later recording."""
    home = {index: run for run in found for index in range(*run)}
    users: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        for buffer in (*step.use.buffers, *step.use.makes):
            users.setdefault(buffer, []).append(index)

    def torn(index: int, node: Node) -> bool:
        handed = [node.writes[place].value.buffer for place in node.returns[2:4] if place is not None]
        return any(buffer.live or home[user] != home[index] for buffer in handed for user in users.get(buffer.index, ()))

    return frozenset(index for index, step in enumerate(steps)
                     for node in step.nodes if node.name in _SEED_ELSEWHERE and torn(index, node))


def stretch(
    steps: Sequence[Step], spans: Sequence[tuple[int, int]], plan: MemoryPlan, graph: Graph, indices: range, filled: set[int]
) -> Stretch:
    touched: dict[int, None] = {}
    written: set[int] = set()
    made: dict[int, None] = {}
    gone: dict[int, None] = {}
    numbers: dict[int, None] = {}
    for index in indices:
        use = steps[index].use
        slots = (*use.buffers, *(len(graph.buffers) + number for number in use.temporaries))
        touched.update(dict.fromkeys(map(plan.slot_of, slots)))
        made.update(dict.fromkeys((*(slot for slot, _ in plan.allocs[index]), *use.makes)))
        gone.update(dict.fromkeys(plan.frees[index]))
        written.update(map(plan.slot_of, steps[index].writes))
        if steps[index].calls:
            numbers.update(dict.fromkeys(scalars(steps[index].nodes)))
    saved = sum(PYTHON_WORTH if steps[index].python else LAUNCH_WORTH for index in indices)
    reads = tuple(slot for slot in touched if slot in filled)
    makes = tuple(slot for slot in made if slot not in gone)
    under = next((slot for slot in made if slot in plan.blocks), -1)
    offsets, nbytes = laid_out(makes, plan.blocks.get(under, Block(0, {})), plan)
    return Stretch(
        spans[indices[0]][0],
        spans[indices[-1]][1],
        reads,
        makes,
        tuple(slot for slot in gone if slot in filled),
        tuple(numbers),
        tuple(int(slot not in written and movable(graph, slot, saved)) for slot in reads),
        (under, nbytes),
        offsets,
    )


def laid_out(makes: Sequence[int], block: Block, plan: MemoryPlan) -> tuple[tuple[int, ...], int]:
    """Where each of ``makes`` lies in one piece of memory that begins with ``block``, and how many bytes that is: rounded up, so
    that graphs whose results are about as large may have it in turn, whichever comes first."""
    rest = [slot for slot in makes if slot not in block.results]
    ends = list(accumulate((padded(plan.sizes[slot]) for slot in rest), initial=block.nbytes))
    found = block.results | dict(zip(rest, ends))
    step = 1 << max(ends[-1].bit_length() - 1 - FINE, 0)
    return tuple(found[slot] for slot in makes), -(-ends[-1] // step) * step


def movable(graph: Graph, slot: int, saved: int) -> bool:
    """May the bytes in ``slot``, which a stretch only reads, be copied to where its graph reads them, because they move?
    ``saved``: the bytes that could be copied in the time that the graph saves the host."""
    if slot >= len(graph.buffers):
        return False
    buffer = graph.buffers[slot]
    return buffer.nbytes <= min(saved, MOVABLE_INPUT if buffer.kind is BufferKind.INPUT else MOVABLE)


def stays(part: Stretch, plan: MemoryPlan) -> int:
    """Bytes that outlive their use because ``part`` makes them where its next replay will: what the program drops later."""
    return sum(plan.sizes[slot] for slot in part.makes if slot not in plan.kept)


def scalars(nodes: Sequence[Node]) -> list[int]:
    """The recorded numbers that ``nodes`` take."""
    return [arg.index for node in nodes for arg in leaves(node.args) if isinstance(arg, ScalarInput)]


def told(steps: Sequence[tuple[Node, ...]], called: Sequence[bool], python: Sequence[bool]) -> str:
    """In a sentence, how many of a plan's steps may replay in CUDA graphs, and what keeps the others out. ``steps``: the nodes of
    each; ``called``: it is an ATen call; ``python``: only Python can call it."""
    why = [blocked_call(nodes[0]) if call else "" for nodes, call in zip(steps, called)]
    lengths, run = [], list[bool]()
    for reason, only in zip([*why, "end"], [*python, False]):
        if reason:
            lengths += [len(run)] * worth_it(run)
            run = []
        else:
            run.append(only)
    reasons = Counter(reason for reason in why if reason)
    out = "; ".join(f"{reason} ({count} times)" if count > 1 else reason for reason, count in reasons.most_common())
    graphs = f"{len(lengths)} graph{'s' * (len(lengths) != 1)}"
    return f"{sum(lengths)} of {len(steps)} steps may replay in {graphs}" + (f"; not in one: {out}" if out else "")
