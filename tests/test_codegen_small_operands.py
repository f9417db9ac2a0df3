"""Sums over operands that are small beside what they are combined to, and what loads and rows such kernels choose."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record

from codegen.fuse import plan
from codegen.tuning import Tuning

LOOPED = Tuning(persistent=16, looped=16, online=16, tile=64, column_tile=64, split_numel=1 << 40)


def data(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dim", [0, 1])
def test_small_operands_are_walked_as_most_of_them_lie_and_not_loaded_ahead(dim: int) -> None:
    def apart(x: torch.Tensor, codes: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return ((x[:, None] - codes[None]) * counts[..., None]).sum(dim)

    made = check(apart, data(96, 20), data(80, 20, seed=1), data(96, 80, seed=2), count=1, tuning=LOOPED, rtol=1e-4, atol=1e-4)
    source = kernels(made)[0].kernel.source
    assert "num_stages" not in source and "tl.range" in source
    assert "tl.reduce(t" in source and ", 0, _add" in source, "columns, whose neighbours are neighbours in memory"


def test_a_large_operand_is_loaded_ahead() -> None:
    made = check(lambda x: (x + 1).sum(0), data(96, 80), count=1, tuning=LOOPED, rtol=1e-4, atol=1e-4)
    assert "num_stages=" in kernels(made)[0].kernel.source


def variation(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 1:] - x[:, :-1]).abs().sum() + (x[..., 1:] - x[..., :-1]).abs().sum()


@pytest.mark.parametrize("side, walks", [(160, 2), (32, 1)])
def test_runs_and_rows_of_one_tensor_that_lie_off_one_another_are_summed_apart(side: int, walks: int) -> None:
    """Where the rows are so long that it matters."""
    x = data(3, side, side)
    recording, _ = record(variation, x)
    made = kernels(plan(recording.graph))
    assert sum(any(step.bytes_of(one) >= x.nbytes // 2 for one in step.reads) for step in made) == walks
    check(variation, x, rtol=1e-4, atol=1e-2)


def test_rows_that_are_walked_again_are_held_as_far_as_there_are_registers() -> None:
    """A loss of two rows of logits: 32,768 elements of both at once left each thread 896 bytes in memory."""
    def distilled(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        student = student.detach().requires_grad_()
        loss = F.kl_div(F.log_softmax(student.float() / 2, -1), F.softmax(teacher.float() / 2, -1), reduction="batchmean")
        return torch.autograd.grad(loss, student)[0]

    inputs = data(64, 32000, dtype=torch.bfloat16), data(64, 32000, seed=1, dtype=torch.bfloat16)
    recording, _ = record(distilled, *inputs)
    for step in kernels(plan(recording.graph)):
        assert dict(step.kernel.constexprs)["B1"] <= 512 * step.kernel.num_warps, step.kernel.name


def test_a_row_and_its_gradient_share_a_kernel_though_a_mean_waits_for_the_row() -> None:
    def cosine(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = a.detach().requires_grad_()
        loss = (1 - F.cosine_similarity(a, b, dim=-1)).mean()
        return loss.detach(), torch.autograd.grad(loss, a, grad)[0]

    made = check(cosine, data(40, 64), data(40, 64, seed=1), torch.tensor(2.0), rtol=1e-4, atol=1e-5)
    walks = [step for step in kernels(made) if any(step.bytes_of(one) >= 40 * 64 * 4 for one in step.reads)]
    assert len(walks) == 1
