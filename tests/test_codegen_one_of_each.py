"""Elements that are gathered one from each row, and their gradients, belong to the kernels of the rows."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
from graphs import check, kernels, record

from codegen.fuse import plan
from ir_nodes import settings

Tensor = torch.Tensor


def logits(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def tokens(count: int, *size: int) -> Tensor:
    return torch.randint(count, size, generator=torch.Generator().manual_seed(2))


def chances(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of chosen tokens, summed over each sequence before anything is made of them, and their gradient."""
    x = x.detach().requires_grad_()
    taken = x.log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)
    loss = -torch.tanh(taken.sum(-1)).sum()
    return taken.detach(), torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("size", [(2, 5, 40), (3, 4, 33), (2, 3, 300)], ids=str)
def test_chances_of_chosen_tokens_take_two_walks(size: tuple[int, int, int]) -> None:
    made = check(chances, logits(*size), tokens(size[-1], *size[:-1]), rtol=1e-5, atol=1e-6)
    full = size[0] * size[1] * size[2] * 4
    large = [value for step in kernels(made) for value in (*step.reads, *step.writes) if step.bytes_of(value) >= full]
    assert len(large) == 3, "the logits are read twice and their gradient is written"


def test_extremes_along_rows_have_gradients_that_are_chosen() -> None:
    def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        values = x.min(1).values
        return values.detach(), torch.autograd.grad(values.square().sum(), x)[0]

    made = check(extremes, logits(6, 19, 5))
    assert not any("atomic" in step.kernel.source for step in kernels(made))


@pytest.mark.parametrize("program", [
    lambda x, i: torch.zeros_like(x).scatter(1, i[:, :1], x[:, :1]),
    lambda x, i: torch.zeros_like(x).scatter_add(1, i, x),
    lambda x, i: (x * 2).scatter(1, i[:, :1], x[:, :1]),
    lambda x, i: (x * 2).gather(0, i),
    lambda x, i: (x * 2).gather(1, i[:3, :1]),
    lambda x, i: (x * 2).gather(1, i[:, :1]).sum(),
    lambda x, i: [(x * 2).gather(1, i[:, :1]), torch.zeros_like(x).scatter_add(1, i[:, :1], x[:, :1] + 1)],
    lambda x, i: [(x * 2).gather(1, i[:, :1]), torch.zeros(7, 7, dtype=torch.bool).scatter(1, i[:, :1], x[:, :1] > 0)],
    lambda x, i: [x.sigmoid().gather(0, i[:1]), torch.zeros_like(x).scatter(0, i[:1], x[:1] + 1)],
])  # fmt: skip
def test_others_are_what_they_were(program: Callable[[Tensor, Tensor], Tensor | list[Tensor]]) -> None:
    check(program, logits(7, 7), tokens(7, 7, 7))


def test_only_where_somebody_has_looked_whether_indices_are_in_range() -> None:
    def put(x: Tensor, i: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(1, i, x[:, :1] + 1)

    def after_a_look(x: Tensor, i: Tensor) -> list[Tensor]:
        return [(x + 1).gather(1, i), put(x, i)]

    inputs = logits(6, 9), tokens(9, 6, 1)
    stores = [sum("atomic" in step.kernel.source for step in kernels(check(program, *inputs))) for program in (put, after_a_look)]
    assert stores == [1, 0]
    with settings.override(check_indices=False):
        assert not any("atomic" in step.kernel.source for step in kernels(check(put, *inputs)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_one_hot_rows_are_a_choice(dtype: torch.dtype) -> None:
    def program(x: Tensor, i: Tensor) -> Tensor:
        marked = torch.zeros(x.shape, dtype=dtype, device=x.device).scatter_(-1, i, 1)
        return torch.where(marked.bool(), x * 2, x).softmax(-1)

    check(program, torch.randn(6, 9), torch.randint(0, 9, (6, 1)), count=1, rtol=1e-5, atol=1e-5)
    check(lambda i: torch.zeros(6, 9, dtype=dtype).scatter_(0, i.t(), 1), torch.randint(0, 6, (9, 1)), count=1)


def test_one_hot_rows_stop_at_an_index_out_of_range() -> None:
    recording, _ = record(lambda i: torch.zeros(6, 9).scatter_(-1, i, 1.0), torch.randint(0, 9, (6, 1)))
    (step,) = kernels(plan(recording.graph))
    assert 'tl.device_assert(((t0 >= 0) & (t0 < s0)), "aten::scatter_.value: an index is out of range"' in step.kernel.source
