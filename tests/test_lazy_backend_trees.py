"""Random trees of modules, segments, schedules and hooks: numbers are eager's always, legal schedules are honoured exactly."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lazy_backend
from barriers.policies import POLICIES
from barriers.wishes import ContradictionError
from lazy_backend import LazyScheduler, register_segment
from lazy_backend.entered import segments
from tests import trees
from tests.device import CLOSE, DEVICE, ON_GPU, PHYSICAL
from tests.towers import train


def pair(spec: trees.Spec) -> tuple[nn.Module, nn.Module]:
    """On the device and in eager mode where it computes, with the same weights; leaves keep sharing their state, which
    `nn.Module.to` does not do."""
    torch.manual_seed(0)
    truth = trees.build(spec)
    model = copy.deepcopy(truth).to(DEVICE)
    for one in (model, truth.to(PHYSICAL)):
        for part in one.modules():
            if isinstance(part, trees.Leaf):
                part.state = trees.state_of(one)
    return model, truth


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """To the last bit on a CPU, where both run the same kernels in the same order of sums."""
    near = 10 * CLOSE if ON_GPU else 0.0  # there some chains multiply what was rounded otherwise
    tolerance = {"rtol": near, "atol": near}
    torch.testing.assert_close([one.cpu() for one in got], [one.cpu() for one in wanted], equal_nan=True, **tolerance)


def check(model: nn.Module, truth: nn.Module, **options: Any) -> LazyScheduler:
    with warnings.catch_warnings(), LazyScheduler(**options) as scheduler:
        warnings.simplefilter("ignore", UserWarning)
        got = train(model, DEVICE)
    equal([*got, trees.state_of(model)], [*train(truth, PHYSICAL), trees.state_of(truth)])
    return scheduler


@settings(max_examples=100, deadline=None)
@given(trees.trees.filter(lambda spec: not isinstance(spec, str)), st.data())
def test_random_schedules_keep_eagers_numbers(spec: trees.Spec, data: st.DataObject) -> None:
    model, truth = pair(spec)
    paths = [path for path, _ in model.named_modules() if path and ".linear" not in path and not path.endswith("parts")]
    names = {f"{path}{suffix}": path for path in paths for suffix in ("", "_bwd")}
    chosen = data.draw(st.lists(st.sampled_from(list(names)), unique=True, max_size=8))
    try:
        for name in chosen:
            register_segment(model.get_submodule(names[name]), name, is_backward=name.endswith("_bwd"))
        for _ in range(data.draw(st.integers(0, 2)) if len(chosen) > 1 else 0):
            hook(*data.draw(st.permutations(chosen))[:2], data.draw(st.booleans()))
        schedule = data.draw(st.permutations(chosen))[: data.draw(st.integers(0, len(chosen)))]
        policies = [POLICIES[name] for name in data.draw(st.lists(st.sampled_from(list(POLICIES)), unique=True, max_size=2))]
        try:
            scheduler = check(model, truth, schedule=schedule, hooks=policies, debug_mode=data.draw(st.booleans()))
        except ContradictionError:
            return  # a hook against the schedule, said before anything ran
        for report in scheduler._last_step().recordings:
            place = {call: number for number, call in enumerate(report.scheduled)}
            assert all(place[a] < place[b] for a, b in report.honoured) and not report.problems
    finally:
        for name in segments.names():
            segments.remove(name)


def hook(anchor: str, name: str, before: bool) -> None:
    way = f"register_segment_{'backward' if anchor.endswith('_bwd') else 'forward'}_{'pre_hook' if before else 'hook'}"
    getattr(lazy_backend, way)(anchor, name)


def may_change_places(spec: trees.Spec) -> bool:
    """Checkpointing reads the state of generators: where that waits for a dropout, two recordings hold the segments."""
    waits = "dropout" in str(spec) and "checkpoint" in str(spec)
    return not waits and bool(trees.pure_siblings(trees.build(spec)))


@settings(max_examples=60, deadline=None)
@given(trees.with_sums.filter(may_change_places), st.data())
def test_legal_schedules_are_honoured_exactly(spec: trees.Spec, data: st.DataObject) -> None:
    """What is summed and shares nothing may run in any order, forward and backward."""
    model, truth = pair(spec)
    paths = trees.pure_siblings(model)
    try:
        for path in paths:
            register_segment(model.get_submodule(path), f"{path}_fwd")
            register_segment(model.get_submodule(path), f"{path}_bwd", is_backward=True)
        schedule = [f"{path}_{side}" for side in ("fwd", "bwd") for path in data.draw(st.permutations(paths))]
        scheduler = check(model, truth, schedule=schedule, strict=True)
        assert scheduler.recorded_execution_order() == schedule
        assert scheduler.refusals() == []
    finally:
        for name in segments.names():
            segments.remove(name)


def test_draws_change_places_around_a_segment_that_draws_nothing() -> None:
    """The last shall draw first, but only the one between them is named beside both."""
    model, truth = pair(("chain", [("sum", ["dropout", "linear", "dropout"])]))
    paths = trees.pure_siblings(model)
    try:
        for path in paths:
            register_segment(model.get_submodule(path), f"{path}_fwd")
        scheduler = check(model, truth, schedule=[f"{path}_fwd" for path in reversed(paths)], strict=True)
        assert scheduler.refusals() == []
    finally:
        for name in segments.names():
            segments.remove(name)
