"""Schedule hooks end to end: asked once for each new recording, numbers right whatever they answer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import lazy_backend
from lazy_backend import (
    LazyScheduler,
    Recorded,
    ScheduleError,
    earliest,
    latest,
    min_peak_memory,
    overlap_communication,
    register_schedule_hook,
    segment,
)
from tests import ranks
from tests.device import DEVICE, ON_GPU
from tests.towers import Tower, name_all, pair, same, train

pytestmark = pytest.mark.usefixtures("no_segments_left")


def swap(recorded: Recorded) -> list[tuple[str, str]]:
    return [("two", "one")] if any(one.name == "two" for one in recorded.segments) else []


def test_a_hook_orders_every_recording_until_it_is_removed() -> None:
    model, truth = pair(Tower)
    name_all(model)
    wanted = train(truth, "cpu")
    compiles = []
    for hooked in (True, False, True, False):
        handle = register_schedule_hook(swap) if hooked else None
        with LazyScheduler() as scheduler:
            same(train(model, DEVICE), wanted) if not compiles else train(model, DEVICE)
        assert scheduler.recorded_execution_order()[:2] == (["two", "one"] if hooked else ["one", "two"])
        if handle is not None:
            handle.remove()
        compiles.append(lazy_backend.stats()["compiles"])
    assert compiles[3] == compiles[1], "programs compiled with and without the hook are both kept"


def test_a_scheduler_has_hooks_of_its_own() -> None:
    model, truth = pair(Tower)
    name_all(model)
    with LazyScheduler(hooks=[swap]) as scheduler:
        got = train(model, DEVICE)
    assert scheduler.recorded_execution_order()[:2] == ["two", "one"] and scheduler.refusals() == []
    same(got, train(truth, "cpu"))
    with LazyScheduler() as other:
        train(model, DEVICE)
    assert other.recorded_execution_order()[:2] == ["one", "two"]


@pytest.mark.parametrize("hook", [earliest, latest, min_peak_memory])
def test_the_hooks_that_come_with_it_keep_the_numbers(hook: lazy_backend.orders.Ask) -> None:
    model, truth = pair(Tower)
    name_all(model)
    with LazyScheduler(hooks=[hook], strict=True):
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))


class Wide(nn.Module):
    """Makes everything large first, and then small."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        large, small = [], []
        for number in range(6):
            with segment(f"make{number}"):
                large.append((x + number).sin())
        while large:
            with segment(f"use{len(large)}"):
                small.append(large.pop(0).sum())
        return small


def peak(*hooks: lazy_backend.orders.Ask) -> tuple[int, list[torch.Tensor]]:
    x = torch.linspace(0, 1, 2**18).to(DEVICE)
    lazy_backend.mark_step()
    with torch.no_grad(), LazyScheduler(hooks=hooks, strict=True):
        small = Wide()(x)
        torch.lazysched.reset_peak_memory_stats()
        before = torch.lazysched.memory_allocated()
        lazy_backend.mark_step()
    return torch.lazysched.max_memory_allocated() - before, small


@pytest.mark.skipif(ON_GPU, reason="a kernel there makes what is large and sums it, so nothing large is held")
def test_less_memory_is_held_on_the_device_too() -> None:
    large = 4 * 2**18
    recorded, wanted = peak()
    spared, got = peak(min_peak_memory)
    same(got, [one.cpu() for one in wanted])
    assert recorded >= 6 * large and spared <= 2 * large + 4096, (recorded, spared)


def fails(recorded: Recorded) -> list[tuple[str, str]]:
    raise KeyError("no such layer")


def test_a_hook_that_fails_is_named_and_costs_nothing() -> None:
    model, truth = pair(Tower)
    name_all(model)
    with pytest.warns(RuntimeWarning, match="hook fails at .*raised KeyError: 'no such layer' at") as caught:
        with LazyScheduler(schedule=["two", "one"], hooks=[fails]) as scheduler:
            got = train(model, DEVICE)
    assert {warning.filename for warning in caught if "fails" in str(warning.message)} == {train.__code__.co_filename}
    assert scheduler.recorded_execution_order()[:2] == ["two", "one"] and "no such layer" in scheduler.report()
    same(got, train(truth, "cpu"))
    with pytest.raises(ScheduleError, match="no such layer"), LazyScheduler(hooks=[fails], strict=True):
        train(model, DEVICE)


def test_a_hook_that_reads_a_tensor_does_not_hang() -> None:
    model, truth = pair(Tower)
    name_all(model)
    weight = model.head.weight

    def looks(recorded: Recorded) -> list[tuple[str, str]]:
        return [("two", "one")] if weight.sum().item() > 0 else []

    with pytest.warns(RuntimeWarning, match="a schedule hook can't use the device's tensors"), LazyScheduler(hooks=[looks]):
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))


def test_a_hook_that_ends_the_step_does_not_hang() -> None:
    model, truth = pair(Tower)
    name_all(model)

    def ends(recorded: Recorded) -> None:
        lazy_backend.mark_step()

    with pytest.warns(RuntimeWarning, match=r"lazy_backend.mark_step\(\) in a schedule hook"), LazyScheduler(hooks=[ends]):
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="a schedule hook is a function of the recorded segments, got 'latest'"):
        register_schedule_hook("latest")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a schedule hook is a function"):
        LazyScheduler(hooks=["latest"])  # type: ignore[list-item]


def talk() -> None:
    """Two ranks: the collective is recorded last, needs nothing, and its reader comes right behind it."""
    rank = torch.distributed.get_rank()
    x = torch.full((512, 512), rank + 1.0).to(DEVICE)
    weight = torch.eye(512).to(DEVICE)
    lazy_backend.mark_step()
    with LazyScheduler(hooks=[overlap_communication], strict=True, debug_mode=True, measure=True) as scheduler:
        y = x
        with segment("layers"):
            for _ in range(4):
                y = y @ weight
        with segment("sdd"):
            table = x * 2
            torch.distributed.all_reduce(table)
        z = table + y
    assert scheduler.recorded_execution_order() == ["sdd", "layers"], scheduler.report()
    assert (z.cpu() == 6 + rank + 1).all()
    told = scheduler.report(html="/dev/null")
    assert re.search(r"waited for communication: [\d.]+ [mu]?s, measured", told)
    assert "of it beside computation; in the recorded order 0%" in told and "compared with the program's order: 1 times" in told


def test_communication_is_overlapped_on_two_ranks() -> None:
    ranks.run(talk)
