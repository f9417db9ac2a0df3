"""Under CUDA graphs, whose results have their memory all along, values that die early lie where results will be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting import calls_of
from graphs import execute, uses_of
from hypothesis import example, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from codegen import memory_plan
from codegen.executable import Placed
from codegen.extern import emit_call
from codegen.fuse import plan
from codegen.guests import Block, lodge
from codegen.memory_plan import MemoryPlan, Place, plan_memory
from codegen.static_plan import ALIGNMENT, Piece
from codegen.step_use import node_use
from ir_nodes import BufferKind, Graph, settings
from tests.programs import Step, inputs, interpret, steps
from tests.recording import Recorder, Recording

drawn_pieces = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30), st.integers(0, 12)), max_size=30)
STEPS = 50


def held_by(pieces: list[Piece]) -> list[int]:
    return [sum(piece.nbytes for piece in pieces if piece.first <= step <= piece.last) for step in range(STEPS)]


@hypothesis(max_examples=200, deadline=None)
@given(drawn_pieces, drawn_pieces.filter(bool))
@example([(0, 0, 0)], [(0, 1, 0)])
@example([(1000, 0, 0), (1000, 5, 0)], [(1000, 3, 0)])  # what is held at most can be lowered in one of two places
def test_guests_leave_before_what_lies_there_is_made(one: list[tuple[int, int, int]], two: list[tuple[int, int, int]]) -> None:
    pieces = [Piece(slot, nbytes, first, first + long) for slot, (nbytes, first, long) in enumerate(one + two)]
    values, results = pieces[: len(one)], pieces[len(one) :]
    block = lodge(values, results, held_by(values), range(STEPS))
    if block is None:
        return
    assert block.results.keys() == {piece.slot for piece in results} and block.guests
    begin = {piece.slot: piece.first for piece in pieces}
    end = {piece.slot: piece.last if piece in values else STEPS for piece in pieces}  # results are there until the next replay
    lying = [(slot, start, start + pieces[slot].nbytes) for slot, start in (block.results | block.guests).items()]
    for slot, start, stop in lying:
        assert start % ALIGNMENT == 0 and stop <= block.nbytes
        for other, bottom, top in lying:
            if slot != other and begin[slot] <= end[other] and begin[other] <= end[slot]:
                assert stop <= bottom or top <= start
    guests = [pieces[slot] for slot in block.guests]
    assert (block.first, block.last) == (min(guest.first for guest in guests), max(guest.last for guest in guests))
    assert max(start + pieces[slot].nbytes for slot, start in block.guests.items()) <= block.extent <= block.nbytes
    before, after = held_by(values), held_by([value for value in values if value not in guests])
    most = before.index(max(before))
    assert after[most] < before[most] and max(after) <= max(before)


def test_a_large_value_lies_where_many_small_results_will_be() -> None:
    """As an activation lies where the gradients of a layer's weights will be, deepest what waits longest."""
    results = [Piece(10 + number, 1024, 40 + number, STEPS - 1) for number in range(8)]
    values = [Piece(0, 4096, 0, 39), Piece(1, 2048, 1, 41), Piece(2, 2048, 2, 41), Piece(3, 1024, 3, 42)]
    block = lodge(values, results, held_by(values), range(STEPS))
    assert block is not None and block.guests == {3: 0, 1: 1024, 2: 3072}
    assert [block.results[10 + number] for number in range(8)] == [1024 * (7 - number) for number in range(8)]
    assert lodge([Piece(0, 2048, 0, 46)], results, held_by(values), range(STEPS)) is None, "only 1024 bytes are free so long"


def test_many_values_take_about_linear_time() -> None:
    def work(count: int) -> int:
        values = [Piece(slot, 1000, slot, 4 * count - slot) for slot in range(count)]
        results = [Piece(count + number, 500, 3 * count + number, 4 * count) for number in range(count)]
        held = [1] * (4 * count + 1)
        return calls_of(lambda: lodge(values, results, held, range(4 * count)))

    assert work(1600) < 20 * work(200)


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


def block_of(found: MemoryPlan) -> tuple[int, Block]:
    (block,) = found.blocks.items()
    return block


def test_a_value_lies_where_a_result_will_be_and_numbers_stay() -> None:
    recording = with_a_late_result()
    result, made = result_of(recording.graph), plan(recording.graph)
    uses, temporaries = uses_of(made), [temporary.nbytes for temporary in made.temporaries]
    found = plan_memory(recording.graph, uses, temporaries, graphs=True, donate=False)
    slot, block = block_of(found)
    lying = [one for one, place in found.places.items() if place.slot == slot]
    touched = [number for number, use in enumerate(uses) if {*use.buffers, *use.makes} & {*lying}]
    assert block.results == {result: 0} and lying == [*block.guests]
    assert [number for number, allocs in enumerate(found.allocs) if (slot, block.extent) in allocs] == [min(touched)]
    assert [number for number, frees in enumerate(found.frees) if slot in frees] == [max(touched)]
    assert result not in {slot for frees in found.frees for slot in frees}
    apart = plan_memory(recording.graph, uses, temporaries, donate=False)
    with settings.override(disable="static_plan"):
        idle = plan_memory(recording.graph, uses, temporaries, graphs=True, donate=False)
    most = [max(one.held(uses)) for one in (found, apart, idle)]
    assert most[0] <= most[1] < most[2], "a graph's results have their memory all along"
    memory, alone = execute(recording, made, found), execute(recording, made)
    assert torch.equal(memory[result], alone[result])


def test_memory_that_a_graph_finds_filled_stays_where_it_is() -> None:
    recording = with_a_late_result()
    uses = uses_of(plan(recording.graph))
    apart = plan_memory(recording.graph, uses, [4] * 8, graphs=True, donate=False, runs=[(0, 1), (1, 2), (2, len(uses))])
    assert all(block.first >= 2 for block in apart.blocks.values()), "guests come in the same run of steps as the results"
    for options in ({"graphs": False}, {"graphs": True, "runs": [(0, 0)]}):
        found = plan_memory(recording.graph, uses, [4] * 8, donate=False, **options)  # type: ignore[arg-type]
        assert not found.blocks and not found.standing
    with settings.override(disable="static_plan"):
        assert not plan_memory(recording.graph, uses, [4] * 8, graphs=True, donate=False).blocks


@pytest.mark.parametrize("change", [{"keeps": True}, {"whole": True}])
def test_what_must_not_move_is_no_guest(change: dict[str, bool]) -> None:
    recording = with_a_late_result()
    uses = [replace(use, **change) for use in uses_of(plan(recording.graph))]
    assert not plan_memory(recording.graph, uses, [4] * 8, graphs=True, donate=False).blocks


def test_a_call_finds_its_operands_inside_a_block() -> None:
    """By their layouts; a conjugated view's can't be told, so such a call takes whole slots."""
    recording = with_a_late_result()
    node = next(node for node in recording.graph.nodes if node.name in ("mm", "mm.out"))
    node.instr, said = 0, list[Any]()
    program = SimpleNamespace(call=lambda *told: said.append(told))
    moved = node.reads[0].value.buffer.index
    for offset in (0, 1024):
        emit_call(node).add(Placed(program, {moved: Place(77, offset, node.reads[0].value.buffer.nbytes)}))  # type: ignore[arg-type]
    (_, slots, plain, _), (_, same, layouts, _) = said
    assert slots == same and slots[0] == 77 and plain == []
    assert [layout[3] for layout in layouts] == [operand.layout.offset + 256 * (operand.value.buffer.index == moved)
                                                 for operand in node.reads] + [write.layout.offset for write in node.writes]
    assert not node_use(node).whole
    layout = replace(node.reads[0].layout, flipped=True)
    assert node_use(replace(node, reads=(replace(node.reads[0], layout=layout), *node.reads[1:]))).whole


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
