"""Sums of a few parts that are left in another order than they lie in are elementwise."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from graphs import check, kernels, plan, record
from torch import Tensor

from ir_nodes import settings

LAST = torch.channels_last


def planes(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


def names(program: Callable[..., Any], *inputs: Tensor) -> list[str]:
    return [step.kernel.name for step in kernels(plan(record(program, *inputs)[0].graph))]


def pairs(x: Tensor) -> Tensor:
    return x.sum(1).contiguous(memory_format=LAST)


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(1).contiguous(memory_format=LAST)


def kept(x: Tensor) -> Any:
    """What is summed is needed, too."""
    y = x.relu()
    return y, y.sum(1).contiguous(memory_format=LAST)


def with_its_dimension(x: Tensor) -> Tensor:
    return x.sum(1, keepdim=True)[:, 0].contiguous(memory_format=LAST)


def overwritten(x: Tensor) -> Any:
    y = x * 2
    total = y.sum(1)
    y.add_(1)
    return y, total.contiguous(memory_format=LAST)


@pytest.mark.parametrize("program", [pairs, kept, with_its_dimension, overwritten])
@pytest.mark.parametrize("parts", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers(program: Callable[..., Any], parts: int, dtype: torch.dtype) -> None:
    check(program, planes(2, parts, 17, 6, 5, dtype=dtype), rtol=1e-6 if dtype is torch.float32 else 2e-2, atol=1e-2)


def test_what_makes_the_summands_is_not_stored() -> None:
    x, weight = planes(2, 2, 32, 16, 16, dtype=torch.bfloat16), torch.rand(2, 2, 32, 1, 1)
    check(weighted, x, weight, count=1, rtol=1e-5, atol=1e-5)
    assert names(weighted, x, weight) == ["pointwise_sum_clone"]


def test_sums_of_more_or_in_the_order_of_memory_are_reduced() -> None:
    assert names(pairs, planes(2, 2, 32, 16, 16)) == ["pointwise_sum_clone"]
    assert names(lambda x: x.sum(1), planes(2, 2, 32, 16, 16)) == ["reduce_sum"]
    assert names(lambda x: x.sum(-1), planes(32, 16, 16, 2)) == ["reduce_sum"]
    assert names(pairs, planes(2, 5, 32, 16, 16))[0].startswith("reduce_sum")
    with settings.override(disable=frozenset(("tiling",))):
        assert names(pairs, planes(2, 2, 32, 16, 16))[0].startswith("reduce_sum")


def test_sums_of_one_number_or_of_none() -> None:
    check(lambda x: (x.sum(0), x[None].sum(0), x[None].sum(-1, keepdim=True)), torch.tensor(3.0))
