"""Products add up beside a residual's gradient, which is added to their sum at last."""

from __future__ import annotations

import pytest
import torch
from product_sums import DTYPES, Program, factors, nearer, summed
from torch import Tensor

from barriers.passes.product_sums import ONTO


def residual(r: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return r.neg() + a @ b + c @ d


def residual_of_three(r: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    return r.neg() + a @ b + c @ d + e @ f


def residual_as_autograd(r: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    total = r.neg().unflatten(0, (2, -1))
    for left, right in ((a, b), (c, d), (e, f)):
        torch.add(total, (left @ right).unflatten(0, (2, -1)), out=total)
    return total.neg()


def residual_in_between(r: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    return a @ b + c @ d + r.neg() + e @ f


def added_to_a_product(r: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.add((a @ b).add_(r, alpha=3), c @ d, alpha=2)


def scaled_residual(r: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.add(torch.add(r, a @ b, alpha=-0.5), c @ d, alpha=2.5)


def a_row(r: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return r[0] + a @ b + c @ d


REGROUPED: list[tuple[Program, int]] = [
    (residual, 2), (residual_of_three, 3), (residual_as_autograd, 3), (residual_in_between, 3), (added_to_a_product, 2),
    (scaled_residual, 2), (a_row, 2)]  # fmt: skip


@pytest.mark.parametrize(("program", "count"), REGROUPED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_beside_a_residual_add_up_first(program: Program, count: int, dtype: torch.dtype) -> None:
    inputs = [torch.randn(256, 64, generator=torch.Generator().manual_seed(9)).to(dtype), *factors(count, dtype, 256, columns=64)]
    names = nearer(program, *inputs)
    assert (names.count("mm"), names.count("addmm_"), names.count("add") + names.count("add_")) == (1, count - 1, 1)


def residual_overwritten(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    rest = c[:, :8].exp()
    total = rest + a @ b
    rest.mul_(2)
    return total + c @ d, rest


def product_overwritten(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    made = a @ b
    total = c[:, :8].exp() + made
    made.fill_(1)
    return total + c @ d, made


def residual_sum_held(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    total = c[:, :8].exp() + a @ b
    return total, total + c @ d


def residual_sum_read_twice(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    total = c[:, :8].exp() + a @ b
    return (total + c @ d) * total


def residual_of_another_dtype(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return c[:, :8].float() + a @ b + c @ d


def in_another_order(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    early = a @ b
    return c[:, :8].exp() + c @ d + early


REFUSED: dict[str, tuple[Program, str]] = {
    "the residual changes": (residual_overwritten, "overwritten before all of it is there"),
    "a product changes": (product_overwritten, "overwritten before all of it is there"),
    "a residual's sum is held": (residual_sum_held, "a part of the sum is held"),
    "a residual's sum is read twice": (residual_sum_read_twice, "somebody else reads a part"),
    "a residual in float32": (residual_of_another_dtype, "not in 16 bits throughout"),
    "products turned around": (in_another_order, "in another order than they are added"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    program, reason = REFUSED[name]
    graph, told = summed(program, *factors(2))
    assert reason in told and told.startswith("False") and not any(node.target == ONTO for node in graph.nodes)
