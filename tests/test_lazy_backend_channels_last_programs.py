"""Random programs of convolutions and what may lie between them give eager mode's numbers, gradients included, while images are
channels_last in memory."""

from __future__ import annotations

import random
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lazy_backend
from barriers.passes import channels_last
from ir_nodes import Graph, settings
from lazy_backend import flush
from tests.device import DEVICE, ON_GPU

PROGRAMS, AT_LEAST = 60, 8
"""How many, and in how many of them images move."""
Op = Callable[[Tensor], Tensor]


def operations(draws: random.Random, leaf: Callable[..., Tensor], channels: int) -> list[Op]:
    """What may come next, behind ``channels`` channels."""
    halves = channels % 2 == 0
    kernel, stride, made = draws.choice([1, 3]), draws.choice([1, 1, 2]), draws.choice([1, 4, 8])
    mode, part = draws.choice(["nearest", "bilinear"]), draws.randrange(2)
    convolutions: list[Op] = [
        lambda x: F.conv2d(x, leaf(made, channels, kernel, kernel), None, stride, kernel // 2),
        lambda x: F.conv2d(x, leaf(made, channels, kernel, kernel), leaf(made), padding=kernel // 2),
        lambda x: F.conv_transpose2d(x, leaf(channels, 4, 2, 2), stride=2),
    ]
    return [
        *convolutions, *convolutions, F.relu, lambda x: x.clone().relu_(), lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
        lambda x: F.batch_norm(x, None, None, training=True) if x.numel() > channels else x.tanh(),
        lambda x: F.interpolate(x, scale_factor=2, mode=mode), lambda x: F.adaptive_avg_pool2d(x, (3, 1)),
        lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: F.avg_pool2d(x, 2, 1, 1, count_include_pad=False),
        lambda x: torch.cat([x, x.sigmoid()], 1) if channels < 16 else x * 2,
        lambda x: x.chunk(2, 1)[part] if halves else x + 1,
        lambda x: x.unflatten(1, (2, channels // 2)).transpose(1, 2).reshape(x.shape) if halves else x.flip(2),
        lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
        lambda x: x.permute(0, 2, 3, 1).contiguous().sin().permute(0, 3, 1, 2),
        lambda x: (x.flatten(1) * 0.5).view_as(x), lambda x: F.pad(x, (1, 0, 0, 1)),
    ]


def run(seed: int, device: str) -> list[Tensor]:
    """Some images, the last of all, and gradients. Raises RuntimeError for a program whose sizes don't fit."""
    draws, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    leaves: list[Tensor] = []

    def leaf(*size: int) -> Tensor:
        leaves.append(torch.randn(size, generator=generator).to(device).requires_grad_(draws.random() < 0.7))
        return leaves[-1]

    sizes = draws.choice([(1, 1), (4, 4), (5, 3), (6, 8), (1, 6)])
    images, held = [leaf(draws.randint(1, 3), draws.choice([1, 3, 4, 8, 16]), *sizes)], []
    for _ in range(draws.randint(3, 9)):
        x = draws.choice(images[-3:])
        made = draws.choice(operations(draws, leaf, x.shape[1]))(x)
        if draws.random() < 0.3:
            made = made.clone()
            made[:, ::2].mul_(0.5)
        images.append(made)
        held += [made] if draws.random() < 0.15 else []
    outs = [*held, images[-1]]
    loss = sum(one.square().mean() for one in outs)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    if device == DEVICE:
        lazy_backend.mark_step()
    return [one.detach().cpu() for one in (*outs, *(one.grad for one in leaves if one.grad is not None))]


@pytest.mark.skipif(ON_GPU, reason="TF32 rounds more than a wrong element might differ")
def test_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = 0

    def watch(graph: Graph, remarks: Any) -> None:
        nonlocal moved
        moved += any(one.done and one.optimisation == "channels_last" for one, _ in remarks.all())

    monkeypatch.setattr(channels_last, "WORTH", 0)
    monkeypatch.setattr(flush, "on_gpu", lambda: True)
    monkeypatch.setattr(flush, "watchers", [watch])
    with settings.override(engine="triton", disable=frozenset({"varying"})):
        for seed in range(PROGRAMS):
            try:
                wanted = run(seed, "cpu")
            except RuntimeError:
                continue
            for ours, theirs in zip(run(seed, DEVICE), wanted, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3), f"program {seed}"
    assert moved >= AT_LEAST, moved
