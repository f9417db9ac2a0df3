"""Gradients of products, which read no value, with zeros and without."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap

import lazy_backend

PRODUCTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.prod(-1), lambda x: x.prod(0, keepdim=True), lambda x: x.prod(), lambda x: x.cumprod(0),
    lambda x: x.cumprod(-1), lambda x: torch.cumprod(x, 1).prod(1),
]  # fmt: skip


def numbers(zeros: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    x.view(-1)[torch.randperm(35, generator=generator)[:zeros]] = 0
    return x


def gradients(product: Callable[[Tensor], Tensor], numbers: Tensor) -> list[Tensor]:
    """The product, its gradient alone and with a graph, and the gradient of that one's size."""
    x = numbers.requires_grad_()
    y = product(x)
    weighted = (y * torch.arange(1, y.numel() + 1, dtype=y.dtype, device=y.device).view(y.shape)).sum()
    plain, graphed = (torch.autograd.grad(weighted, x, retain_graph=True, create_graph=again)[0] for again in (False, True))
    return [y.detach(), plain, graphed.detach(), torch.autograd.grad(graphed.square().sum(), x)[0]]


@pytest.mark.parametrize("zeros", [0, 1, 6, 20])
@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_gradients_are_eager_modes(number: int, zeros: int) -> None:
    ours = gradients(PRODUCTS[number], numbers(zeros).to("lazysched"))
    for made, wanted in zip(ours, gradients(PRODUCTS[number], numbers(zeros))):
        torch.testing.assert_close(made.cpu(), wanted)


@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_nothing_runs_before_the_barrier(number: int) -> None:
    x = numbers(3).to("lazysched").requires_grad_()
    lazy_backend.mark_step(wait=True)
    before = runs()
    torch.autograd.grad(PRODUCTS[number](x).sum(), x)
    after = runs()
    assert after == before


def runs() -> int:
    line = next(line for line in lazy_backend.metrics_report().splitlines() if "recordings run" in line)
    return int(line.split()[-1].replace(",", ""))


def test_transforms() -> None:
    x = numbers(2)
    for transformed in (vmap(grad(lambda one: one.prod(-1))), lambda x: jvp(lambda one: one.cumprod(-1), (x,), (x,))[1]):
        torch.testing.assert_close(transformed(x.to("lazysched")).cpu(), transformed(x))


def test_shapes_alone() -> None:
    torch.empty(1, device="lazysched")
    with FakeTensorMode():
        x = torch.empty(3, 4, device="lazysched", requires_grad=True)
        product = x.cumprod(1).prod(0)
        (slope,) = torch.autograd.grad(product.sum(), x, create_graph=True)
        assert product.shape == (4,) and slope.shape == x.shape and slope.device == x.device
