"""Triangles, ranges and masks made of them."""

from __future__ import annotations

import pytest
import torch
from graphs import check


@pytest.mark.parametrize("diagonal", [-2, 0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_triangles(diagonal: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 7, 9, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    check(lambda x: (x.tril(diagonal), x.triu(diagonal)), x, count=1)
    check(lambda x: x.transpose(1, 2).tril(diagonal), x, count=1)


def test_a_causal_mask_costs_no_kernel_of_its_own() -> None:
    def program(scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.ones(16, 16, dtype=torch.bool).tril()
        return scores.masked_fill(~allowed, float("-inf")).softmax(-1)

    made = check(program, torch.randn(2, 3, 16, 16))
    assert len(made.steps) == 1


def test_ranges() -> None:
    check(lambda x: (torch.arange(7), torch.arange(3, 17, 2), torch.arange(9, 0, -1, dtype=torch.int32), x + 1), torch.ones(3))
    check(lambda x: x + torch.arange(5)[:, None], torch.ones(5, 3), count=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_rolls(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 7, 9, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    check(lambda x: (x.roll(2, 0), x.roll((-3, 4), (1, 2)), x.roll(21, 1), x.roll((2, 3), (-1, -1)), x.roll(-1, -3)), x)
    check(lambda x: x.transpose(0, 2)[1:].roll((3, -2), (0, 2)), x)
    check(lambda x: (x.flatten().roll(-100), x.roll(5)), x, extern=None)  # all as one row: ATen's


def test_shifted_windows_are_one_kernel() -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        shifted = x.roll((-2, -2), (1, 2)) * 0.5
        return shifted.view(2, 2, 4, 2, 4, 6).transpose(2, 3).contiguous()

    check(windows, torch.randn(2, 8, 8, 6), count=1)


def test_nothing_is_rolled() -> None:
    check(lambda x: (x.roll(1, 0) + 1, x.sum()), torch.ones(0, 3), extern=None)
    check(lambda x: x.roll(7, 0) + 1, torch.ones(7, 3), count=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_infinities_are_told_apart(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, float("inf"), float("-inf"), float("nan"), 0.0]) if dtype.is_floating_point else torch.arange(5)
    check(lambda x: (x.isneginf(), x.isposinf()), x.to(dtype), count=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cross_products(dtype: torch.dtype) -> None:
    x, y = (torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    check(lambda x, y: torch.linalg.cross(x, y, dim=1) + 1, x, y, count=1, rtol=1e-5, atol=1e-6)
    check(lambda x, y: torch.linalg.cross(x.transpose(1, 2), y[:1].transpose(1, 2)), x, y, extern=0, rtol=1e-5, atol=1e-6)
