"""Matrix products with a few rows or columns of results as sums: numbers as eager mode's, and what shares their kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels

import lazy_backend  # noqa: F401  registers the device
from codegen import narrow_products
from ir_nodes import settings

BETTER = narrow_products._better_in_tiles
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_products, "LEAST", 1)
    monkeypatch.setattr(narrow_products, "_better_in_tiles", lambda *given: False)


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, laid out along the other axis."""
    return x.mT.contiguous().mT


@DTYPES
@pytest.mark.parametrize("size", [(40, 33, 1), (50, 70, 3), (4, 100, 30), (1, 64, 77), (2, 300, 2), (3, 9, 3)], ids=str)
def test_matrices(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    rows, inner, columns = size
    x, y, z = data(rows, inner, dtype=dtype), data(inner, columns, dtype=dtype, seed=1), data(rows, columns, dtype=dtype, seed=2)
    for left in (x, turned(x)):
        for right in (y, turned(y)):
            check(torch.mm, left, right, count=1, **near(dtype))
    check(lambda z, x, y: torch.addmm(z, x, y, beta=0.5, alpha=2), z, x, y, count=1, **near(dtype))
    check(lambda z, x, y: torch.addmm(z[0], x, y), z, x, y, count=1, **near(dtype))
    check(lambda z, x, y: torch.addmm(z[:, :1], x, y) + z, z, x, y, extern=0, **near(dtype))


@DTYPES
def test_each_of_a_batch(dtype: torch.dtype) -> None:
    for batch, rows, inner, columns in ((6, 1, 40, 20), (3, 20, 33, 2), (2, 30, 17, 4), (5, 3, 8, 3)):
        sides = (rows, inner), (inner, columns), (rows, columns)
        x, y, z = (data(batch, *side, dtype=dtype, seed=seed) for seed, side in enumerate(sides))
        check(torch.bmm, x, y, count=1, **near(dtype))
        check(lambda x, y: torch.bmm(turned(x), turned(y)) * 2, x, y, **near(dtype))
        check(lambda z, x, y: torch.baddbmm(z, x, y, beta=0.5, alpha=2), z, x, y, count=1, **near(dtype))
        check(lambda x, y: torch.bmm(x[:1].expand_as(x), y), x, y, extern=0, **near(dtype))


@DTYPES
def test_vectors(dtype: torch.dtype) -> None:
    x, y, z = data(30, 50, dtype=dtype), data(50, dtype=dtype, seed=1), data(30, dtype=dtype, seed=2)
    for matrix in (x, turned(x)):
        check(torch.mv, matrix, y, count=1, **near(dtype))
        check(lambda z, x, y: torch.addmv(z, x, y, beta=0.5, alpha=2), z, matrix, y, count=1, **near(dtype))
    check(lambda x, y: torch.addmv(y[:1], x, y), x, y, count=1, **near(dtype))
    check(torch.dot, data(3000, dtype=dtype), data(3000, dtype=dtype, seed=1), extern=0, **near(dtype))
    check(lambda x, y: x[::2] @ y[1::2], data(300, dtype=dtype), data(300, dtype=dtype, seed=1), extern=0, **near(dtype))


def names(made: Any) -> list[list[str]]:
    return [[node.name for node in step.nodes] for step in kernels(made)]


def test_a_last_layer_shares_the_kernel_of_what_is_before_and_after() -> None:
    x, weight, bias = data(64, 48), data(1, 48, seed=1), data(1, seed=2)
    made = check(lambda x, w, b: F.linear(x.relu(), w, b).sigmoid(), x, weight, bias, count=1, rtol=1e-5, atol=1e-5)
    assert names(made) == [["relu", "addmm", "sigmoid"]]


def test_a_first_layers_forward_and_gradients_read_its_rows_once() -> None:
    def program(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight, bias = (one.detach().requires_grad_() for one in (x, weight, bias))
        y = F.linear(x, weight, bias).relu()
        return (y.detach(), *torch.autograd.grad(y, (x, weight, bias), seed))

    given = data(2048, 3), data(64, 3, seed=1), data(64, seed=2), data(2048, 64, seed=3)
    made = check(program, *given, extern=0, rtol=1e-4, atol=1e-3)
    large = [step for step in kernels(made) if any(node.name == "threshold_backward" for node in step.nodes)]
    mixed = [node.name for step in large[:1] for node in step.nodes]
    assert len({id(step.kernel) for step in large}) <= 2 and mixed.count("mm") == 2


def test_a_factor_of_nought_leaves_out_what_is_no_number() -> None:
    bias = torch.full((40, 2), float("nan"))
    check(lambda b, x, y: torch.addmm(b, x, y, beta=0), bias, data(40, 12), data(12, 2), rtol=1e-5, atol=1e-5)


def test_more_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(columns: int) -> str:
        (step,) = check(torch.mm, data(50, 60), data(60, columns), extern=1).steps
        return step.reason  # type: ignore[union-attr]

    assert "multiplies matrices of this size" in reason(5)
    monkeypatch.setattr(narrow_products, "LEAST", 1 << 18)
    assert "takes no longer" in reason(2)
    with settings.override(disable=frozenset({"narrow_products"})):
        assert "switched off" in reason(2)


def left_to_a_library(program: Any, *sizes: tuple[int, ...]) -> bool:
    given = (data(*size, dtype=torch.bfloat16, seed=seed) for seed, size in enumerate(sizes))
    made = check(program, *given, extern=None, rtol=2e-2, atol=5e-1)
    return any("multiplies" in getattr(step, "reason", "") for step in made.steps)


def test_a_library_is_left_what_it_does_in_less_time_unless_a_kernel_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_products, "_better_in_tiles", BETTER)
    assert left_to_a_library(lambda x, y: x.t() @ y, (500, 64), (500, 1))
    assert not left_to_a_library(lambda x, y: x.relu().t() @ y, (500, 64), (500, 1))
    assert not left_to_a_library(torch.mm, (500, 64), (64, 1))
    assert left_to_a_library(lambda x, y: x @ y.t(), (100, 300), (3, 300))
    assert not left_to_a_library(lambda x, y: x @ y.t(), (100, 300), (2, 300))
    assert left_to_a_library(lambda x, y: x.relu() @ y, (100, 1100), (1100, 3)), "it is read in steps"
    assert left_to_a_library(lambda x, y: x @ y, (5, 40, 100), (5, 100, 1)), "another one for each of a batch"
    assert not left_to_a_library(lambda x, y: x @ y, (5, 40, 50), (5, 50, 1))
    assert not left_to_a_library(torch.dot, (5000,), (5000,))
    assert left_to_a_library(torch.addmv, (30,), (30, 2000), (2000,))
