"""Schedules: legal ones are honoured exactly, others are refused with the tensor that forbids them, numbers never change."""

from __future__ import annotations

import time
from typing import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barriers.order import order_segments
from barriers.wishes import ContradictionError, Moves, Wish, check, wishes_of
from ir_nodes import SegmentCall, reference
from ir_nodes.verify import verify
from tests import programs
from tests.recording import Recorder
from tests.toys import Toy, chain, line_of, three


def test_an_order_of_independent_segments_is_honoured() -> None:
    toy = three()
    assert toy.order(*wishes_of(["c", "a"])) == ["b", "b", "c", "c", "a", "a"]
    assert [str(call) for call in toy.report.recorded] == ["a", "b", "c"]
    assert [str(call) for call in toy.report.scheduled] == ["b", "c", "a"]
    assert toy.report.refusals == [] and len(toy.report.honoured) == 1


def test_an_order_that_already_holds_moves_nothing() -> None:
    assert three().order(*wishes_of(["a", "c"])) == ["a", "a", "b", "b", "c", "c"]


def test_a_pre_hook_delays_a_segment_to_right_before_its_anchor() -> None:
    assert three().order(Wish("a", "c", Moves.EARLIER)) == ["b", "b", "a", "a", "c", "c"]


def test_a_hook_brings_a_later_segment_forward() -> None:
    assert three().order(Wish("a", "c", Moves.LATER)) == ["a", "a", "c", "c", "b", "b"]
    assert three().order(Wish("c", "a", Moves.EARLIER)) == ["c", "c", "a", "a", "b", "b"]


def test_what_a_moved_segment_needs_moves_with_it() -> None:
    toy = line_of(("a", "a", "x"), ("", "between", "x"), ("", "table", "x"), ("b", "b", "table"))
    assert toy.order(Wish("b", "a", Moves.EARLIER)) == ["-", "b", "a", "-"]
    assert toy.report.refusals == []


def test_who_uses_a_delayed_segment_waits_for_it() -> None:
    toy = line_of(("a", "a", "x"), ("user", "user", "a"), ("c", "c", "x"))
    assert toy.order(*wishes_of(["c", "a"])) == ["c", "a", "user"]


def test_data_flow_wins_and_the_report_names_the_tensor_and_both_lines() -> None:
    toy = Toy("x")
    toy.op("a", "x", line=10)
    toy.end("a")
    toy.op("middle", "a", line=20)
    toy.end("m")
    toy.op("b", "middle", line=30)
    toy.end("b")
    assert toy.order(*wishes_of(["b", "a"])) == ["a", "m", "b"]
    (refusal,) = toy.report.refusals
    assert str(refusal) == (
        "wanted b before a, but b needs `sin` float32[4] made at model.py:10 in forward by a "
        "(sin at model.py:20 in forward reads it)"
    )


@pytest.mark.parametrize("written_first", [True, False])
def test_shared_memory_is_a_dependency(written_first: bool) -> None:
    toy = Toy("x", "shared")
    steps: list[Callable[[], None]] = [lambda: toy.op("y", "shared", line=1), lambda: toy.op("shared", "x", line=2)]
    for name, step in zip("ab", reversed(steps) if written_first else steps):
        step()
        toy.end(name)
    assert toy.order(*wishes_of(["b", "a"])) == ["a", "b"]
    reason = toy.report.refusals[0].reason
    assert ("needs" in reason) == written_first and ("overwrites" in reason) != written_first


def test_a_segment_right_beside_its_anchor_says_what_had_to_stand_between() -> None:
    toy = line_of(("a", "a", "x"), ("", "m", "a"), ("b", "b", "m"))
    assert toy.order(Wish("a", "b", Moves.EARLIER)) == ["a", "-", "b"]
    (note,) = toy.report.refusals
    assert note.partly and "1 ops have to run between them, the first `sin`" in note.reason


def test_calls_are_paired_in_order() -> None:
    toy = Toy("x")
    for call in range(3):
        for name in "ab":
            toy.op(f"{name}{call}", "x")
            toy.end(name, call)
    assert toy.order(*wishes_of(["b", "a"])) == ["b", "a", "b#1", "a#1", "b#2", "a#2"]


def test_a_part_cannot_run_before_the_whole() -> None:
    toy = Toy("x")
    toy.op("a", "x")
    toy.op("b", "a")
    outer = SegmentCall("outer")
    for node, segment in zip(toy.graph.nodes, (outer, SegmentCall("inner", parent=outer))):
        node.segment = segment
    toy.order(*wishes_of(["inner", "outer"]))
    assert toy.report.refusals[0].reason == "one is a part of the other"


def test_one_method_is_split_and_another_put_between() -> None:
    toy = Toy("x")
    whole = SegmentCall("a")
    for number in (1, 2, 3):
        toy.op(f"a{number}", "x" if number == 1 else f"a{number - 1}")
        toy.graph.nodes[-1].segment = SegmentCall(f"a{number}", parent=whole)
    toy.op("b", "x")
    toy.graph.nodes[-1].segment = SegmentCall("b")
    assert toy.order(*wishes_of(["a1", "b", "a2"])) == ["a1", "b", "a2", "a3"]


def test_segments_of_a_schedule_have_stages_of_their_own() -> None:
    toy = three()
    toy.order(*wishes_of(["c", "a"]))
    assert [node.stage for node in toy.graph.nodes] == [0, 0, 1, 1, 2, 2]


def test_a_contradiction_is_an_error_that_shows_the_circle() -> None:
    with pytest.raises(ContradictionError, match=r"a before b \(one\); b before c \(one\); c before a \(two\)"):
        check([*wishes_of(["a", "b", "c"], "one"), *wishes_of(["c", "a"], "two"), *wishes_of(["x", "c"], "three")])
    check([*wishes_of(["a", "b", "c"]), *wishes_of(["a", "c"])])
    with pytest.raises(ValueError, match="names 'a' twice"):
        wishes_of(["a", "b", "a"])


names = st.sampled_from([f"s{number}" for number in range(6)])
wishes = st.lists(st.builds(Wish, names, names, st.sampled_from(list(Moves))).filter(lambda w: w.earlier != w.later), max_size=6)


@settings(max_examples=150, deadline=None)
@given(programs.steps(barriers=False), wishes, st.lists(st.integers(0, 25), max_size=6))
def test_random_schedules_of_random_programs_keep_the_numbers(
    program: list[programs.Step], asked: list[Wish], cuts: list[int]
) -> None:
    """Legal wishes are honoured exactly, others are refused; the bytes are eager's in any case."""
    tensors = programs.inputs("cpu")
    with Recorder() as recorder:
        held = programs.interpret(program, tensors)
    recording = recorder.finish(held)
    graph = recording.graph
    for number, start in enumerate(sorted(cuts)):
        segment = SegmentCall(f"s{number}")
        for node in graph.nodes[start:]:
            node.segment = segment
    report = order_segments(graph, asked)
    verify(graph)
    got = reference.run(graph, recording.inputs, recording.scalars)
    for index, data in recording.expected.items():
        assert torch.equal(got[index], data)
    place: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        place.setdefault(node.segment.name if node.segment else "", []).append(position)
    for a, b in report.honoured:
        assert max(place[a.name]) < min(place[b.name])
    about = [wish for wish in asked if wish.earlier in place and wish.later in place]
    assert len(report.honoured) + sum(not refusal.partly for refusal in report.refusals) == len(about)


def test_scheduling_grows_linearly() -> None:
    def seconds(nodes: int) -> float:
        times = []
        for _ in range(3):
            graph, asked = chain(nodes, 200)
            start = time.process_time()
            report = order_segments(graph, asked)
            times.append(time.process_time() - start)
            assert len(report.honoured) == 100 and not report.refusals
        return min(times)

    small, large = seconds(2_000), seconds(20_000)
    assert large < 25 * small, (small, large)
