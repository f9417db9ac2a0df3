"""What a plan does, as facts for people: steps with their bytes, what was refused, and memory over time. Imports `ir_nodes` and
codegen's planning modules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Sequence

from codegen.kernel import ExternStep, KernelStep, Plan
from codegen.memory_plan import MemoryPlan, plan_memory
from codegen.step_use import StepUse, kernel_use, node_use
from ir_nodes import BufferKind, Graph, Node
from ir_nodes.estimate import Rates, cost


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One launch or ATen call. Bytes are those that it moves; ``alone``: what its ops would move if each ran by itself.

    ``seconds``: an estimate, see `ir_nodes.estimate`; ``measured``: what it took when it ran, where that is known. ``why``: why
    ATen runs it, "" for a kernel.
    """

    name: str
    nodes: tuple[Node, ...]
    read: int
    written: int
    alone: int
    seconds: float
    why: str = ""
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

    ``refusals``: pairs of ops that could not share a kernel, counted by (first, second, reason). ``copy_rate``: bytes per second
    that a copy on this machine reads and writes, where times were measured.
    """

    steps: tuple[StepFacts, ...]
    held: tuple[int, ...]
    refusals: tuple[tuple[tuple[str, str, str], int], ...]
    memory: MemoryFacts
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


def explain(graph: Graph, plan: Plan, rates: Rates, graphs: bool = False) -> Explanation:
    """The facts of ``plan``, which was made for ``graph``, on a machine of ``rates``. ``graphs``: CUDA graphs replay it."""
    counted = Counter((refusal.first.name, refusal.second.name, refusal.reason) for refusal in plan.refusals)
    steps = tuple(facts(step, rates) for step in plan.steps)
    uses = [use_of(step) for step in plan.steps]
    memory = plan_memory(graph, uses, [temporary.nbytes for temporary in plan.temporaries], graphs)
    return Explanation(steps, tuple(memory.held(uses)), tuple(counted.most_common()), memory_facts(graph, plan, memory))


def facts(step: KernelStep | ExternStep, rates: Rates) -> StepFacts:
    if isinstance(step, ExternStep):
        alone = cost(step.node, rates)
        read = sum(operand.layout.nbytes for operand in step.node.reads)
        return StepFacts(step.node.target, (step.node,), read, sum(write.layout.nbytes for write in step.node.writes),
                         alone.nbytes, alone.seconds, step.reason)
    read, written = (sum(map(step.bytes_of, values)) for values in (step.reads, step.writes))
    apart = [cost(node, rates) for node in step.nodes]
    seconds = rates.launch + max((read + written) / rates.memory, sum(one.flops for one in apart) / rates.flops)
    return StepFacts(step.kernel.name, step.nodes, read, written, sum(one.nbytes for one in apart), seconds)


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
