"""Rows of a few elements, each held by one thread: when they are, what the kernels compute, and what they leave alone."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import torch
from graphs import check, compile_all, kernels, plan, record
from graphs import drawn as data
from torch import Tensor

from codegen.kernel import KernelStep
from codegen.short_rows import LONGEST
from ir_nodes import settings

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}


def held(step: KernelStep) -> int:
    """Elements of a row that each thread has one after the other; 0: rows are blocks."""
    return len(set(re.findall(r"\bi1_(\d+) =", step.kernel.source))) if dict(step.kernel.constexprs)["B1"] == 1 else 0


def rows_held(program: Callable[..., Any], *inputs: Tensor) -> list[int]:
    return [held(step) for step in kernels(plan(record(program, *inputs)[0].graph)) if step.kernel.name.startswith("reduce")]


def lengths(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def averaged(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack((x, y, x * y)).mean(0)


def spread(x: Tensor) -> Any:
    return torch.var_mean(x, -1)


def mixed(x: Tensor) -> Tensor:
    """Both read again what was reduced."""
    return x.softmax(0) * x.amax(1, keepdim=True)


def counted(x: Tensor) -> Any:
    return (x > 0).all(-1), (x > 0).sum(-1), x.prod(-1)


def middle(x: Tensor) -> Any:
    return x.sum(1), x.logsumexp(1)


@pytest.mark.parametrize("program", [lengths, spread, mixed, counted, middle])
@pytest.mark.parametrize("shape", [(7, 5, 3), (3, 5, 7), (2, 3, 6), (5, 6, 5), (300, 7, 2), (1, 3, 3)], ids=str)
@DTYPES
def test_numbers(program: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(program, data(*shape, dtype=dtype), **near(dtype))


@DTYPES
def test_parts_of_a_stack(dtype: torch.dtype) -> None:
    check(averaged, data(40, 33, dtype=dtype), data(40, 33, dtype=dtype, seed=1), **near(dtype))


def test_gradients_of_coordinates() -> None:
    def forces(x: Tensor) -> Tensor:
        apart = x[:, None] - x
        near = 1 / (apart.square().sum(-1) + 0.01)
        return (apart * near[..., None]).sum(1)

    check(forces, data(33, 3), rtol=1e-4, atol=1e-4)


def test_several_dimensions_at_once() -> None:
    check(lambda x: x.sum((0, 2)), data(2, 130, 3), rtol=1e-5, atol=1e-5)
    assert rows_held(lambda x: x.sum((0, 2)), data(2, 130, 3)) == [6]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 9])
def test_how_long_rows_may_be(length: int) -> None:
    """Rows that are vectors, which a thread loads as they are, stay blocks."""
    whole = length & (length - 1) == 0
    assert rows_held(lengths, data(4096, length)) == [0 if whole or length > LONGEST else length]
    assert rows_held(lambda x: x.amax(0), data(length, 4096)) == [length if length <= LONGEST else 0]


def test_rows_that_others_read_too_are_held() -> None:
    """Such as differences of all pairs of points, or of experts for each task."""
    points = data(512, 3)
    assert max(rows_held(lambda x: (x[:, None] - x).square().sum(-1), points)) == 3
    assert max(rows_held(lambda x, y: (x[:, None] * y[..., None]).sum(2), data(64, 3, 128), data(64, 5, 3))) == 3


def test_rows_of_numbers_alone_are_blocks() -> None:
    """No operand has an element for each: where they are summed, there would be no block to sum."""
    def program(x: Tensor) -> Tensor:
        rows = x.detach().requires_grad_()
        wide = rows.expand(983, 2, 1)
        return torch.autograd.grad(wide.float().sum() * 0.5, rows)[0]

    compile_all(check(program, data(983, 1, 1, dtype=torch.bfloat16), rtol=2e-2, atol=2e-2))
    compile_all(check(lambda x, y: (y * 2).expand(4096, 3).sum(-1) + x, data(4096), data(3), rtol=1e-5, atol=1e-5))


def test_threads_hold_several_rows_where_there_are_many() -> None:
    (few,) = kernels(plan(record(lambda x: x.amax(0), torch.empty(3, 4096))[0].graph))
    (many,) = kernels(plan(record(lambda x: x.amax(0), torch.empty(3, 1 << 20))[0].graph))
    assert [(dict(step.kernel.constexprs)["B0"], step.kernel.num_warps) for step in (few, many)] == [(128, 4), (512, 4)]


def test_scans_and_the_switch_leave_blocks() -> None:
    assert not any(map(held, kernels(plan(record(lambda x: x.cumsum(-1).sum(-1), data(4096, 3))[0].graph))))
    with settings.override(disable="short_rows"):
        assert rows_held(lengths, data(4096, 3)) == [0]
        check(lengths, data(40, 3), rtol=1e-5, atol=1e-5)


def test_kernels_fit_other_numbers_of_rows() -> None:
    one, other = (kernels(plan(record(lengths, data(rows, 3))[0].graph))[0].kernel for rows in (5000, 70003))
    assert one.source == other.source
