"""What tests of training features share: one computation on the device and in eager mode, compared. Imports torch, `eager`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.conformance.eager import DEVICE, EAGER, on_cpu

_numbers = torch.Generator()


def randn(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every device, which leave the default generators alone."""
    return torch.randn(*shape, generator=_numbers).to(dtype).to(device)


def mlp(device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return filled(model).to(device)


def filled(model: nn.Module) -> nn.Module:
    """``model`` with numbers that no default generator gave; those start anew, since they drew for its first ones."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data = randn("cpu", *parameter.shape) / 2
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def same(compute: Callable[[str], Any], exact: bool = True) -> None:
    """``compute(device)`` on the device equals eager mode; ``exact``: in every bit, where eager mode runs on a CPU."""
    results = []
    for device in (DEVICE, EAGER):
        _numbers.manual_seed(3)
        torch.manual_seed(5)
        results.append(on_cpu(compute(device)))
    tolerance = {"rtol": 0, "atol": 0} if exact and EAGER == "cpu" else {}
    torch.testing.assert_close(*results, equal_nan=True, **tolerance)
