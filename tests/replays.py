"""What the tests of `lazy_backend.replayed` share: a counted function, a training step, why calls were not replayed."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import pytest
import torch
import torch._lazy.metrics
from torch import Tensor, nn

import lazy_backend

DEVICE = "lazysched"


@pytest.fixture(autouse=True)
def started() -> Iterator[None]:
    """Nothing is recorded before a test, and nothing after it."""
    torch.ones(1, device=DEVICE)
    lazy_backend.mark_step(wait=True)
    yield
    lazy_backend.mark_step(wait=True)


class Counted:
    """A model with a state of its own, and how often its Python ran."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8).to(device)
        self.total = torch.zeros(4, 8, device=device)
        self.runs = 0

    @torch.no_grad()
    def __call__(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.runs += 1
        y = nn.functional.gelu(self.layer(x)) * scale
        self.total.add_(y)
        return {"y": y, "first": y[:, 0], "same": x, "view": x.t(), "name": "model"}


def inputs(device: str, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator).to(device) for _ in range(count)]


def refusals() -> dict[str, int]:
    names = torch._lazy.metrics.counter_names()
    return {name: torch._lazy.metrics.counter_value(name) for name in names if name.startswith("ReplayRefused")}


def new_refusals(run: Callable[..., Any], *given: Any) -> str:
    before = refusals()
    run(*given)
    return "\n".join(name for name, count in refusals().items() if count > before.get(name, 0))


class Trainer:
    """A model and its optimizer; ``step`` is a whole training step."""

    def __init__(self, device: str, make: Callable[[Any], torch.optim.Optimizer], dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8)]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = make(self.model.parameters())
        self.runs = 0

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.runs += 1
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def everything(self) -> dict[str, Tensor]:
        found = {name: value.detach().cpu() for name, value in self.model.state_dict().items()}
        found |= {f"{name}.grad": p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": v.cpu() for name, v in state.items() if isinstance(v, Tensor)}
        return found


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)
