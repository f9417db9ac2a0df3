"""Whole training steps, replayed: bit for bit what they are without it, whatever the user changes between two steps."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
import torch._lazy
from torch import Tensor

import lazy_backend
from ir_nodes import BufferKind, Graph
from lazy_backend import core, flush
from tests.replays import DEVICE, Trainer, adamw, inputs, new_refusals, sgd, started  # noqa: F401 (a fixture)


@pytest.mark.parametrize("make", [adamw(capturable=True), adamw(fused=True), sgd], ids=["capturable", "fused", "sgd"])
def test_a_whole_training_step(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    plain, again = Trainer(DEVICE, make), Trainer(DEVICE, make)
    step = lazy_backend.replayed(again.step)
    for x, y in zip(inputs(DEVICE, 9), reversed(inputs(DEVICE, 9))):
        assert torch.equal(step(x, y).cpu(), plain.step(x, y).cpu())
    wanted, found = plain.everything(), again.everything()
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert again.runs == 3 and plain.runs == 9
    # What was left can be used as after a call: by autograd, by the optimizer, by state dicts.
    (x,) = inputs(DEVICE, 1)
    for one in (plain, again):
        one.model(x).sum().backward()
        one.optimizer.step()
    for name, value in plain.everything().items():
        assert torch.equal(again.everything()[name], value), name


def test_dropout_in_a_training_step_draws_as_without_replays() -> None:
    losses = []
    for wrap in (False, True):
        one = Trainer(DEVICE, adamw(capturable=True), dropout=0.5)
        step = lazy_backend.replayed(one.step) if wrap else one.step
        torch.manual_seed(5)
        losses.append([step(x, x).item() for x in inputs(DEVICE, 7)])
    assert losses[0] == losses[1]


def test_a_learning_rate_that_changes_is_recorded_anew() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)
    step = lazy_backend.replayed(again.step)
    for number, x in enumerate(inputs(DEVICE, 12)):
        if number == 6:
            for one in (plain, again):
                one.optimizer.param_groups[0]["lr"] = 0.01
        assert step(x, x).item() == plain.step(x, x).item()
    assert again.runs == 5


def test_a_tensor_learning_rate_may_change_at_every_step() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2, device=DEVICE), capturable=True)

    plain, again = Trainer(DEVICE, make), Trainer(DEVICE, make)
    step = lazy_backend.replayed(again.step)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one.optimizer, 0.5) for one in (plain, again)]
    for x in inputs(DEVICE, 8):
        assert step(x, x).item() == plain.step(x, x).item()
        for schedule in schedules:
            schedule.step()
    assert again.runs == 3


def test_modes_and_frozen_parameters_are_noticed() -> None:
    plain, again = Trainer(DEVICE, sgd, dropout=0.3), Trainer(DEVICE, sgd, dropout=0.3)
    step = lazy_backend.replayed(again.step)

    def change(number: int, one: Trainer) -> None:
        if number == 4:
            one.model.eval()
        if number == 9:
            one.model[0].requires_grad_(False)
            one.model[0].weight.grad = None

    found, wanted = [], []
    for losses, one, run in ((found, again, step), (wanted, plain, plain.step)):
        torch.manual_seed(2)
        for number, x in enumerate(inputs(DEVICE, 14)):
            change(number, one)
            losses.append(run(x, x).item())
    assert found == wanted
    for name, value in plain.everything().items():
        assert torch.equal(again.everything()[name], value), name


def test_gradients_cleared_outside_run_as_always() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)

    def step(one: Trainer, x: Tensor) -> Tensor:
        one.runs += 1
        loss = one.model(x).square().mean()
        loss.backward()
        one.optimizer.step()
        return loss.detach()

    wrapped = lazy_backend.replayed(lambda x: step(again, x))
    told = []
    with pytest.warns(RuntimeWarning, match=r"not replayed: .*zero_grad\(\) inside"):
        for x in inputs(DEVICE, 10):
            for one in (plain, again):
                one.optimizer.zero_grad()
            told.append(new_refusals(wrapped, x))
            step(plain, x)
            for name, value in plain.everything().items():
                assert torch.equal(again.everything()[name], value), name
    assert again.runs == 10 and any("zero_grad() inside" in one for one in told)


def test_accumulated_gradients() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)

    def half(one: Trainer, x: Tensor) -> Tensor:
        loss = one.model(x).square().mean()
        loss.backward()
        return loss.detach()

    wrapped = lazy_backend.replayed(lambda x: half(again, x))
    for number, x in enumerate(inputs(DEVICE, 16)):
        assert wrapped(x).item() == half(plain, x).item()
        if number % 4 == 3:
            for one in (plain, again):
                one.optimizer.step()
                one.optimizer.zero_grad(set_to_none=False)
    for name, value in plain.everything().items():
        assert torch.equal(again.everything()[name], value), name


def test_the_step_ends_where_the_optimizers_did() -> None:
    one = Trainer(DEVICE, sgd)
    step = lazy_backend.replayed(one.step)
    counts = []
    for x in inputs(DEVICE, 6):
        before = lazy_backend.stats()["flushes"]
        step(x, x)
        counts.append(lazy_backend.stats()["flushes"] - before)
    assert counts[-1] == 1


@pytest.mark.parametrize("mark", [lazy_backend.mark_step, torch._lazy.mark_step, lambda: torch._lazy.mark_step(DEVICE)])
def test_a_step_that_is_marked_inside_ends_with_the_call(mark: Callable[[], None]) -> None:
    runs = []

    def step(x: Tensor) -> Tensor:
        runs.append(1)
        y = x * 2
        mark()
        return y + 1

    wrapped = lazy_backend.replayed(step)
    for x in inputs(DEVICE, 6):
        before = lazy_backend.stats()["flushes"]
        found = wrapped(x)
        flushed = lazy_backend.stats()["flushes"] - before
        assert torch.equal(found.cpu(), x.cpu() * 2 + 1)
    assert len(runs) == 3 and flushed == 1


def test_state_dicts_that_are_loaded_are_used() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)
    step = lazy_backend.replayed(again.step)
    for number, x in enumerate(inputs(DEVICE, 12)):
        if number == 3:
            saved = [(copy.deepcopy(one.model.state_dict()), copy.deepcopy(one.optimizer.state_dict())) for one in (plain, again)]
        if number == 7:
            for one, (model, optimizer) in zip((plain, again), saved):
                one.model.load_state_dict(model)
                one.optimizer.load_state_dict(optimizer)
        assert step(x, x).item() == plain.step(x, x).item()


def test_an_optimizer_by_itself() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)
    update = lazy_backend.replayed(again.optimizer.step)
    for number, x in enumerate(inputs(DEVICE, 12)):
        for one in (plain, again):
            one.model(x).square().mean().backward()
            if number == 6:
                one.optimizer.param_groups[0]["lr"] = 0.01
        plain.optimizer.step()
        update()
        for one in (plain, again):
            one.optimizer.zero_grad(set_to_none=False)
    # On a GPU a kernel that sums a gradient may update its parameter, too, and split the sum otherwise than one that only sums.
    near = {"rtol": 1e-5, "atol": 1e-6} if core.physical_is_cuda() else {"rtol": 0.0, "atol": 0.0}
    for name, value in plain.everything().items():
        torch.testing.assert_close(again.everything()[name], value, **near, msg=name)


@pytest.mark.parametrize("behind", [True, False])
def test_gradients_that_are_dropped_in_the_step_never_reach_memory(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Graph] = []
    monkeypatch.setattr(flush, "watchers", [*flush.watchers, lambda graph, remarks: graphs.append(graph)])
    trainer = Trainer(DEVICE, adamw(fused=True))

    @lazy_backend.replayed
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = trainer.step(x, y)
        if behind:
            trainer.optimizer.zero_grad()
        return loss

    for x in inputs(DEVICE, 5):
        step(x, x)
    lazy_backend.wait_device_ops()
    parameters = list(trainer.model.parameters())
    left = [buffer for buffer in graphs[-1].buffers if buffer.live and buffer.kind is BufferKind.FRESH]
    assert len(left) == 1 + (0 if behind else len(parameters))  # the loss, and gradients where somebody holds them
    assert all((one.grad is None) == behind for one in parameters)
    assert trainer.runs == 3  # the others were replays
