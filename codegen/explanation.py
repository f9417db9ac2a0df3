"""What a plan does, as facts for people: steps with their bytes, what was refused, and memory over time. Imports `ir_nodes` and
codegen's planning modules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Sequence

from codegen.extern import needs_python
from codegen.kernel import ExternStep, KernelStep, Plan
from codegen.memory_plan import MemoryPlan, plan_memory
from codegen.step_use import StepUse, kernel_use, node_use
from ir_nodes import BufferKind, Graph, Node, Value
from ir_nodes.estimate import Cost, Rates, cost
from ir_nodes.ops import info
from ir_nodes.remarks import Remark, Remarks


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One launch or ATen call. Bytes are those that it moves; ``alone``: what its ops would move if each ran by itself.

    ``seconds``: an estimate, see `ir_nodes.estimate`; ``measured``: what it took when it ran, where that is known. ``why``: why
    ATen runs it, "" for a kernel. ``by``: who does, if ATen does not; ``python``: only Python can call it.
    """

    name: str
    nodes: tuple[Node, ...]
    read: int
    written: int
    alone: int
    seconds: float
    why: str = ""
    by: str = "ATen"
    python: bool = False
    measured: float | None = None

    @property
    def is_kernel(self) -> bool:
        return not self.why


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """(number, bytes) of buffers that a program is given, hands out, and makes and frees in between, and of values that never
    reach memory because they live in registers only. Of those in between: how many lie over operands that died; the arena's
    bytes, and what those in it take one by one.
    """

    inputs: tuple[int, int]
    results: tuple[int, int]
    between: tuple[int, int]
    registers: tuple[int, int]
    reused: int = 0
    arena: int = 0
    apart: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """A graph's steps in the order in which they run. ``held``: bytes in use while each runs, inputs and results included.

    ``refusals``: pairs of ops that could not share a kernel, counted by (first, second, reason). ``remarks``: what other passes
    did and refused, counted. ``copy_rate``: bytes per second
    that a copy on this machine reads and writes, where times were measured.
    """

    steps: tuple[StepFacts, ...]
    held: tuple[int, ...]
    refusals: tuple[tuple[tuple[str, str, str], int], ...]
    memory: MemoryFacts
    remarks: tuple[tuple[Remark, int], ...] = ()
    copy_rate: float | None = None

    @property
    def kernels(self) -> int:
        return sum(step.is_kernel for step in self.steps)

    @property
    def ops(self) -> int:
        return len({node for step in self.steps for node in step.nodes})

    @property
    def moved(self) -> int:
        return sum(step.read + step.written for step in self.steps)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def measured(self) -> float | None:
        known = [step.measured for step in self.steps if step.measured is not None]
        return sum(known) if known else None

    def with_times(self, times: Sequence[tuple[tuple[Node, ...], float]], copy_rate: float) -> Explanation:
        """The same with what ran: ops and seconds. A step's time is that of all that ran nothing but its ops."""
        left = [(frozenset(nodes), seconds) for nodes, seconds in times]
        steps = []
        for step in self.steps:
            ops = frozenset(step.nodes)
            same = [one for one in left if one[0] == ops][:1]  # a split reduction is two launches of the same ops
            mine = same or [one for one in left if one[0] and one[0] <= ops]
            left = [one for one in left if all(one is not taken for taken in mine)]
            steps.append(replace(step, measured=sum(seconds for _, seconds in mine) if mine else None))
        return replace(self, steps=tuple(steps), copy_rate=copy_rate)


def explain(graph: Graph, plan: Plan, rates: Rates, graphs: bool = False, remarks: Remarks | None = None) -> Explanation:
    """The facts of ``plan``, which was made for ``graph``, on a machine of ``rates``. ``graphs``: CUDA graphs replay it;
    ``remarks``: what passes have told, to which the memory plan's are added."""
    counted = Counter((refusal.first.name, refusal.second.name, refusal.reason) for refusal in plan.refusals)
    steps = tuple(map(Facts(rates).of, plan.steps))
    uses = [use_of(step) for step in plan.steps]
    memory = plan_memory(graph, uses, [temporary.nbytes for temporary in plan.temporaries], graphs)
    remarks = remarks or Remarks()
    for reason in memory.not_reused:
        remarks.refused("inplace", "a kernel's result", reason)
    for _ in range(memory.reused):
        remarks.did("inplace", "a kernel's result", "it is written over an operand that dies")
    return Explanation(steps, tuple(memory.held(uses)), tuple(counted.most_common()), memory_facts(graph, plan, memory),
                       remarks.all())


def facts(step: KernelStep | ExternStep, rates: Rates) -> StepFacts:
    """One step's facts; see `Facts` for many."""
    return Facts(rates).of(step)


class Facts:
    """Finds the facts of steps. What a node would cost by itself is asked once, however many kernels it is in."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._alone: dict[Node, Cost] = {}
        self._bytes: dict[Node, dict[Value, int]] = {}

    def of(self, step: KernelStep | ExternStep) -> StepFacts:
        if isinstance(step, ExternStep):
            alone = self._cost(step.node)
            read = sum(operand.layout.nbytes for operand in step.node.reads)
            by = "ATen" if step.algorithm is None else f"cuBLASLt's suggestion {step.algorithm.number}"
            return StepFacts(step.node.target, (step.node,), read, sum(write.layout.nbytes for write in step.node.writes),
                             alone.nbytes, alone.seconds, step.reason, by,
                             step.algorithm is not None or needs_python(step.node, ask=False))
        rates = self.rates
        read, written = (sum(map(step.bytes_of, values)) for values in (step.reads, step.writes))
        made = {value for value in (*step.writes, *step.elided) if isinstance(value, Value)}
        apart = [(self._cost(node), self._share(node, made)) for node in step.nodes]
        flops = sum(one.flops * share for one, share in apart)
        nbytes = round(sum(one.nbytes * share for one, share in apart))
        seconds = rates.launch + max((read + written) / rates.memory, flops / rates.flops)
        return StepFacts(step.kernel.name, step.nodes, read, written, nbytes, seconds)

    def _cost(self, node: Node) -> Cost:
        if node not in self._alone:
            self._alone[node] = cost(node, self.rates)
        return self._alone[node]

    def _share(self, node: Node, made: set[Value]) -> float:
        """The part of ``node`` that a kernel which makes the values ``made`` does: an op over a list is in several kernels."""
        if len(node.writes) < 2 or info(node.target).kind not in ("foreach", "optimizer"):
            return 1.0
        if node not in self._bytes:
            self._bytes[node] = {write.value: write.layout.nbytes for write in node.writes}
        mine = self._bytes[node]
        few, many = (made, mine) if len(made) < len(mine) else (mine, made)
        total = sum(mine.values())
        return sum(mine[value] for value in few if value in many) / total if total else 1.0


def memory_facts(graph: Graph, plan: Plan, memory: MemoryPlan) -> MemoryFacts:
    used = dict.fromkeys(buffer for step in plan.steps for buffer in (*use_of(step).buffers, *use_of(step).makes))
    buffers = [buffer for buffer in graph.buffers if buffer.index in used and buffer.kind is not BufferKind.GENERATOR]
    inputs = [buffer.nbytes for buffer in buffers if buffer.kind is BufferKind.INPUT]
    made = [buffer for buffer in buffers if buffer.kind is not BufferKind.INPUT]
    between = [buffer.nbytes for buffer in made if not buffer.live] + [temporary.nbytes for temporary in plan.temporaries]
    elided = [value.buffer.nbytes for step in plan.steps if isinstance(step, KernelStep) for value in step.elided]
    counted = [(len(sizes), sum(sizes)) for sizes in (inputs, [buffer.nbytes for buffer in made if buffer.live], between, elided)]
    return MemoryFacts(*counted, memory.reused, memory.arena, memory.apart)


def use_of(step: KernelStep | ExternStep) -> StepUse:
    return node_use(step.node) if isinstance(step, ExternStep) else kernel_use(step)
