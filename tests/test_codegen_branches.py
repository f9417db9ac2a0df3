"""Programs that each lie within one of several parts compute that part only."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import torch
from graphs import check, kernels, plan, record
from torch import Tensor

from ir_nodes import settings


def parts(count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Heads with their channels before their tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 24, 40, generator=generator).to(dtype) for _ in range(count)]


def costly(x: Tensor) -> Tensor:
    return x / (x.abs() + 1) / (x * x + 0.5)


def side_by_side(*given: Tensor) -> Tensor:
    """Queries, keys and values for each token, as their gradients are for the product that made them."""
    made = [costly(one) for one in given[:-1]]
    return torch.stack([*made, given[-1]], 1).permute(0, 4, 1, 2, 3).contiguous()


def joined(*given: Tensor) -> Tensor:
    return torch.cat([costly(one) for one in given], 1).transpose(2, 3).contiguous()


def with_another_reader(*given: Tensor) -> Any:
    first = costly(given[0])
    return torch.stack([first, given[1]], 1).permute(0, 4, 1, 2, 3).contiguous(), first


def cheap(*given: Tensor) -> Tensor:
    return torch.stack([one + 1 for one in given], 1).permute(0, 4, 1, 2, 3).contiguous()


def source(program: Callable[..., Any], *inputs: Tensor) -> str:
    return "\n".join(step.kernel.source for step in kernels(plan(record(program, *inputs)[0].graph)))


@pytest.mark.parametrize("program", [side_by_side, joined, with_another_reader, cheap])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers(program: Callable[..., Any], count: int, dtype: torch.dtype) -> None:
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    check(program, *parts(count, dtype), rtol=bound, atol=bound)


def test_a_branch_for_each_part() -> None:
    text = source(side_by_side, *parts())
    assert len(re.findall(r"^ +if t\d+:", text, flags=re.MULTILINE)) == 2 and text.count("else:") == 2, text
    assert text.index("_ratio(t") < text.index("else:") < text.rindex("_ratio(t")


def test_switched_off_or_cheap_or_along_what_is_walked_there_is_none() -> None:
    given = parts()
    with settings.override(disable=frozenset(("branches",))):
        assert "else:" not in source(side_by_side, *given)
    assert "else:" not in source(cheap, *given)
    assert "else:" not in source(lambda *x: torch.stack([costly(one) for one in x], 1), *given)


def test_branches_in_a_launch_that_kernels_share() -> None:
    def several(*given: Tensor) -> Any:
        return side_by_side(*given), given[0].sum(-1), given[1][0, 0] * 2

    check(several, *parts(), combos=True, rtol=1e-5, atol=1e-5)
