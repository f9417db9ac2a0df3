"""Matrix products of few summands as elementwise instructions: numbers as eager mode's, and what shares their kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels

import lazy_backend  # noqa: F401  registers the device
from codegen import small_products
from ir_nodes import settings

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_products, "LEAST", 1)


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}


@DTYPES
def test_each_of_a_batch(dtype: torch.dtype) -> None:
    for size in ((7, 3, 3, 3), (5, 9, 9, 32), (4, 16, 16, 16), (3, 40, 5, 30), (6, 1, 4, 1)):
        batch, rows, inner, columns = size
        sides = (rows, inner), (inner, columns), (rows, columns)
        x, y, z = (data(batch, *side, dtype=dtype, seed=seed) for seed, side in enumerate(sides))
        check(torch.bmm, x, y, count=1, **near(dtype))
        check(lambda x, y: torch.bmm(x.mT.contiguous().mT, y.mT.contiguous().mT) * 2, x, y, **near(dtype))
        check(lambda x, y, z: torch.baddbmm(z, x, y, beta=0.5, alpha=2), x, y, z, count=1, **near(dtype))
    one, many = data(1, 3, 3, dtype=dtype), data(6, 3, 2, dtype=dtype)
    check(lambda x, y: torch.bmm(x.expand(6, 3, 3), y), one, many, extern=0, **near(dtype))


@DTYPES
def test_a_layer_over_coordinates_shares_its_activations_kernel(dtype: torch.dtype) -> None:
    x, weight, bias = data(40, 3, dtype=dtype), data(24, 3, dtype=dtype, seed=1), data(24, dtype=dtype, seed=2)
    made = check(lambda x, w, b: F.linear(x, w, b).tanh(), x, weight, bias, count=1, **near(dtype))
    assert [node.name for node in kernels(made)[0].nodes] == ["addmm", "tanh"]
    check(lambda x, w: x @ w.t() + 1, x, weight, count=1, **near(dtype))


def test_a_layers_weights_are_loaded_once_for_several_rows() -> None:
    given = data(4096, 3), data(64, 3, seed=1), data(64, seed=2)
    made = check(lambda x, w, b: F.linear(x, w, b).relu(), *given, count=1, rtol=1e-5, atol=1e-5)
    source = kernels(made)[0].kernel.source
    assert "[:, None]" in source and sum("mask=m1)" in line for line in source.splitlines()) == 4, "three weights and a bias"


def test_a_factor_of_nought_leaves_out_what_is_no_number() -> None:
    bias = torch.full((4, 3), float("nan"))
    check(lambda b, x, y: torch.addmm(b, x, y, beta=0), bias, data(4, 2), data(2, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("left", "right", "why"), [
    ((30, 8), (8, 40), "multiplies matrices of this size"), ((2, 32, 16), (2, 16, 32), "multiplies matrices of this size"),
    ((2, 9, 17), (2, 17, 9), "multiplies matrices of this size"),
], ids=["eight summands", "large ones of a batch", "many summands of each"])  # fmt: skip
def test_what_a_library_multiplies(left: tuple[int, ...], right: tuple[int, ...], why: str) -> None:
    made = check(torch.mm if len(left) == 2 else torch.bmm, data(*left), data(*right), extern=1)
    assert why in made.steps[0].reason  # type: ignore[union-attr]


def test_few_results_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_products, "LEAST", 1 << 16)
    assert "takes no longer" in check(torch.mm, data(9, 2), data(2, 9), extern=1).steps[0].reason  # type: ignore[union-attr]


def test_without() -> None:
    with settings.override(disable=frozenset({"small_products"})):
        made = check(torch.mm, data(9, 2), data(2, 9), extern=1)
    assert "switched off" in made.steps[0].reason  # type: ignore[union-attr]


def test_integers_are_the_librarys() -> None:
    check(torch.mm, data(9, 2).long(), data(2, 9).long(), extern=1)


def test_gradients_on_the_device() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, turns: torch.Tensor) -> list[torch.Tensor]:
        given = [one.detach().requires_grad_() for one in (x, weight, turns)]
        y = torch.bmm(F.linear(given[0], given[1]).tanh().view(-1, 3, 3), given[2])
        return [y.detach(), *torch.autograd.grad(y.square().sum(), given)]

    given = data(30, 2), data(9, 2, seed=1), data(30, 3, 3, seed=2)
    with settings.override(engine="triton"):
        found = step(*(one.to("lazysched") for one in given))
        for one, other in zip(found, step(*given)):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
