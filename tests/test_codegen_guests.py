"""Under CUDA graphs, whose results have their memory all along, values that die early lie where results will be."""

from __future__ import annotations

import torch
from graphs import execute
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from codegen import memory_plan
from codegen.fuse import plan
from codegen.kernel import KernelStep, Plan
from codegen.memory_plan import plan_memory
from codegen.static_plan import Piece, guests
from codegen.step_use import StepUse, kernel_use, node_use
from ir_nodes import BufferKind, Graph, settings
from tests.programs import Step, inputs, interpret, steps
from tests.recording import Recorder, Recording

drawn_pieces = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30), st.integers(0, 12)), max_size=30)


def uses_of(made: Plan) -> list[StepUse]:
    return [kernel_use(step) if isinstance(step, KernelStep) else node_use(step.node) for step in made.steps]


@hypothesis(max_examples=100, deadline=None)
@given(drawn_pieces, drawn_pieces)
def test_guests_leave_before_their_hosts_are_made(one: list[tuple[int, int, int]], two: list[tuple[int, int, int]]) -> None:
    pieces = [Piece(slot, nbytes, first, first + long) for slot, (nbytes, first, long) in enumerate(one + two)]
    found = guests(pieces[: len(one)], pieces[len(one) :])
    assert len(set(found.values())) == len(found)
    for guest, host in found.items():
        assert guest < len(one) <= host
        assert pieces[guest].nbytes <= pieces[host].nbytes and pieces[guest].last < pieces[host].first


def with_a_late_result(width: int = 256) -> Recording:
    """Values that die before a result of their size is made."""
    x = torch.randn(width, width)
    with Recorder() as recorder:
        early = x.sin().mm(x)
        total = early.sum()
        late = x.mm(x).cos() + total
    return recorder.finish([late, x])


def result_of(graph: Graph) -> int:
    (result,) = (one.index for one in graph.buffers if one.live and one.kind is BufferKind.FRESH)
    return result


def test_a_result_has_its_memory_when_its_guest_comes_and_numbers_stay() -> None:
    recording = with_a_late_result()
    result, made = result_of(recording.graph), plan(recording.graph)
    uses, temporaries = uses_of(made), [temporary.nbytes for temporary in made.temporaries]
    found = plan_memory(recording.graph, uses, temporaries, graphs=True, donate=False)
    lying = [slot for slot, place in found.places.items() if place.slot == result]
    begin = [number for number, allocs in enumerate(found.allocs) for slot, _ in allocs if slot == result]
    assert lying and begin == [min(number for number, use in enumerate(uses) if {*use.buffers, *use.makes} & {*lying})]
    assert result not in {slot for frees in found.frees for slot in frees}
    memory, apart = execute(recording, made, found), execute(recording, made)
    assert torch.equal(memory[result], apart[result])


def test_memory_that_a_graph_finds_filled_stays_where_it_is() -> None:
    recording = with_a_late_result()
    result, uses = result_of(recording.graph), uses_of(plan(recording.graph))
    apart = plan_memory(recording.graph, uses, [4] * 8, graphs=True, donate=False, runs=[(0, 1), (1, 2), (2, len(uses))])
    firsts = [next(number for number, use in enumerate(uses) if slot in (*use.buffers, *use.makes))
              for slot, place in apart.places.items() if place.slot == result]
    assert all(first >= 2 for first in firsts), "the guest comes in the same run of steps as its host"
    for options in ({"graphs": False}, {"graphs": True, "runs": [(0, 0)]}):
        found = plan_memory(recording.graph, uses, [4] * 8, donate=False, **options)  # type: ignore[arg-type]
        assert result not in {place.slot for place in found.places.values()}
    with settings.override(disable="static_plan"):
        found = plan_memory(recording.graph, uses, [4] * 8, graphs=True, donate=False)
    assert result not in {place.slot for place in found.places.values()}


@hypothesis(max_examples=40, deadline=None)
@given(program=steps(barriers=False), hold=st.booleans())
def test_random_programs_give_the_same_numbers_wherever_values_lie(program: list[Step], hold: bool) -> None:
    tensors = inputs("cpu")
    with Recorder() as recorder:
        held = interpret(program, tensors)
    recording = recorder.finish(held if hold else held[-2:])
    made = plan(recording.graph)
    temporaries = [temporary.nbytes for temporary in made.temporaries]
    memory_plan.GUEST, before = 1, memory_plan.GUEST
    try:
        found = plan_memory(recording.graph, uses_of(made), temporaries, graphs=True, donate=False)
    finally:
        memory_plan.GUEST = before
    memory, apart = execute(recording, made, found), execute(recording, made)
    for value in recording.graph.outputs():
        if value.buffer.kind is not BufferKind.GENERATOR:
            assert torch.equal(memory[value.buffer.index], apart[value.buffer.index]), str(value)
