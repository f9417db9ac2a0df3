"""Segments, hooks and schedules end to end: the order that was asked for, eager's numbers in any case."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Callable

import pytest
import torch
from torch import nn

import lazy_backend
from barriers.segment import SegmentError
from barriers.wishes import ContradictionError
from lazy_backend import LazyScheduler, ScheduleError, orders, register_segment, register_segments, segment
from tests import children, towers
from tests.device import DEVICE
from tests.towers import FUNC1, Tower, name_all, pair, same, train

pytestmark = pytest.mark.usefixtures("no_segments_left")

SCHEDULES: dict[str, tuple[list[str], list[str]]] = {
    "as recorded": (["one", "two", "join"], ["one", "two", "join", "two_bwd", "one_bwd"]),
    "forward swapped": (["two", "one"], ["two", "one", "join", "two_bwd", "one_bwd"]),
    "backward swapped": (["one_bwd", "two_bwd"], ["one", "two", "join", "one_bwd", "two_bwd"]),
    "both swapped": (["two", "one", "one_bwd", "two_bwd"], ["two", "one", "join", "one_bwd", "two_bwd"]),
    "nothing": ([], ["one", "two", "join", "two_bwd", "one_bwd"]),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_is_run_and_changes_no_number(case: str) -> None:
    schedule, wanted = SCHEDULES[case]
    model, truth = pair(Tower)
    name_all(model)
    with LazyScheduler(schedule=schedule, strict=True) as scheduler:
        got = train(model, DEVICE)
    assert scheduler.recorded_execution_order() == wanted
    assert scheduler.refusals() == []
    same(got, train(truth, "cpu"))


def test_an_order_that_data_forbids_is_reported_with_tensor_and_lines() -> None:
    model, truth = pair(Tower)
    name_all(model)
    with LazyScheduler(schedule=["join", "one"]) as scheduler:
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))
    report = scheduler.report()
    assert "could not be honoured: wanted join before one, but join needs `relu` float32[4, 6] made at " in report
    assert f"{towers.__file__}:{FUNC1} in func1 by one (mul at {towers.__file__}:" in report
    with pytest.raises(ScheduleError, match="wanted join before one, but join needs"):
        with LazyScheduler(schedule=["join", "one"], strict=True):
            strict = train(model, DEVICE, steps=1)
    assert strict[0].isfinite().all()


def test_hooks_place_segments_and_their_handles_take_them_away() -> None:
    model, truth = pair(Tower)
    name_all(model)
    handle = lazy_backend.register_segment_forward_pre_hook("join", "one")
    with LazyScheduler() as scheduler:
        got = train(model, DEVICE)
    assert scheduler.recorded_execution_order()[:3] == ["two", "one", "join"]
    same(got, train(truth, "cpu"))
    handle.remove()
    with lazy_backend.register_segment_backward_hook("one_bwd", "two_bwd"), LazyScheduler() as scheduler:
        train(model, DEVICE)
    assert scheduler.recorded_execution_order() == ["one", "two", "join", "one_bwd", "two_bwd"]
    with LazyScheduler() as scheduler:
        train(model, DEVICE)
    assert scheduler.recorded_execution_order() == ["one", "two", "join", "two_bwd", "one_bwd"]


def test_hooks_hold_without_a_scheduler() -> None:
    model, truth = pair(Tower)
    name_all(model)
    with lazy_backend.register_segment_forward_pre_hook("one", "two"):
        same(train(model, DEVICE), train(truth, "cpu"))


def test_a_scheduled_step_compiles_once() -> None:
    model, _ = pair(Tower)
    name_all(model)
    counts = []
    for _ in range(5):
        with LazyScheduler(schedule=["two", "one"]):
            train(model, DEVICE, steps=2)
        counts.append(lazy_backend.stats()["compiles"])
    assert counts[-1] == counts[1], "a with block in a loop finds what it compiled"
    scheduler = LazyScheduler(schedule=["two", "one"]).start()
    train(model, DEVICE, steps=4)
    scheduler.stop()
    assert lazy_backend.stats()["compiles"] <= counts[-1] + 2


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with segment("a1", backward="a1_bwd"):
            first = self.a(x).relu()
        with segment("a2"):
            second = first.exp().sum(-1, keepdim=True)
        with segment("b"):
            other = self.b(x).tanh()
        return second + other


def test_one_method_is_split_and_another_part_put_between() -> None:
    model, truth = pair(Blocks)
    register_segment(model.forward, name="whole")
    with LazyScheduler(schedule=["a1", "b", "a2"], strict=True) as scheduler:
        got = train(model, DEVICE)
    assert scheduler.recorded_execution_order() == ["whole", "a1", "b", "a2", "a1_bwd"]
    same(got, train(truth, "cpu"))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sin() + self.layer(x * 2).cos()


def test_nth_call_picks_one_of_several() -> None:
    model, truth = pair(Twice)
    register_segments(model, {"first": "layer"})["first"].remove()
    register_segment(model.layer, name="second", nth_call=1)
    register_segment(model.layer.forward, name="first", nth_call=0)
    with LazyScheduler(schedule=["second", "first"], strict=True) as scheduler:
        got = train(model, DEVICE)
    assert scheduler.recorded_execution_order() == ["second", "first"]
    same(got, train(truth, "cpu"))


def test_every_call_counts_where_none_is_picked() -> None:
    model, _ = pair(Twice)
    register_segment(model.layer, name="layer")
    with LazyScheduler() as scheduler:
        train(model, DEVICE, steps=2)
    assert scheduler.recorded_execution_order() == ["layer", "layer#1"]


def test_a_segment_that_never_ran_is_named_once() -> None:
    model, _ = pair(Tower)
    name_all(model)
    spare = Tower().to(DEVICE)
    register_segment(spare.join, name="spare")
    with pytest.warns(UserWarning, match="names 'spare', which did not run in this step") as caught:
        with LazyScheduler(schedule=["two", "spare", "one"]):
            train(model, DEVICE)
    assert len([w for w in caught if "spare" in str(w.message)]) == 1


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[nn.Module], object]]] = {
    "unknown name": (SegmentError, "no segment 'tow'; did you mean 'two'", lambda m: LazyScheduler(schedule=["tow"]).start()),
    "name taken": (SegmentError, "a segment 'one' already .Tower.func1.", lambda m: register_segment(m.func2, "one", nth_call=3)),
    "method taken": (SegmentError, "forward of Tower.func1 is the segment 'one'", lambda m: register_segment(m.func1, "x")),
    "no module": (SegmentError, "no module's method", lambda m: register_segment(torch.relu, "x")),
    "bad path": (SegmentError, "Tower has no 'head.fward'", lambda m: register_segments(m, {"x": "head.fward"})),
    "circle": (ContradictionError, "two before one .* one before two", lambda m: (
        lazy_backend.register_segment_forward_pre_hook("two", "one"), LazyScheduler(schedule=["two", "one"]).start())),
    "twice": (ValueError, "names 'one' twice", lambda m: LazyScheduler(schedule=["one", "two", "one"])),
    "a text": (ValueError, r"write \['one'\]", lambda m: LazyScheduler(schedule="one")),
    "wrong direction": (SegmentError, "use register_segment_backward_hook",
                        lambda m: lazy_backend.register_segment_forward_hook("one_bwd", "two")),
    "hook on nothing": (SegmentError, "no segment 'nix'", lambda m: lazy_backend.register_segment_backward_hook("nix", "two")),
    "nth_call": (SegmentError, "counts calls from 0", lambda m: register_segment(m.join, "x", nth_call=-1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_errors_that_name_the_fix(mistake: str) -> None:
    kind, words, make = MISTAKES[mistake]
    model, _ = pair(Tower)
    name_all(model)
    with pytest.raises(kind, match=words):
        make(model)


def test_copies_and_pickles_of_a_module_are_ordinary_ones() -> None:
    model, _ = pair(Tower)
    own = vars(Tower)["func1"]
    handles = [register_segment(model.func1, name="one"), register_segment(model.forward, name="all")]
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    x = torch.ones(4, 6, device=DEVICE)
    with LazyScheduler() as scheduler:
        torch.testing.assert_close(twin(x), again(x))
    assert scheduler.recorded_execution_order() == []
    for handle in handles:
        handle.remove()
    assert vars(Tower)["func1"] is own, "nothing is left behind"
    with LazyScheduler() as scheduler:
        model(x).sum().item()
    assert scheduler.recorded_execution_order() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_segment(model.func1, name="one")


def test_a_segment_goes_with_its_module() -> None:
    for _ in range(2):
        name_all(Tower())
    with pytest.raises(SegmentError, match="a segment 'one' already"):
        alive = Tower(), Tower()
        for model in alive:
            name_all(model)


def few_programs() -> None:
    model, _ = pair(Tower)
    name_all(model)
    with LazyScheduler() as scheduler:
        for rows in range(1, 7):
            model(torch.ones(rows, 6, device=DEVICE)).sum().item()
            assert scheduler.recorded_execution_order()[-3:] == ["one", "two", "join"]
    assert len(orders._reports) == 2


def test_reports_are_kept_for_the_programs_that_are_kept() -> None:
    children.call(few_programs, cache_size=2)
