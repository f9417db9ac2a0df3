"""Columns of which a few lie side by side, such as pixels' channels, are reduced as rows whose elements lie apart."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from graphs import check, kernels, plan, record
from graphs import drawn as data
from torch import Tensor

PROGRAMS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: x.softmax(1),
    "centred": lambda x: x - x.mean(1, keepdim=True),
    "normed": lambda x: x / x.norm(dim=1, keepdim=True),
    "largest": lambda x: (x == x.amax(1, keepdim=True)).to(x.dtype) * x,
    "summed twice": lambda x: x.var(1),
}


def blocks(program: Callable[..., Any], x: Tensor) -> list[tuple[str, dict[str, int]]]:
    return [(step.kernel.source, dict(step.kernel.constexprs)) for step in kernels(plan(record(program, x)[0].graph))]


def walks_rows(program: Callable[..., Any], x: Tensor) -> bool:
    """Is it one kernel, whose reduced elements lie along axis 1?"""
    made = blocks(program, x)
    return len(made) == 1 and "_acc" not in made[0][0] and ", 1, _" in made[0][0]


@pytest.mark.parametrize(("size", "dtype"), [
    ((2000, 256, 3), torch.bfloat16), ((2000, 300, 4), torch.float32), ((3000, 49, 2), torch.float32),
    ((2000, 300, 6), torch.bfloat16),
], ids=str)  # fmt: skip
def test_rows_where_results_lie_in_small_pieces(size: tuple[int, ...], dtype: torch.dtype) -> None:
    assert walks_rows(PROGRAMS["softmax"], data(*size, dtype=dtype))
    assert walks_rows(PROGRAMS["centred"], data(*size, dtype=dtype))


@pytest.mark.parametrize("size", [(2000, 300, 6), (2000, 3000, 3), (64, 5000, 3), (2000, 256, 64)], ids=str)
def test_columns_where_pieces_are_longer_or_rows_would_not_be_held(size: tuple[int, ...]) -> None:
    assert not walks_rows(PROGRAMS["softmax"], data(*size))


def test_sums_alone_are_rows_where_programs_would_share_columns() -> None:
    total = lambda x: x.sum(1)  # noqa: E731
    assert walks_rows(total, data(32769, 256, 3, dtype=torch.bfloat16))
    assert not walks_rows(total, data(32768, 256, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("size", [(600, 5, 3), (300, 33, 2), (199, 50, 3), (2, 270, 17, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers(name: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    near = 2e-2 if dtype is torch.bfloat16 else 1e-4
    check(lambda x: PROGRAMS[name](x.view(size[0], -1, size[-1])), data(*size, dtype=dtype), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_over_a_single_element(dtype: torch.dtype) -> None:
    """Nothing is reduced."""
    check(lambda x: (x.sum(1), x.amax(1) * 2), data(2000, 1, 3, dtype=dtype))
    check(lambda x: x.sum(1, keepdim=True).square().sum(0), data(700, 1, dtype=dtype), rtol=1e-2, atol=1e-2)


def test_another_operand_may_lie_otherwise() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return (x + y.transpose(1, 2)).softmax(1)

    check(program, data(400, 20, 3), data(400, 3, 20), rtol=1e-4, atol=1e-4)
    check(lambda x, y: (x * y).softmax(1), data(400, 20, 3), data(20, 3), rtol=1e-4, atol=1e-4)
