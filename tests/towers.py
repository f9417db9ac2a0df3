"""Small models with parts that can change places, and what training them leaves. Imports torch and `lazy_backend` only."""

from __future__ import annotations

import copy
from typing import Callable

import torch
from torch import nn

from lazy_backend import register_segment
from tests.device import CLOSE, DEVICE, ON_GPU


class Tower(nn.Module):
    """Two methods that do not depend on each other, and one that needs both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def func1(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).relu()

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x).tanh()

    def join(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return self.head(one * two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.func1(x), self.func2(x))


FUNC1 = Tower.func1.__code__.co_firstlineno + 1


def pair(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    truth = kind()
    return copy.deepcopy(truth).to(DEVICE), truth


def train(model: nn.Module, device: str, steps: int = 3) -> list[torch.Tensor]:
    """Outputs, input gradients and parameter gradients of some steps."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.arange(24.0).add(step).sin().reshape(4, 6).to(device).requires_grad_()
        out = model(x)
        optimizer.zero_grad()
        out.pow(2).sum().backward()
        found += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return found


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    near = {"rtol": CLOSE, "atol": CLOSE} if ON_GPU else {}  # three steps add their roundings up
    torch.testing.assert_close([tensor.cpu() for tensor in got], wanted, **near)


def name_all(model: nn.Module) -> None:
    register_segment(model.func1, name="one")
    register_segment(model.func2, name="two")
    register_segment(model.join, name="join")
    register_segment(model.func1, name="one_bwd", is_backward=True)
    register_segment(model.func2, name="two_bwd", is_backward=True)
