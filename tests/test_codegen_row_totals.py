"""Sums of everything join the kernel of the rows that what they sum was made of."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, plan, record
from graphs import drawn as data
from torch import Tensor

from ir_nodes import settings


def divergence(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="batchmean", log_target=True)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "divergence": divergence,
    "entropy": lambda x, y: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
    "of probabilities": lambda x, y: F.cross_entropy(x, y.softmax(-1)),
    "mean of a norm": lambda x, y: (F.layer_norm(x, x.shape[-1:]) * y).mean(),
    "length": lambda x, y: (x - x.mean(-1, keepdim=True)).norm(),
    "largest": lambda x, y: (x - x.sum(1, keepdim=True)).amax(),
    "any": lambda x, y: (x > x.mean(-1, keepdim=True)).any(),
    "count": lambda x, y: (x > x.mean(-1, keepdim=True)).sum(),
    "and what is summed": lambda x, y: (x.softmax(-1), x.softmax(-1).square().sum()),
    "two": lambda x, y: (x.softmax(-1).square().sum(), (y * x.softmax(-1)).mean()),
    "with what rows have": lambda x, y: ((x.amax(1, keepdim=True) - x) * y.sum(1, keepdim=True)).sum() * 2 + 1,
}


def one_pass(program: Callable[..., Any], *inputs: Tensor) -> bool:
    """Is all that touches more than a number of each row one kernel?"""
    made = kernels(plan(record(program, *inputs)[0].graph))
    large = [step for step in made if any(step.bytes_of(value) > inputs[0].numel() // 2 for value in (*step.reads, *step.writes))]
    return len(large) == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_and_all_of_them_are_reduced_in_one_pass(name: str) -> None:
    inputs = data(4096, 512), data(4096, 512)
    assert one_pass(PROGRAMS[name], *inputs)
    with settings.override(disable=frozenset({"row_totals"})):
        assert not one_pass(PROGRAMS[name], *inputs)


@pytest.mark.parametrize("size", [(33, 50), (7, 1025), (3, 5, 64), (40, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers(name: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    near = 2e-2 if dtype is torch.bfloat16 else 1e-4
    check(PROGRAMS[name], data(*size, dtype=dtype), data(*size, dtype=dtype), rtol=near, atol=near)


def test_losses_at_two_temperatures_share_the_kernel_that_reads_the_logits() -> None:
    """A mean's gradient waits for the sum of weights, which does not move up with the totals that it has to do with."""
    def distilled(x: Tensor, teacher: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        soft = F.kl_div((x / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
        loss = F.cross_entropy(x, target) + 4 * soft
        return loss.detach(), *torch.autograd.grad(loss, x)

    inputs = data(1024, 1000), data(1024, 1000), torch.arange(1024) % 1000
    assert one_pass(distilled, *inputs)
    check(distilled, *(one[:40] for one in inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program", [
    lambda x: x.square().sum(),  # no rows
    lambda x: (x - x.mean(0)).square().sum(),  # columns
])  # fmt: skip
def test_other_sums_stay_as_they_are(program: Callable[..., Any]) -> None:
    x = data(300, 200)
    with settings.override(disable=frozenset({"row_totals"})):
        plain = [step.kernel.source for step in kernels(plan(record(program, x)[0].graph))]
    assert [step.kernel.source for step in kernels(plan(record(program, x)[0].graph))] == plain
    check(program, x, rtol=1e-4, atol=1e-4)


def test_rows_too_short_to_count() -> None:
    assert not one_pass(lambda x: x.softmax(-1).square().sum(), data(1 << 14, 8))


def test_sums_of_everything_follow_rows_that_have_a_number_each() -> None:
    """No element's row is divided for."""
    def factored(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return (rows[:, None] * columns * x).square().mean().sqrt()

    (first, *_) = kernels(plan(record(factored, data(600, 4096), data(600), data(4096))[0].graph))
    assert "d1" not in first.kernel.source and first.grid[0] == 600
    check(factored, data(33, 70), data(33), data(70), rtol=1e-4, atol=1e-5)
    short = plan(record(factored, data(6000, 40), data(6000), data(40))[0].graph)
    assert kernels(short)[0].grid[0] < 6000
