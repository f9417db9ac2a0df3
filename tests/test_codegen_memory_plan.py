"""Where buffers lie: over operands that die, side by side in an arena, and numbers stay right when they do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from counting import calls_of
from graphs import execute, record, uses_of
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from codegen.cuda_driver import Function
from codegen.executable import POINTER, Placed, assemble
from codegen.extern import emit_call
from codegen.fuse import plan
from codegen.kernel import KernelStep, Plan
from codegen.memory_plan import MemoryPlan, plan_memory
from codegen.static_plan import ALIGNMENT, Piece, offsets
from codegen.step_use import StepUse, node_use
from codegen.triton_engine import emit_launch
from codegen.tuning import HOPPER
from ir_nodes import BufferKind, Graph, Node, settings
from tests.programs import Step, inputs, interpret, steps
from tests.recording import Recorder, Recording


def planned(graph: Graph) -> tuple[Plan, MemoryPlan]:
    made = plan(graph)
    return made, plan_memory(graph, uses_of(made), [temporary.nbytes for temporary in made.temporaries])


def of(program: Callable[..., Any], *tensors: torch.Tensor, held: bool = True) -> MemoryPlan:
    """The memory plan; ``held``: are the inputs, too?"""
    with Recorder() as recorder:
        result = program(*tensors)
    outs = list(result) if isinstance(result, tuple) else [result]
    return planned(recorder.finish([*outs, *(tensors if held else ())]).graph)[1]


@hypothesis(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30), st.integers(0, 12)), max_size=30))
def test_pieces_that_live_at_the_same_time_do_not_overlap(drawn: list[tuple[int, int, int]]) -> None:
    pieces = [Piece(slot, nbytes, first, first + long) for slot, (nbytes, first, long) in enumerate(drawn)]
    placed, total = offsets(pieces)
    assert placed.keys() == {piece.slot for piece in pieces}
    for one in pieces:
        start, end = placed[one.slot], placed[one.slot] + one.nbytes
        assert start % ALIGNMENT == 0 and end <= total
        for other in pieces:
            if one is not other and one.first <= other.last and other.first <= one.last:
                assert end <= placed[other.slot] or placed[other.slot] + other.nbytes <= start
    assert total <= sum(-(-max(piece.nbytes, 1) // ALIGNMENT) * ALIGNMENT for piece in pieces)


def test_what_follows_what_takes_its_place() -> None:
    placed, total = offsets([Piece(slot, 1000, slot, slot + 1) for slot in range(10)])
    assert total == 2048 and set(placed.values()) == {0, 1024}


def test_offsets_take_linear_time() -> None:
    few, many = ([Piece(slot, 256 * (slot * 7919 % 37), slot, slot + slot * 31 % 50) for slot in range(count)]
                 for count in (2000, 20000))
    assert calls_of(lambda: offsets(many)) < 11 * calls_of(lambda: offsets(few))


X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)
W = torch.linspace(-1, 1, 32 * 32).reshape(32, 32)


def test_a_result_is_written_over_an_operand_that_dies() -> None:
    found = of(lambda x, w: F.gelu(x @ w) @ w, X, W)
    assert found.reused == 1, "gelu's over the product's"
    with settings.override(disable="inplace"):
        assert of(lambda x, w: F.gelu(x @ w) @ w, X, W).reused == 0


def test_an_input_that_nobody_holds_is_donated() -> None:
    assert of(lambda x: x.sin() + 1, X, held=False).reused == 1
    assert of(lambda x: x.sin() + 1, X).reused == 0


@pytest.mark.parametrize("program", [
    lambda x, w: (lambda y: (y.sin() @ w) + y)(x @ w),
    lambda x, w: (x @ w).t().contiguous().sin(),
    lambda x, w: (x @ w).bfloat16(),
    lambda x, w: (lambda y: y + y.flip(0).contiguous())(x @ w),
    lambda x, w: (x @ w).sum(0),
    lambda x, w: (lambda y: y.sin() + y.view(-1)[:1])(x @ w),
], ids=["used later", "another order", "another size", "another element", "a reduction", "read in two ways"])  # fmt: skip
def test_operands_that_are_needed_elsewhere_or_otherwise_keep_their_numbers(program: Callable[..., Any]) -> None:
    recording, _ = record(program, X, W)
    made, memory = planned(recording.graph)
    same(recording, made, memory)


def test_a_result_is_not_written_over_what_it_is_not_computed_from() -> None:
    """One thread could store an element of the one before another has loaded it of the other."""
    def both(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x @ w) * c, (w @ x) * c

    recording, _ = record(both, W, W.flip(0), W.sin())
    made, memory = planned(recording.graph)
    (kernel,) = [step for step in made.steps if isinstance(step, KernelStep)]
    assert len(kernel.reuses) == 4, "each over its product, or over what both are multiplied by"
    for new, old in kernel.reuses:
        assert new.producer is not None and old in [operand.value for operand in new.producer.reads]
    same(recording, made, memory)


def test_rows_that_are_summed_up_in_one_pass_are_written_over_what_they_are_made_of() -> None:
    """Not so where they are walked again for what was summed."""
    x, w = torch.randn(1 << 12, 32), torch.randn(32, 32) / 6

    def once(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x @ w).sin()
        return y @ w, y.sum(0)

    recording, _ = record(once, x, w)
    made, memory = planned(recording.graph)
    kernel = next(step for step in made.steps if isinstance(step, KernelStep))
    assert "for r in" in kernel.kernel.source and len(kernel.reuses) == 1 and memory.reused
    same(recording, made, memory)
    recording, _ = record(lambda x, w: (lambda y: (y - y.mean(0)).sin() @ w)(x @ w), x, w)
    assert not any(step.reuses for step in planned(recording.graph)[0].steps
                   if isinstance(step, KernelStep) and "for r in" in step.kernel.source)


def test_what_a_collective_sends_is_not_written_over() -> None:
    """It may be waited for in a later recording, when nobody holds the tensor any more."""
    graph = Graph()
    for live in (False, False, True):
        graph.add_buffer(1024, live=live)
    make, use = StepUse((0,), by_address=True), StepUse((0, 2), reuses=((2, 0),), by_address=True)
    send = StepUse((0, 1))
    assert plan_memory(graph, [make, send, use]).reused == 1
    assert plan_memory(graph, [make, replace(send, keeps=True), use]).reused == 0
    node = Node(0, "lazysched::all_gather", (), (), ())
    assert node_use(node).keeps and not node_use(Node(0, "aten::mm", (), (), ())).keeps


def test_nothing_is_donated_where_collectives_may_be_in_flight() -> None:
    graph = Graph()
    graph.add_buffer(1024, BufferKind.INPUT)
    graph.add_buffer(1024, live=True)
    use = StepUse((0, 1), reuses=((1, 0),), by_address=True)
    assert plan_memory(graph, [use]).reused == 1
    assert plan_memory(graph, [use], donate=False).reused == 0


def test_what_only_kernels_touch_lies_in_one_arena() -> None:
    graph = Graph()
    for nbytes, live in ((1000, False), (2000, False), (1000, False), (500, False), (4000, True)):
        graph.add_buffer(nbytes, live=live)
    uses = [StepUse((0,), by_address=True), StepUse((0, 1), by_address=True), StepUse((1, 2), (), (0,), by_address=True),
            StepUse((2, 3), by_address=True), StepUse((3, 4))]
    found = plan_memory(graph, uses, [300])
    assert {slot for slot, place in found.places.items() if place.slot == 6} == {0, 1, 2, 5}, "3 meets an ATen op, 4 is held"
    assert (found.arena, found.apart) == (3584, 4300)
    assert [slot for allocs in found.allocs for slot, _ in allocs] == [6, 3, 4] and found.frees[3] == [6]
    with settings.override(disable="static_plan"):
        assert plan_memory(graph, uses, [300]).places == {}
    assert plan_memory(graph, uses, [300], graphs=True).places == {}, "CUDA graphs have a pool"


def test_no_arena_where_it_would_raise_the_peak() -> None:
    """Two buffers of kernels, and between them a larger one of an ATen op."""
    graph = Graph()
    for nbytes in (8 << 20, 9 << 20, 8 << 20):
        graph.add_buffer(nbytes)
    first, between, last = StepUse((0,), by_address=True), StepUse((1,)), StepUse((2,), by_address=True)
    assert plan_memory(graph, [first, between, last]).arena == 0
    assert plan_memory(graph, [first, last]).arena == 8 << 20


class Recorded:
    """Stands for a native program and runs what it is given."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def alloc(self, slot: int, nbytes: int) -> None:
        self.ran.append(("alloc", slot, nbytes))

    def free(self, slot: int) -> None:
        self.ran.append(("free", slot))

    def call(self, instr: int, slots: list[int], layouts: Any, alone: bool) -> None:
        self.ran.append(("call", slots))

    def launch(self, function: int, grid: Any, threads: int, shared: int, overlaps: bool, args: Any, instr: int) -> None:
        self.ran.append(("launch", args))


def test_steps_get_the_slots_and_offsets_of_the_plan() -> None:
    recording, _ = record(lambda x, w: F.gelu(x @ w) @ w, X, W)
    _, memory = planned(recording.graph)
    (new, place), = ((new, place) for new, place in memory.places.items() if place.slot < len(recording.graph.buffers))
    program: Any = Recorded()
    placed = Placed(program, memory.places)
    placed.call(0, [new, -1, -2], [], False)
    placed.launch(0, (1, 1, 1), 32, 0, False, [(POINTER, new, 64), (POINTER + 1, new, 0)], 0)
    assert program.ran == [("call", [place.slot, -1, -2]), ("launch", [(POINTER, place.slot, 64), (POINTER + 1, new, 0)])]


def test_every_address_of_a_launch_lies_in_memory_that_is_there() -> None:
    """As on a GPU, where nothing else would tell: a step of training with reductions in two launches."""
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(F.gelu(x @ w).softmax(-1), (64,)) @ w
        return F.layer_norm(y * y.sum(0), (64,)).sum(0) + ((y.exp().sum() + y.sin()) @ w[0]).sum()

    recording, _ = record(step, torch.randn(8192, 64), torch.randn(64, 64))
    for number, node in enumerate(recording.graph.nodes):
        node.instr = number
    made = plan(recording.graph, tuning=HOPPER)
    base = len(recording.graph.buffers)
    scratch = {temporary.id: base + index for index, temporary in enumerate(made.temporaries)}
    function = Function(1, 4, 0)
    emits = [emit_launch(one, function, scratch) if isinstance(one, KernelStep) else emit_call(one.node) for one in made.steps]
    program: Any = Recorded()
    assemble(recording.graph, program, emits, 0, [temporary.nbytes for temporary in made.temporaries])
    there = {slot: recording.graph.buffers[buffer].nbytes for buffer, slot in program.inputs}
    arenas = launches = 0
    for what, *details in program.ran:
        if what == "alloc":
            there[details[0]] = details[1]
            arenas += details[0] >= base + len(scratch)
        elif what == "free":
            del there[details[0]]
        elif what == "call":
            there.update({slot: recording.graph.buffers[slot].nbytes for slot in details[0] if slot >= 0 and slot not in there})
        else:
            launches += 1
            assert all(0 <= offset < there[slot] for kind, slot, offset in details[0] if kind == POINTER)
    assert arenas == 1 and launches >= 3


def test_a_program_without_kernels_is_as_before() -> None:
    recording, _ = record(lambda x, w: (x @ w).sin() @ w, X, W)
    for number, node in enumerate(recording.graph.nodes):
        node.instr = number
    program: Any = Recorded()
    assemble(recording.graph, program, [emit_call(node) for node in recording.graph.nodes], 0)
    assert [what for what, *_ in program.ran] == ["call", "call", "free", "call", "free"]


def same(recording: Recording, made: Plan, memory: MemoryPlan) -> None:
    """Running with buffers where the plan has them gives the bits of running with each by itself."""
    wanted = execute(recording, made)
    found = execute(recording, made, memory)
    for value in recording.graph.outputs():
        if value.buffer.kind is not BufferKind.GENERATOR:
            assert torch.equal(found[value.buffer.index], wanted[value.buffer.index]), str(value)


@hypothesis(max_examples=40, deadline=None)
@given(program=steps(barriers=False), hold=st.booleans())
def test_random_programs_give_the_same_numbers_wherever_buffers_lie(program: list[Step], hold: bool) -> None:
    tensors = inputs("cpu")
    with Recorder() as recorder:
        held = interpret(program, tensors)
    recording = recorder.finish(held if hold else held[-2:])
    made, memory = planned(recording.graph)
    same(recording, made, memory)
