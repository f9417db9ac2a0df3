"""Elementwise work beside the reduction of a few long rows: a kernel of its own where there is much of it."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record

from codegen import layout
from codegen.fuse import plan
from ir_nodes import settings


def wave(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).sin()


def test_what_takes_long_is_left_to_many_programs() -> None:
    x = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    made = check(lambda x: F.layer_norm(wave(x), (20_000,)), x, count=2)
    assert "a few programs that reduce long rows would compute what many could" in {refusal.reason for refusal in made.refusals}


def test_what_does_not_shares_their_kernel() -> None:
    """Nor where there are many rows, or short ones."""
    check(lambda x: F.layer_norm(x * 2 + 1, (20_000,)), torch.randn(1, 20_000), count=1)
    check(lambda x: F.layer_norm(wave(x), (100,)), torch.randn(1, 100), count=1)
    many = plan(record(lambda x: F.layer_norm(wave(x), (20_000,)), torch.randn(40, 20_000))[0].graph)
    assert len(kernels(many)) == 1


def test_a_reduction_walks_as_most_of_its_operands_lie() -> None:
    """What is stored first lies across the others: its neighbours are the two summands."""
    def program(x: torch.Tensor, across: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.softmax(0)
        return across.permute(2, 1, 0) + y, y * 2, y + 1

    inputs = (torch.randn(2, 300, 64), torch.randn(64, 300, 2))
    made = check(program, *inputs, count=1)
    source = kernels(made)[0].kernel.source
    assert source.count("i0 * n1 + i1, ") == 3
    with settings.override(disable=frozenset({"loop_order"})):
        check(program, *inputs)


def test_long_columns_of_few_programs_leave_it_too() -> None:
    """Unless they are many, or scanned, which takes more programs' time by itself."""
    few, many = torch.zeros(4000, 1000), torch.zeros(4000, 20_000)
    assert len(kernels(plan(record(lambda x: wave(x).softmax(0), few)[0].graph))) == 2
    assert len(kernels(plan(record(lambda x: wave(x).softmax(0), many)[0].graph))) == 1
    assert len(kernels(plan(record(lambda x: wave(x).cumsum(0), few)[0].graph))) == 1
    check(lambda x: wave(x).softmax(0), torch.randn(400, 7), rtol=1e-5, atol=1e-6)


def test_what_is_expanded_is_walked_along_memory() -> None:
    """The dimension along which an operand does not move is the outer one, whether it is first or not."""
    def largest(x: torch.Tensor) -> torch.Tensor:
        return x.expand(2, *x.shape).amax(1)

    def summed(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.expand(3, *x.shape).amax(1).sum() + x.expand(2, *x.shape).square().sum(), x)[0]

    for program in (largest, summed):
        check(program, torch.randn(70, 96), rtol=1e-5, atol=1e-5)
    (step, *_) = kernels(plan(record(largest, torch.zeros(2048, 512))[0].graph))
    assert "x1 = tl.max_contiguous(" in step.kernel.source and "p0 + i0 * s0 + x1" in step.kernel.source


def test_sums_of_what_is_computed_from_places_have_few_warps() -> None:
    """Nothing is loaded, and a thread has several results all the same."""
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad(y.expand(2, *y.shape)[0::2].sum(), y)[0]

    check(program, torch.randn(30, 50))
    places = lambda x: (torch.arange(2, device=x.device)[:, None] * torch.arange(1 << 20, device=x.device)).sum(0) + x  # noqa: E731
    (step,) = kernels(plan(record(places, torch.zeros(1 << 20))[0].graph))
    assert step.kernel.num_warps <= 4
    check(places, torch.zeros(1 << 20), rtol=1e-5, atol=1e-5)


def test_columns_are_held_by_few_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that share a block wait for one another."""
    def warps() -> int:
        return kernels(plan(record(lambda x: x.logsumexp(1), torch.empty(512, 48, 48))[0].graph))[0].kernel.num_warps

    assert warps() == 8
    monkeypatch.setattr(layout, "COLUMN_WARPS", 32)
    assert warps() == 32


def test_loops_with_much_work_have_twice_the_warps() -> None:
    def summed(program: Callable[..., torch.Tensor]) -> int:
        made = plan(record(lambda x, g: (program(x) * g).sum(0), torch.empty(1 << 16, 256), torch.empty(1 << 16, 256))[0].graph)
        return kernels(made)[0].kernel.num_warps

    assert summed(lambda x: x.sin() * x.cos()) == 2 * summed(lambda x: x * 2)
