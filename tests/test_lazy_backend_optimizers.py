"""Whole optimizer steps on fused kernels: the numbers of the CPU over several steps, and nothing compiled when numbers change."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable

import children
import pytest
import torch

import lazy_backend
from codegen import triton_engine
from tests.device import DEVICE

Parameters = list[torch.nn.Parameter]
Maker = Callable[[Parameters], Any]


pytestmark = pytest.mark.usefixtures("built")


class Lion(torch.optim.Optimizer):
    """Written as users write optimizers: a loop over parameters."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * 0.1)
                parameter.add_(torch.sign(moment * 0.9 + parameter.grad * 0.1), alpha=-group["lr"])
                moment.lerp_(parameter.grad, 0.01)


OPTIMIZERS: tuple[tuple[Maker, dict[str, Any]], ...] = (
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1), {"fused": True}),
    (torch.optim.AdamW, {"capturable": True}),
    (partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1), {}),
    (partial(torch.optim.SGD, lr=0.1, momentum=0.9), {"fused": True}),
    (partial(torch.optim.RMSprop, momentum=0.5), {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RAdam, {}),
    (Lion, {}),
)
"""What makes the optimizer, and how it is to run on the device; the CPU's fused kernels are no reference in 16 bits."""


def parameters(device: str) -> Parameters:
    """Several sizes, one of one element, one of none, one that is not contiguous, one in another dtype."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator) for size in ((16, 8), (8,), (1,), (0,), (40,), (7, 5))]
    made[-1] = made[-1].t()
    made.append(torch.randn(24, generator=generator).bfloat16())
    return [torch.nn.Parameter(one.to(device)) for one in made]


def trained(make: Maker, device: str, clip: bool) -> tuple[Parameters, list[int]]:
    """After five steps with another learning rate each, and how many graphs were compiled after each."""
    found, compiles = parameters(device), []
    optimizer = make(found)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for parameter in found:
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(grad)
        if clip:
            torch.nn.utils.clip_grad_norm_(found, 1.0 / (step + 1))
        optimizer.step()
        lazy_backend.mark_step()
        compiles.append(int(lazy_backend.stats()["compiles"]))
    return found, compiles


def all_agree() -> None:
    for make, options in OPTIMIZERS:
        for clip in (False, True):
            wanted, _ = trained(make, "cpu", clip)
            got, compiles = trained(partial(make, **options), DEVICE, clip)
            for mine, theirs in zip(got, wanted):
                rtol, atol = (1e-4, 1e-5) if theirs.dtype is torch.float32 else (2e-2, 2e-2)
                same = torch.allclose(mine.cpu(), theirs, rtol=rtol, atol=atol)
                assert same, (make, options, clip, (mine.cpu() - theirs).abs().max())
            late = 4 if make is torch.optim.RAdam else 2  # its formula changes with the number of steps
            assert len(set(compiles[late:])) == 1, (make, options, compiles)
    assert any(kernel.name.startswith("combo") for kernel in triton_engine._interpreted) or torch.cuda.is_available()


def test_optimizers_train_as_on_the_cpu_and_compile_once() -> None:
    assert "gives up" not in children.call(all_agree, engine="triton").stderr
