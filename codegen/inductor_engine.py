"""The inductor engine: torch._inductor compiles runs of nodes, C++ on CPUs and Triton on GPUs; ATen calls the others. Imports
torch, `ir_nodes` and `codegen` only."""

from __future__ import annotations

import operator
import warnings
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from codegen.engine import BackEnd, Context, Generated, one_by_one
from codegen.executable import Emit
from codegen.extern import emit_call
from codegen.inductor_compile import Compiled, InductorFailed, compile_run
from codegen.inductor_trace import Place, Traced, Untraceable, trace
from codegen.runs import Run, part, stored
from codegen.step_use import StepUse
from ir_nodes import Graph, Node, Value, ops
from ir_nodes.estimate import Rates, cost
from ir_nodes.replay import Replay

MAX_VARIANTS = 4
"""How often a run is compiled for other values of numbers that it holds as constants, before ATen runs it instead."""

MIN_NODES = 2
MAX_KNOWN = 32  # an allocator hands out few addresses in turn

_LEFT_TO_ATEN = {
    "random": "its random numbers must be eager mode's",
    "collective": "other ranks take part",
    "wait": "other ranks take part",
    "data_dependent": "its size depends on data",
    "value_access": "it gives a number to the host",
    "sort": "ATen's kernel is all there is",
    "optimizer": "ATen's fused kernel is all there is",
}


def fuse(graph: Graph, context: Context) -> list[tuple[Run, CompiledRun | None]]:
    """As few runs as possible, traced; None beside what ATen calls."""
    refused = {node: reason for node in graph.nodes if (reason := refusal(node, context.cuda))}
    while True:
        runs = part(graph, [node for node in graph.nodes if node not in refused])
        try:
            return [(run, traced(graph, run, context)) for run in runs]
        except Untraceable as error:  # all its kind are left out, so that this ends soon
            refused |= {node: str(error) for node in graph.nodes if node.target == error.node.target or node is error.node}


def traced(graph: Graph, run: Run, context: Context) -> CompiledRun | None:
    """Raises Untraceable."""
    if not run.together or len(run.nodes) < MIN_NODES:
        return None
    return CompiledRun(graph, run.nodes, stored(graph, run), context)


def generate(graph: Graph, plan: Sequence[tuple[Run, CompiledRun | None]], context: Context) -> Generated:
    """Each run is one step; what torch._inductor cannot compile is called by ATen, with a warning."""
    emits: list[Emit] = []
    for run, compiled in plan:
        try:
            emits += [emit_call(node) for node in run.nodes] if compiled is None else [emit_run(run, compiled.ready())]
        except InductorFailed as error:
            warnings.warn(
                f"lazysched: torch._inductor gives up on {len(run.nodes)} nodes, which ATen runs instead: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            emits += [emit_call(node) for node in run.nodes]
    return emits, []


def estimate(plan: Sequence[tuple[Run, CompiledRun | None]], rates: Rates) -> float:
    """Seconds: a run reads and writes its places once."""
    total = 0.0
    for run, compiled in plan:
        if compiled is None:
            total += one_by_one(run.nodes, rates)
            continue
        moved = sum(place.layout.nbytes for place in compiled.first.places)
        flops = sum(cost(node, rates).flops for node in run.nodes)
        total += rates.launch + max(moved / rates.memory, flops / rates.flops)
    return total


def together(first: Node, second: Node, context: Context) -> str:
    """Why the two are never in one run."""
    if first.stage != second.stage:
        return "the schedule keeps their segments apart, or one may begin before the other is recorded"
    return refusal(first, context.cuda) or refusal(second, context.cuda)


inductor = BackEnd(together, fuse, generate, estimate)


def refusal(node: Node, cuda: bool) -> str:
    """Why ATen calls ``node``; "" where it may be compiled."""
    info = ops.info(node.target)
    layouts = [operand.layout for operand in node.reads] + [write.layout for write in node.writes]
    if info.kind in _LEFT_TO_ATEN or node.effects:
        return _LEFT_TO_ATEN.get(info.kind, "it changes what no tensor holds")
    if info.random:
        return _LEFT_TO_ATEN["random"]
    if info.kind == "attention" and cuda:
        return "its seeds are in host memory"
    if any(layout.flipped or layout.dtype.is_complex for layout in layouts):
        return "complex numbers"
    if not node.writes or not all(layout.numel for layout in layouts):
        return "it has no elements"
    return ""


class CompiledRun:
    """A run, compiled once for each set of constants that it has met."""

    def __init__(self, graph: Graph, nodes: list[Node], results: Sequence[Value], context: Context) -> None:
        self.graph, self.nodes, self.results, self.context = graph, nodes, results, context
        self.device = torch.device("cuda", context.device) if context.cuda else torch.device("cpu")
        self.first = trace(nodes, results, context.numbers, self.device)
        self.variants: list[Variant] = []

    def ready(self) -> CompiledRun:
        """This, compiled for the numbers with which it was traced. Raises InductorFailed."""
        self.variants = [self.compile(self.first)]
        return self

    def compile(self, traced: Traced) -> Variant:
        compiled = compile_run(traced, self.context.cuda, self.context.kernel_dir / "inductor")
        return Variant(traced, compiled, self.device)

    def variant(self, numbers: Sequence[Any]) -> Variant | None:
        """The variant for ``numbers``, compiled where it is new; None after too many. Raises InductorFailed, Untraceable."""
        for one in self.variants:
            if one.fits(numbers):
                return one
        if len(self.variants) == MAX_VARIANTS:
            return None
        self.variants.append(self.compile(trace(self.nodes, self.results, numbers, self.device)))
        return self.variants[-1]

    def __call__(self, slots: Sequence[Tensor | None], numbers: Sequence[Any]) -> None:
        try:
            found = self.variant(numbers)
        except (InductorFailed, Untraceable):  # what worked for other numbers
            found = None
        if found is not None:
            found(slots, numbers)
            return
        replay = Replay(self.graph, {}, numbers, self.device)
        replay.memory = {index: slot for index, slot in enumerate(slots) if slot is not None}
        for node in self.nodes:
            replay.execute(node)


class Variant:
    """One compiled function. For each place: its slot, and the tensors that it was called with by address, to use again."""

    def __init__(self, traced: Traced, compiled: Compiled, device: torch.device) -> None:
        self.picked, self.wanted = picker(list(traced.constants)), tuple(traced.constants.values())
        self.compiled, self.device = compiled, device
        self.places: list[tuple[int, Place, dict[int, Tensor]]] = [(place.buffer.index, place, {}) for place in traced.places]
        packs = ((traced.floats, torch.float64), (traced.ints, torch.int64))
        self.packs = [(picker(numbers), dtype) for numbers, dtype in packs if numbers]

    def fits(self, numbers: Sequence[Any]) -> bool:
        return self.picked(numbers) == self.wanted

    def __call__(self, slots: Sequence[Tensor | None], numbers: Sequence[Any]) -> None:
        inputs = []
        for index, place, known in self.places:
            slot = slots[index]
            address = slot.data_ptr()  # type: ignore[union-attr]
            tensor = known.get(address)
            inputs.append(see(slot, place, known) if tensor is None else tensor)
        for pick, dtype in self.packs:
            inputs.append(torch.tensor(pick(numbers), dtype=dtype, device=self.device))
        self.compiled(inputs)


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function of all numbers that gives those at ``numbers``."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return lambda values: tuple(values[index] for index in numbers)


def see(slot: Tensor, place: Place, known: dict[int, Tensor]) -> Tensor:
    """``slot``'s memory as the run sees it, without a hold on it: whoever asks has seen that the memory is there."""
    if len(known) >= MAX_KNOWN:
        known.clear()
    layout, address = place.layout, slot.data_ptr()
    memory = torch._C._construct_storage_from_data_pointer(address, slot.device, slot.nbytes)
    empty = torch.empty(0, dtype=layout.dtype, device=slot.device)
    known[address] = empty.set_(memory, layout.offset, layout.size, layout.stride)
    return known[address]


def emit_run(run: Run, compiled: CompiledRun) -> Emit:
    places = [index for index, _, _ in compiled.variants[0].places]
    written = tuple(value.buffer.index for value in compiled.results)
    use = StepUse(tuple(dict.fromkeys(places)))
    return Emit(use, written, lambda program: program.python(compiled, run.nodes[0].instr, use.buffers), tuple(run.nodes))
