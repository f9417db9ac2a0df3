"""Replayed steps follow learning rates, and other numbers of optimizers, that schedules change between them, bit by bit."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from replays import refusals
from torch import Tensor, nn
from torch.optim import lr_scheduler

import lazy_backend
from lazy_backend.rates import Formula, changed, follow, values
from lazy_backend.returned import Refused
from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("nothing_pending")
STEPS, FIRST = 14, 3

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda some: torch.optim.AdamW(some, 1e-2, capturable=True),
    "fused adamw": lambda some: torch.optim.AdamW(some, 1e-2, fused=True),
    "adam with decay": lambda some: torch.optim.Adam(some, 1e-2, weight_decay=0.1, capturable=True),
    "sgd": lambda some: torch.optim.SGD(some, 0.1, momentum=0.9, weight_decay=1e-3),
    "nadam": lambda some: torch.optim.NAdam(some, 1e-2, capturable=True),
    "rmsprop": lambda some: torch.optim.RMSprop(some, 1e-2, momentum=0.5, capturable=True),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda of: lr_scheduler.CosineAnnealingLR(of, 20),
    "from 0": lambda of: lr_scheduler.LambdaLR(of, lambda step: min(1.0, step / 6)),
    "momentum, too": lambda of: lr_scheduler.OneCycleLR(of, 0.05, 20),
    "at times": lambda of: lr_scheduler.StepLR(of, 5),
}


class Mine(torch.optim.SGD):
    """What it computes of its numbers nobody knows."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override, unused-ignore]
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad, alpha=max(group["lr"], 0.08))


def train(optimizer: Make, schedule: Callable[[torch.optim.Optimizer], Any], replays: bool) -> tuple[list[float], int]:
    """The losses of `STEPS` steps, and how often Python ran one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(DEVICE)
    learner = optimizer(list(model.parameters()))
    changes, x, runs = schedule(learner), torch.linspace(-1, 1, 40).view(5, 8).to(DEVICE), 0

    def step() -> Tensor:
        nonlocal runs
        runs += 1
        learner.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        learner.step()
        return loss.detach()

    run = lazy_backend.replayed(step) if replays else step
    losses = []
    for _ in range(STEPS):
        losses.append(run())
        lazy_backend.mark_step()
        changes.step()
    return [loss.item() for loss in losses], runs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replays_follow_a_schedule(optimizer: str, schedule: str) -> None:
    before = refusals()
    wanted, _ = train(OPTIMIZERS[optimizer], SCHEDULES[schedule], False)
    losses, runs = train(OPTIMIZERS[optimizer], SCHEDULES[schedule], True)
    assert losses == wanted
    assert runs == FIRST if schedule != "at times" else runs < STEPS - 4
    assert refusals() == before


def test_nothing_is_compiled_for_a_rate() -> None:
    train(OPTIMIZERS["adamw"], SCHEDULES["cosine"], True)
    before = lazy_backend.stats()["compiles"]
    train(OPTIMIZERS["adamw"], SCHEDULES["cosine"], True)
    assert lazy_backend.stats()["compiles"] == before


def test_groups_whose_equal_rates_part_are_recorded_anew() -> None:
    def groups(some: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one], "weight_decay": 0.1 * place} for place, one in enumerate(some)], 0.1)

    def parting(of: torch.optim.Optimizer) -> Any:
        parts = [lambda step, place=place: 0.9 ** (step + max(0, step - 7) * place) for place in range(4)]
        return lr_scheduler.LambdaLR(of, parts)

    wanted, _ = train(groups, parting, False)
    before = refusals()
    losses, runs = train(groups, parting, True)
    assert losses == wanted and FIRST < runs < STEPS
    assert [name for name, count in refusals().items() if count > before.get(name, 0)] == [
        "ReplayRefused: optimizers' numbers that were equal differ now"]


def test_of_other_optimizers_no_number_is_followed() -> None:
    """A number that is the same twice may be another one later."""
    schedule = lambda of: lr_scheduler.LambdaLR(of, lambda step: 1.0 if step > 6 else 0.1 + 0.01 * step)  # noqa: E731
    mine: Make = lambda some: Mine(some, 0.1)  # noqa: E731
    wanted, _ = train(mine, schedule, False)
    losses, _ = train(mine, schedule, True)
    assert losses == wanted


def test_a_momentum_that_goes_is_another_formula() -> None:
    """Without it the old one is kept as it was, for when it comes back."""
    def momenta(of: torch.optim.Optimizer) -> Any:
        class Momenta:
            now = 0

            def step(self) -> None:
                self.now += 1
                of.param_groups[0]["momentum"] = 0.0 if self.now in (7, 8) else 0.9 - 0.01 * self.now

        return Momenta()

    sgd: Make = lambda some: torch.optim.SGD(some, 0.1, momentum=0.9)  # noqa: E731
    wanted, _ = train(sgd, momenta, False)
    losses, runs = train(sgd, momenta, True)
    assert losses == wanted and FIRST < runs < STEPS


NAMES = ["0.0 lr", "0.0 betas", "0.0 weight_decay", "0.0 eps", ""]


def test_formulas_that_give_both_values() -> None:
    before, now = [0.5, (0.9, 0.99), 0.1, 1e-8, 3.0], [0.25, (0.8, 0.99), 0.1, 1e-8, 4.0]
    assert changed(before, now, NAMES) == {0, 1}
    old = [0.5, -0.5, 1 - 0.5 * 0.1, 0.9, 1 - 0.9, 0.99, 7.0, 0.5]
    new = [0.25, -0.25, 1 - 0.25 * 0.1, 0.8, 1 - 0.8, 0.99, 8.0, 0.5]
    follows = follow(old, new, before, now, NAMES)
    assert [indices for indices, _ in follows] == [(0,), (1,), (2,), (3,), (4,)]
    assert follows[2][1] == (Formula("1 - lr * decay", 0, 0, 2),)
    later = [0.125, (0.7, 0.99), 0.1, 1e-8, 5.0]
    assert list(values(follows, later)) == [(0, 0.125), (1, -0.125), (2, 1 - 0.125 * 0.1), (3, 0.7), (4, 1 - 0.7)]
    with pytest.raises(Refused, match="no float"):
        list(values(follows, [torch.tensor(0.1), *later[1:]]))


def test_what_two_values_do_not_tell_is_refused() -> None:
    """Of such a rate 1 - lr * decay is 1, as other numbers are."""
    before, now = [1e-18, (0.9, 0.99), 0.1, 1e-8, 3.0], [2e-18, (0.9, 0.99), 0.1, 1e-8, 3.0]
    with pytest.raises(Refused, match="too small"):
        follow([1e-18, 1.0], [2e-18, 1.0], before, now, NAMES)
    assert [indices for indices, _ in follow([1e-18, 2.0, 1e-18], [2e-18, 2.0, 2e-18], before, now, NAMES)] == [(0, 2)]
