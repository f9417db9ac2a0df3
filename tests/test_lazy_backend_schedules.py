"""Schedules beside everything else that a step may do: shared state, random numbers, checkpoints, autocast, exceptions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazy_backend
from lazy_backend import LazyScheduler, register_segments
from tests.device import DEVICE
from tests.towers import Tower, name_all, pair, same, train

pytestmark = pytest.mark.usefixtures("no_segments_left")


class Hazard(nn.Module):
    """Two parts that share ``state``, one of them writing it; the six cases of the public prototype's debug test."""

    def __init__(self, where: str, late_writes: bool) -> None:
        super().__init__()
        self.where, self.late_writes = where, late_writes
        self.layer = nn.Linear(6, 6)
        self.register_buffer("state", torch.ones(4, 6))

    def early(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if not self.late_writes:
            state.add_(1)
        return self.layer(x) * state

    def late(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if self.late_writes:
            state.mul_(2)
        return x.sin() + state.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.detach() * 1
        state = {"buffer": self.state, "global": GLOBAL[x.device.type], "input": given}[self.where]
        return self.early(x, state.detach()) + self.late(x, state)


GLOBAL: dict[str, torch.Tensor] = {}


@pytest.mark.parametrize("order", [["early", "late"], ["late", "early"]])
@pytest.mark.parametrize("late_writes", [True, False])
@pytest.mark.parametrize("where", ["buffer", "global", "input"])
def test_shared_state_that_is_written_keeps_eagers_numbers(where: str, late_writes: bool, order: list[str]) -> None:
    GLOBAL.update(cpu=torch.full((4, 6), 2.0), lazysched=torch.full((4, 6), 2.0).to(DEVICE))
    torch.manual_seed(0)
    truth = Hazard(where, late_writes)
    model = copy.deepcopy(truth).to(DEVICE)
    register_segments(model, {"early": "early", "late": "late"})
    with torch.no_grad():
        wanted = [truth(torch.arange(24.0).reshape(4, 6) / 10) for _ in range(3)]
        with LazyScheduler(schedule=order) as scheduler:
            got = [model((torch.arange(24.0).reshape(4, 6) / 10).to(DEVICE)) for _ in range(3)]
            lazy_backend.mark_step()
    same([*got, model.state, GLOBAL[DEVICE]], [*wanted, truth.state, GLOBAL["cpu"]])
    assert bool(scheduler.refusals()) == (order[0] == "late")


class Dropping(Tower):
    def func1(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.a(x), 0.5)

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.b(x), 0.3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's random numbers are not the CPU's")
def test_random_numbers_are_eagers_in_any_order() -> None:
    model, truth = pair(Dropping)
    name_all(model)
    with LazyScheduler(schedule=["two", "one", "one_bwd", "two_bwd"], strict=True, debug_mode=True) as scheduler:
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))
    assert scheduler.recorded_execution_order() == ["two", "one", "join", "one_bwd", "two_bwd"]


class Noisy(Tower):
    """The draws need what their segments compute."""

    def func1(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + torch.bernoulli(self.a(x).sigmoid())

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x) * torch.bernoulli(self.b(x).sigmoid())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's random numbers are not the CPU's")
def test_draws_that_cannot_wait_alone_are_refused() -> None:
    model, truth = pair(Noisy)
    name_all(model)
    with LazyScheduler(schedule=["two", "one"]) as scheduler:
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))
    assert "both draw random numbers" in scheduler.report()
    assert scheduler.recorded_execution_order()[:2] == ["one", "two"]


class Checkpointed(Tower):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = checkpoint(self.func1, x, use_reentrant=self.reentrant)
        return self.join(one, checkpoint(self.func2, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_belongs_to_its_backward(reentrant: bool) -> None:
    model, truth = pair(Checkpointed)
    model.reentrant = truth.reentrant = reentrant
    name_all(model)
    with LazyScheduler(schedule=["two", "one"], strict=True) as scheduler:
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))
    assert scheduler.recorded_execution_order() == ["two", "one", "join", "two_bwd", "one_bwd"]


class CheckpointedDropping(Checkpointed, Dropping):
    pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's random numbers are not the CPU's")
def test_checkpointed_layers_draw_eagers_numbers_in_any_order() -> None:
    model, truth = pair(CheckpointedDropping)
    name_all(model)
    with LazyScheduler(schedule=["two", "one"], strict=True, debug_mode=True) as scheduler:
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))
    assert scheduler.recorded_execution_order() == ["two", "one", "join", "two_bwd", "one_bwd"]


def test_gradient_accumulation_and_autocast() -> None:
    model, truth = pair(Tower)
    name_all(model)

    def run(model: nn.Module, device: str) -> list[torch.Tensor]:
        for part in range(2):
            with torch.autocast(device, torch.bfloat16):
                loss = model(torch.full((4, 6), part + 0.5).to(device)).float().sum()
            loss.backward()
        return [p.grad for p in model.parameters()]

    with LazyScheduler(schedule=["two", "one", "one_bwd", "two_bwd"], strict=True) as scheduler:
        got = run(model, DEVICE)
    torch.testing.assert_close([g.cpu() for g in got], run(truth, "cpu"), rtol=2e-2, atol=2e-2)
    order = scheduler.recorded_execution_order()
    assert order.index("two") < order.index("one") and order.index("two#1") < order.index("one#1")


class Failing(Tower):
    fails = False

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        kept.append(self.b(x))
        if self.fails:
            raise KeyError("a mistake in a segment")
        return kept[-1].tanh()


kept: list[torch.Tensor] = []


def test_an_exception_inside_a_segment_leaves_what_was_recorded() -> None:
    model, truth = pair(Failing)
    name_all(model)
    model.fails = truth.fails = True
    x = torch.ones(4, 6)
    for one, place in ((truth, "cpu"), (model, DEVICE)):
        with pytest.raises(KeyError, match="a mistake"), LazyScheduler(schedule=["two", "one"]):
            one(x.to(place))
    torch.testing.assert_close(kept[1].cpu(), kept[0])
    model.fails = truth.fails = False
    with LazyScheduler(schedule=["two", "one"], strict=True) as scheduler:
        got = train(model, DEVICE)
    same(got, train(truth, "cpu"))
    assert scheduler.recorded_execution_order()[:2] == ["two", "one"]
