"""Nets with batch norm on the device: training curves, running statistics and evaluation as in eager mode, on both engines.

The triton engine runs in a child process, because a program in the cache keeps the engine that made it.
"""

from __future__ import annotations

import copy

import children
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazy_backend
from benchmarks.models import Bottleneck
from codegen import loading, triton_engine
from tests.device import DEVICE, PHYSICAL

pytestmark = pytest.mark.usefixtures("built")


def net() -> nn.Module:
    """One block, then norms without weights, with cumulative statistics and without any."""
    torch.manual_seed(0)
    images = [Bottleneck(3, 4, 2), nn.BatchNorm2d(16, affine=False), nn.Conv2d(16, 6, 1), nn.BatchNorm2d(6, momentum=None)]
    rows = [nn.Linear(24, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 5)]
    return nn.Sequential(*images, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *rows)


def curve(device: str, autocast: bool, channels_last: bool) -> list[torch.Tensor]:
    """Losses of four steps, then the loss in evaluation, then all parameters and statistics."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = copy.deepcopy(net()).to(device, memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    x = torch.randn(6, 3, 9, 9).to(device, memory_format=memory_format)
    y = torch.arange(6).to(device) % 5
    losses = []
    for step in range(5):
        model.train(step < 4)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        if step < 4:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    return [one.cpu() for one in (*losses, *model.parameters(), *model.buffers())]


def same_curves(autocast: bool, channels_last: bool) -> None:
    wanted, got = curve(PHYSICAL, autocast, channels_last), curve(DEVICE, autocast, channels_last)
    bound = 5e-2 if autocast else 1e-3
    for mine, theirs in zip(got, wanted):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


def both_layouts() -> None:
    same_curves(False, False)
    same_curves(True, True)
    assert len(triton_engine._interpreted) + len(loading._loaded) > 20


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_training_is_eager_modes(channels_last: bool) -> None:
    same_curves(False, channels_last)


def test_training_is_eager_modes_in_our_kernels() -> None:
    assert "gives up" not in children.call(both_layouts, engine="triton").stderr


def test_evaluation_leaves_the_statistics_alone() -> None:
    norm = nn.BatchNorm2d(3).to(DEVICE).eval()
    x = torch.randn(2, 3, 4, 4)
    for _ in range(2):
        before = norm.running_mean._version  # type: ignore[union-attr]
        got = norm(x.to(DEVICE))
        norm.running_mean.add_(1.0)  # type: ignore[union-attr]  # after the norm has read it
        after = norm(x.to(DEVICE))
        lazy_backend.mark_step()
        assert norm.running_mean._version > before  # type: ignore[union-attr]
        shift = F.batch_norm(x, torch.ones(3), torch.ones(3)) - F.batch_norm(x, torch.zeros(3), torch.ones(3))
        torch.testing.assert_close(after.cpu() - got.cpu(), shift)
