"""Training loops: looking at the loss, barriers anywhere and step closures change no number."""

from __future__ import annotations

import threading
from typing import Callable, Iterator

import pytest
import torch
import torch._lazy
from torch import nn

import lazy_backend
from ir_nodes import settings
from tests.barrier_log import settle
from tests.device import CLOSE, DEVICE, ON_GPU

Pause = Callable[[int], None]


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    settle()
    yield
    lazy_backend.mark_step(wait=True)


def _losses(device: str, look_every: int, steps: int, pause: Pause = lambda step: None) -> tuple[list[float], torch.Tensor]:
    """Losses seen while training, and the last weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.linspace(-1, 1, 48).reshape(8, 6).to(device)
    y = (torch.arange(8) % 3).to(device)
    seen, total = [], torch.zeros((), device=device)
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if look_every and step % look_every == look_every - 1:
            seen.append(loss.item())
        pause(step)
    return [*seen, total.item()], model[0].weight.detach().cpu()


@pytest.mark.parametrize("look_every", [1, 10, 0], ids=["every step", "once in ten", "never"])
def test_looking_at_the_loss_changes_no_number_and_compiles_a_bounded_number_of_times(look_every: int) -> None:
    wanted, weight = _losses("cpu", look_every, 60)
    before = lazy_backend.stats()["compiles"]
    got, mine = _losses(DEVICE, look_every, 60)
    assert got == pytest.approx(wanted, rel=CLOSE)
    torch.testing.assert_close(mine, weight, rtol=CLOSE, atol=CLOSE if ON_GPU else CLOSE / 10)  # 60 steps add their roundings up
    assert lazy_backend.stats()["compiles"] - before <= 14


def test_explicit_barriers_anywhere_give_the_same_numbers() -> None:
    wanted, _ = _losses(DEVICE, 10, 20)
    with settings.override(auto_barrier=False):
        without, _ = _losses(DEVICE, 10, 20)
    got, _ = _losses(DEVICE, 10, 20, pause=lambda step: lazy_backend.mark_step() if step % 3 == 0 else None)
    if ON_GPU:  # where a recording ends decides which ops share a kernel, which rounds once
        wanted = pytest.approx(wanted, rel=CLOSE)
    assert got == wanted and without == wanted


def test_step_closures_run_after_the_step_that_recorded_what_they_read() -> None:
    x, seen = torch.ones(2, device=DEVICE), []
    y = x * 2
    torch._lazy.add_step_closure(lambda t: seen.append(t.tolist()), args=(y,))
    assert seen == []
    torch._lazy.mark_step()
    assert seen == [[2.0, 2.0]]
    torch._lazy.add_step_closure(lambda: seen.append("second"))
    lazy_backend.mark_step()
    assert seen[1:] == ["second"]


def test_step_closures_run_at_the_end_of_an_optimizer_step() -> None:
    model = nn.Linear(3, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 3, device=DEVICE)).sum()
    loss.backward()
    seen: list[float] = []
    torch._lazy.add_step_closure(lambda value: seen.append(value.item()), args=(loss.detach(),))
    optimizer.step()
    assert seen == [loss.item()]


def test_asynchronous_step_closures_run_in_their_own_thread() -> None:
    done, threads = threading.Event(), []
    y = torch.ones(2, device=DEVICE) * 4

    def closure(tensor: torch.Tensor) -> None:
        threads.append((threading.current_thread(), tensor.sum().item()))
        done.set()

    torch._lazy.add_step_closure(closure, args=(y,), run_async=True)
    torch._lazy.mark_step()
    assert done.wait(timeout=30)
    assert threads[0][1] == 8.0 and threads[0][0] is not threading.main_thread()
