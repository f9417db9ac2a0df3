"""Schedule hooks: what they are told, what they may answer, and the ones that come with lazysched."""

from __future__ import annotations

import re
from typing import Callable

import pytest

from barriers.model import memory
from barriers.policies import earliest, latest, min_peak_memory, overlap_communication, program_order
from barriers.recorded import Ask, Before, Early, Late, Overlap, Recorded
from barriers.wishes import wishes_of
from ir_nodes import SegmentCall
from tests.toys import Toy, line_of, three


def test_a_hook_is_told_of_each_segment() -> None:
    toy = Toy("x")
    toy.op("a", "x")
    toy.end("a")
    toy.op("glue", "a", live=False)
    toy.op("b", "glue")
    toy.op("b2", "b", "a")
    told: list[Recorded] = []
    for node in toy.graph.nodes[2:]:
        node.segment = SegmentCall("b", backward=True, call=1, parent=None)
    toy.order(hooks=[lambda recorded: told.append(recorded)])
    a, b, last = told[0].segments
    assert (a.name, a.backward, a.call, a.ops, a.needs) == ("a", False, 0, ["aten::sin.out"], ())
    assert (a.bytes_made, a.bytes_freed) == (16, 0) and a.seconds > 0 == a.communication
    assert (str(b), b.backward, b.needs, b.bytes_freed) == ("b#1", True, (a,), 16)
    assert set(last.needs) == {a, b}
    assert told[0].allows(a, b) and not told[0].allows(b, a)
    assert toy.report.problems == []


def test_a_segment_counts_what_runs_inside_it() -> None:
    toy = Toy("x")
    outer = SegmentCall("outer")
    toy.op("a", "x")
    toy.op("b", "a")
    toy.graph.nodes[0].segment, toy.graph.nodes[1].segment = SegmentCall("inner", parent=outer), outer
    told: list[Recorded] = []
    toy.order(hooks=[lambda recorded: told.append(recorded)])
    whole, inner = told[0].segments
    assert (whole.name, len(whole.ops), whole.holds_others, inner.inside) == ("outer", 2, True, whole)
    assert told[0].innermost == (inner,) and not told[0].allows(inner, whole) and whole.needs == inner.needs == ()


ANSWERS: dict[str, tuple[Ask, list[str]]] = {
    "names": (lambda recorded: [("c", "a")], ["b", "b", "c", "c", "a", "a"]),
    "objects": (lambda recorded: [(recorded.segments[2], recorded.segments[0])], ["b", "b", "c", "c", "a", "a"]),
    "beside, the later moves": (lambda recorded: [Before("a", "c", "later")], ["a", "a", "c", "c", "b", "b"]),
    "beside, the earlier moves": (lambda recorded: [Before("a", "c", "earlier")], ["b", "b", "a", "a", "c", "c"]),
    "early": (lambda recorded: [Early("b")], ["b", "b", "a", "a", "c", "c"]),
    "late": (lambda recorded: [Late("a")], ["b", "b", "c", "c", "a", "a"]),
    "several": (lambda recorded: (one for one in [Late("a"), Early("c")]), ["c", "c", "b", "b", "a", "a"]),
    "nothing": (lambda recorded: None, ["a", "a", "b", "b", "c", "c"]),
    "program order": (program_order, ["a", "a", "b", "b", "c", "c"]),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_honoured(case: str) -> None:
    hook, wanted = ANSWERS[case]
    toy = three()
    assert toy.order(hooks=[hook]) == wanted
    assert toy.report.problems == [] and toy.report.refusals == []


def fails(recorded: Recorded) -> list[Early]:
    raise KeyError("no such layer")


NONSENSE: dict[str, tuple[Ask, str]] = {
    "raises": (fails, f"fails at {__file__}:.* raised KeyError: 'no such layer' at {__file__}:"),
    "a number": (lambda recorded: [3], "it answered 3; an answer lists pairs"),  # type: ignore[list-item]
    "no list": (lambda recorded: 3, "it answered 3; it has to answer a list"),  # type: ignore[arg-type, return-value]
    "a text": (lambda recorded: "ab", "it answered 'ab'; it has to answer a list"),  # type: ignore[arg-type, return-value]
    "an unknown name": (lambda recorded: [("a", "cc")], r"it answered 'cc', which is no segment .* mean 'c'\? \(a, b, c\)"),
    "a bad side": (lambda recorded: [Before("a", "b", "left")], "answered Before"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_passed_over_with_a_reason(case: str) -> None:
    hook, reason = NONSENSE[case]
    toy = three()
    assert toy.order(*wishes_of(["c", "a"]), hooks=[hook]) == ["b", "b", "c", "c", "a", "a"], "the rest of the schedule holds"
    (problem,) = toy.report.problems
    assert re.search(reason, problem), problem


def test_a_schedule_goes_before_a_hook() -> None:
    toy = three()
    assert toy.order(*wishes_of(["c", "a"]), hooks=[lambda recorded: [("a", "c")]]) == ["b", "b", "c", "c", "a", "a"]
    assert "a has to wait for c, which another part of the schedule places after c" in str(toy.report.refusals[0])


def test_earliest_and_latest_move_whole_segments() -> None:
    steps = [("", "p", "x"), ("a", "a", "x"), ("", "q", "p"), ("", "r", "a"), ("b", "b", "q")]
    assert line_of(*steps).order(hooks=[earliest]) == ["-", "a", "-", "b", "-"], "what b needs comes forward with it"
    assert line_of(*steps).order(hooks=[latest]) == ["-", "-", "a", "-", "b"]


def wide(branches: int) -> Toy:
    """All branches make something large first, then all make it small."""
    toy = Toy("x", floats=1000)
    for number in range(branches):
        toy.op(f"large{number}", "x", live=False)
        toy.end(f"make{number}")
    for number in range(branches):
        toy.shrink(f"small{number}", f"large{number}")
        toy.end(f"use{number}")
    return toy


def test_less_memory_is_held_where_an_order_allows_it() -> None:
    toy = wide(5)
    recorded = max(memory(toy.graph, toy.graph.nodes))
    toy.order(hooks=[min_peak_memory])
    assert toy.report.problems == [] and toy.report.refusals == []
    assert (recorded, max(memory(toy.graph, toy.graph.nodes))) == (6 * 4000 + 4, 2 * 4000 + 5 * 4)


def test_memory_that_no_order_saves_moves_nothing() -> None:
    toy = three()
    assert toy.order(hooks=[min_peak_memory]) == ["a", "a", "b", "b", "c", "c"]
    assert {node.stage for node in toy.graph.nodes} == {0}, "nothing that could be fused is kept apart"


def talking() -> Toy:
    """A collective, its reader, and computation that does not need it."""
    toy = Toy("x", floats=100_000)
    toy.talk("sum", "x")
    toy.end("sdd")
    toy.op("y", "sum")
    for number in range(3):
        toy.op(f"z{number}", "x" if not number else f"z{number - 1}")
    return toy


def test_what_waits_for_communication_gives_way() -> None:
    times: list[float] = []

    def see(recorded: Recorded) -> None:
        times.extend([recorded.seconds(), recorded.seconds([Overlap()])])

    toy = talking()
    toy.order(hooks=[see, overlap_communication])
    assert [node.name for node in toy.graph.nodes] == ["all_reduce", "sin", "sin", "sin", "sin"]
    assert [node.index for node in toy.graph.nodes] == [0, 2, 3, 4, 1]
    assert times[1] < times[0]


def test_a_collective_starts_before_what_it_does_not_need() -> None:
    toy = Toy("x", floats=100_000)
    for number in range(3):
        toy.op(f"z{number}", "x" if not number else f"z{number - 1}")
    toy.op("given", "x", live=False)
    toy.talk("sum", "given")
    toy.op("y", "sum", "z2")
    toy.order(hooks=[overlap_communication])
    assert [node.index for node in toy.graph.nodes] == [3, 4, 0, 1, 2, 5]


def test_without_communication_nothing_is_overlapped() -> None:
    told: list[bool] = []
    see: Callable[[Recorded], None] = lambda recorded: told.append(recorded.communicates)  # noqa: E731
    assert three().order(hooks=[see, overlap_communication]) == ["a", "a", "b", "b", "c", "c"]
    assert told == [False]
