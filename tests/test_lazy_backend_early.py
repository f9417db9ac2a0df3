"""Programs that begin while their recording is made: same numbers as eager mode's, whatever the recording becomes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch
import torch._lazy.metrics as metrics
from torch import Tensor, nn

import lazy_backend
from codegen import early as early_module
from codegen import executable
from ir_nodes import settings
from lazy_backend import core

Losses = list[float]


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    with settings.override(start_early="always"):
        core.configure(core.get())
        yield
    core.configure(core.get())


def seed(device: str) -> None:
    torch.manual_seed(5)
    if device == "lazysched":
        torch.lazysched.manual_seed(5)


def gained(name: str, action: Callable[[], Any]) -> int:
    before = lazy_backend.stats()[name]
    action()
    return lazy_backend.stats()[name] - before


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(width), nn.Linear(width, 6))


def convolutions(width: int) -> nn.Module:
    """Without biases: before a batch norm their gradients are rounding errors, which Adam makes large."""
    first, second = nn.Conv2d(3, width, 3, bias=False), nn.Conv2d(width, width, 3, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2), second, nn.BatchNorm2d(width), nn.Flatten(),
                         nn.Linear(width * 16, 6))  # fmt: skip


Change = Callable[[int, nn.Module, Tensor, Tensor, Losses], Tensor]


def trained(device: str, model: nn.Module, shape: tuple[int, ...], change: Change, steps: int = 14) -> Losses:
    """What a training loop reads, that reads its loss at every step; ``change`` may make of the loss what it likes."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    seen: Losses = []
    seed(device)
    for step in range(steps):
        batch = torch.randn(8, *shape, generator=generator).to(device)
        classes = torch.randint(6, (8,), generator=generator).to(device)
        optimizer.zero_grad()
        output = model(batch)
        loss = change(step, model, output, nn.functional.cross_entropy(output, classes), seen)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen + [parameter.sum().item() for parameter in model.state_dict().values()]


def steady(step: int, model: nn.Module, output: Tensor, loss: Tensor, seen: Losses) -> Tensor:
    return loss


def another_program_at_times(step: int, model: nn.Module, output: Tensor, loss: Tensor, seen: Losses) -> Tensor:
    return loss + output.square().mean() if step % 5 == 4 else loss


def a_number_that_changes(step: int, model: nn.Module, output: Tensor, loss: Tensor, seen: Losses) -> Tensor:
    return loss * (1.0 + step / 8)


def reads_in_between(step: int, model: nn.Module, output: Tensor, loss: Tensor, seen: Losses) -> Tensor:
    """A state that the recorded part has written, or a value of it, is read before the rest is recorded."""
    if step % 4 == 3:
        seen.append(sum(buffer.sum().item() for buffer in model.buffers()))
    if step % 4 == 1:
        seen.append(output.sum().item())
    return loss


def draws_in_between(step: int, model: nn.Module, output: Tensor, loss: Tensor, seen: Losses) -> Tensor:
    if step % 3 == 2:
        seen.append(torch.rand(4, device=output.device).sum().item())
    return loss


def evaluates(step: int, model: nn.Module, output: Tensor, loss: Tensor, seen: Losses) -> Tensor:
    if step % 6 == 5:
        model.eval()
        with torch.no_grad():
            seen.append(model(torch.ones_like(output).repeat(1, 3)[:, :16].contiguous()).sum().item())
        model.train()
    return loss


CHANGES = (steady, another_program_at_times, a_number_that_changes, reads_in_between, draws_in_between)


@pytest.mark.parametrize("change", (*CHANGES, evaluates))
def test_perceptron_trains_as_in_eager_mode(change: Any) -> None:
    check(lambda: perceptron(24 + len(change.__name__)), (16,), change)


@pytest.mark.parametrize("change", CHANGES)
def test_batch_norms_train_as_in_eager_mode(change: Any) -> None:
    """Their running statistics are written early, and what they held comes back where the recording becomes another one."""
    check(lambda: convolutions(2 + len(change.__name__) % 8), (3, 8, 8), change)


def check(build: Callable[[], nn.Module], shape: tuple[int, ...], change: Any) -> None:
    torch.manual_seed(0)
    theirs = build()
    ours = build()
    ours.load_state_dict(theirs.state_dict())
    expected = trained(core.physical_device(0).type, theirs, shape, change)
    found: Losses = []
    assert gained("early_starts", lambda: found.extend(trained("lazysched", ours, shape, change))) > 4
    # On a GPU kernels add in another order, which fourteen steps of training make larger.
    near = {"rtol": 1e-5, "atol": 1e-6} if not core.physical_is_cuda() else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **near)


def test_what_becomes_another_recording_is_counted() -> None:
    model = perceptron(23)
    assert gained("early_in_vain", lambda: trained("lazysched", model, (16,), another_program_at_times)) > 0
    model = perceptron(22)
    assert gained("early_in_vain", lambda: trained("lazysched", model, (16,), steady)) == 0


def test_a_loop_that_never_waits_is_not_begun_early() -> None:
    with settings.override(start_early="auto"):
        core.configure(core.get())
        assert gained("early_starts", lambda: trained("lazysched", perceptron(21), (16,), steady)) == 0


def test_an_order_that_somebody_may_ask_for_is_kept() -> None:
    """Programs with segments, or with collectives, run in their own order only."""

    def in_a_segment(step: int, model: nn.Module, output: Tensor, loss: Tensor, seen: Losses) -> Tensor:
        with lazy_backend.segment("weighted"):
            return loss * 1.5

    assert gained("early_starts", lambda: trained("lazysched", perceptron(19), (16,), in_a_segment)) == 0
    assert metrics.counter_value("StartEarlyRefused: segments, schedules and collectives keep their order")


def test_never_makes_no_cuts() -> None:
    with settings.override(start_early="never"):
        assert gained("early_starts", lambda: trained("lazysched", perceptron(20), (16,), steady)) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="an index out of range ends CUDA's context, in eager mode too")
def test_an_error_comes_where_the_recording_runs() -> None:
    """What fails early fails again at the barrier, with the line that recorded it; what follows works."""
    table = nn.Embedding(7, 5).to("lazysched")

    def look_up(index: int) -> float:
        found = table(torch.tensor([index, 1, 2], device="lazysched"))
        for _ in range(6):
            found = found * 1.5 + 0.25
        lazy_backend.mark_step()
        return float(found.sum().item())

    first = [look_up(3) for _ in range(4)]
    assert gained("early_starts", lambda: look_up(3)) > 0
    with pytest.raises(IndexError, match="out of range"):
        look_up(7)
    assert look_up(3) == first[0]


def test_a_wrong_guess_is_not_used_and_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that took a number before it was recorded: where that is another one this time, its results are dropped."""
    made: list[early_module.Cut] = []

    def guessing(*given: Any) -> tuple[list[early_module.Cut], str]:
        found, why = early_module.cuts(*given)
        made.extend(found)
        return [early_module.Cut(cut.ops, cut.steps, cut.saves, (0, 1) if cut.steps else ()) for cut in found], why

    monkeypatch.setattr(executable, "cuts", guessing)

    def run(factor: float) -> float:
        x = torch.ones(31, device="lazysched") * factor
        for _ in range(6):
            x = torch.sin(x)
        lazy_backend.mark_step()
        return float(x.sum().item())

    for _ in range(3):
        run(2.0)
    assert made and gained("early_starts", lambda: run(2.0)) > 0
    expected = torch.full((31,), 3.0)
    for _ in range(6):
        expected = torch.sin(expected)
    before = lazy_backend.stats()
    assert run(3.0) == pytest.approx(expected.sum().item())
    after = lazy_backend.stats()
    assert after["early_in_vain"] - before["early_in_vain"] == 1
    assert gained("early_starts", lambda: run(3.0)) == 0


def test_cuts_lie_apart_and_leave_out_what_cannot_be_undone() -> None:
    assert early_module.chosen([5]) == [5]
    places = early_module.chosen(list(range(1, 200)))
    assert len(places) == len(early_module.PLACES) + 1 and places[-1] == 199 and places[0] == 1
    assert places[1] < 5, "the device waits until the first"
