"""`LazyScheduler(debug_mode=True)`: both orders on the same inputs, the real results untouched, a broken order named."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import barriers.order
import lazy_backend
from ir_nodes.estimate import Cost
from lazy_backend import LazyScheduler, ScheduleError
from lazy_backend.entered import segments
from tests import towers
from tests.device import DEVICE
from tests.towers import Tower, name_all, pair, same, train

pytestmark = pytest.mark.usefixtures("no_segments_left")


class Everything(Tower):
    """Random numbers, writes in place, through views too, a buffer that counts, complex numbers, an index."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def func1(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(self.a(x), 0.5).clone()
        y[:, 1:3].mul_(2)
        with torch.no_grad():
            self.seen.add_(y.detach().sum(0))
        return y + torch.fft.fft(x).conj().imag

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(x).t().contiguous().t() * 1.5
        return y.index_fill(0, torch.tensor([1], device=x.device), 0.5) + torch.tensor(0.25, dtype=torch.float64)


def run(model: nn.Module, **options: Any) -> tuple[list[torch.Tensor], LazyScheduler]:
    with LazyScheduler(schedule=["two", "one", "one_bwd", "two_bwd"], **options) as scheduler:
        found = train(model, DEVICE)
    return [*found, model.seen.clone(), torch.rand(3, device=DEVICE)], scheduler


def test_the_real_results_are_those_of_a_normal_run() -> None:
    model, _ = pair(Everything)
    twin = copy.deepcopy(model)
    name_all(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        checked, scheduler = run(model, debug_mode=True)
    assert "compared with the program's order: " in scheduler.report() and "cannot compare" not in scheduler.report()
    assert scheduler.recorded_execution_order()[:2] == ["two", "one"]
    for name in segments.names():
        segments.remove(name)
    name_all(twin)
    plain, _ = run(twin)
    for got, wanted in zip(checked, plain, strict=True):
        assert torch.equal(got.cpu(), wanted.cpu())


def too_early(before: list[list[int]], key: object, edges: object, costs: list[Cost] | None = None) -> list[int]:
    """An order in which a node runs before one that it needs."""
    first = next(position for position, others in enumerate(before) if others)
    order = [position for position in range(len(before)) if position != first]
    return [first, *order]


def test_a_broken_order_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair(Tower)
    name_all(model)
    x = torch.ones(4, 6, device=DEVICE)
    lazy_backend.mark_step()
    monkeypatch.setattr(barriers.order, "list_schedule", too_early)
    words = rf"first in segment one, `relu` float32\[4, 6\] at {towers.__file__}:\d+ in func1"
    with pytest.warns(RuntimeWarning, match=words), pytest.raises(ScheduleError, match=words), torch.no_grad():
        with LazyScheduler(schedule=["two", "one"], debug_mode=True):
            out = model(x)
    monkeypatch.undo()
    with torch.no_grad(), LazyScheduler(schedule=["one", "two"], debug_mode=True) as scheduler:
        out = model(x * 2)
    assert out.shape == (4, 2) and "compared" not in scheduler.report(), "nothing moved, so there is nothing to compare"


def test_memory_that_is_overwritten_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def late_reader(before: list[list[int]], key: object, edges: object, costs: list[Cost] | None = None) -> list[int]:
        return [2, 0, 1, *range(3, len(before))]

    monkeypatch.setattr(barriers.order, "list_schedule", late_reader)
    x = torch.ones(4, device=DEVICE)
    lazy_backend.mark_step()
    with pytest.warns(RuntimeWarning, match="`exp` float32"), pytest.raises(ScheduleError):
        with LazyScheduler(schedule=["b", "a"], debug_mode=True):
            with lazy_backend.segment("a"):
                y = x.exp()
            with lazy_backend.segment("b"):
                z = x.cos()
            x.zero_()
    assert y.shape == z.shape


def test_what_cannot_be_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*args: object) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr("lazy_backend.checks.first_difference", stops)
    model, truth = pair(Tower)
    name_all(model)
    with pytest.warns(RuntimeWarning, match="cannot compare the two orders: NotImplementedError: no kernel"):
        with LazyScheduler(schedule=["two", "one"], debug_mode=True):
            got = train(model, DEVICE)
    same(got, train(truth, "cpu"))
