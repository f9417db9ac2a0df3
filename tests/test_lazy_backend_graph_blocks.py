"""Variants of a step have their results in the same memory, one after the other, and no number changes. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lazy_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

WIDTH, TURNS = 1536, 6
LENGTHS = (16, 24, 32, 40)


def tower(device: str, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU()))).to(device)


def gradients(model: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in model.parameters())


def train(device: str, keep: bool = False, width: int = WIDTH) -> tuple[list[float], list[list[Tensor]], list[int]]:
    """Losses of steps on batches of several sizes in turn, gradients kept on the way, and bytes held after each turn."""
    model = tower(device, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    losses, kept, held = [], [], []
    for turn in range(TURNS):
        for length in LENGTHS:
            x = torch.randn(length, width, generator=generator).to(device)
            optimizer.zero_grad()
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if keep and turn % 2 == 0 and length == LENGTHS[1]:
                kept.append([one.grad for one in model.parameters() if one.grad is not None])
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    return [one.item() for one in losses], kept, held


def test_batches_of_many_sizes_hold_the_gradients_memory_once() -> None:
    train("lazysched", width=64)  # products' workspaces, some 64 MiB, are there for good from here on
    before, replays = torch.cuda.memory_allocated(), lazy_backend.stats()["graphs_replayed"]
    losses, _, held = train("lazysched")
    assert lazy_backend.stats()["graphs_replayed"] - replays >= len(LENGTHS) * (TURNS - 3)
    assert max(held) - before < 4.5 * gradients(tower("cpu")), "weights, momenta, gradients, and not gradients for each size"
    torch.testing.assert_close(losses, train("cuda")[0], rtol=1e-4, atol=1e-5)


def test_gradients_of_one_variant_that_are_kept_outlive_the_others() -> None:
    losses, kept, _ = train("lazysched", keep=True)
    wanted, right, _ = train("cuda", keep=True)
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(kept, right, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-3, atol=1e-6)


def test_what_one_variant_made_and_another_changes_in_place() -> None:
    """State that moves from graph to graph: each reads what the other left in memory that both have results in."""

    def run(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        state, seen = torch.randn(1 << 22).to(device), []
        for step in range(24):
            if step % 2:
                state = state.sin().add_(float(step)).mul_(0.5).cos().exp().sub(0.25)
            else:
                state.mul_(0.9).add_(0.1).tanh_().mul_(1.5)
                state = state.clone().sin().mul(1.01).add(0.5).cos()
            seen.append(state[:: 1 << 18].clone())
            if device == "lazysched":
                lazy_backend.mark_step()
        return [one.cpu() for one in seen]

    for mine, theirs in zip(run("lazysched"), run("cuda"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
