"""Cached steps that replay as CUDA graphs give eager's numbers whatever changes between them. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazy_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def mlp(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(*layers)


def replays() -> int:
    return lazy_backend.stats()["graphs_replayed"]


def train(device: str, steps: int, dropout: float = 0.0, set_to_none: bool = True, keep: bool = False) -> torch.Tensor:
    """Losses of a small model whose learning rate changes at every step."""
    model = mlp(dropout=dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(11)
    losses, kept = [], []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        x = torch.randn(8, 32, generator=generator).to(device)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if step == steps // 2:
            with torch.no_grad():
                next(iter(model.parameters())).mul_(0.5)
        losses.append(loss.detach())
        if keep:
            kept.append(x)
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("options", [{}, {"set_to_none": False}, {"keep": True}, {"dropout": 0.1}])
def test_training_replays_and_equals_eager(options: dict[str, float | bool]) -> None:
    eager = train("cuda", 24, **options)  # type: ignore[arg-type]
    before, compiles = replays(), lazy_backend.stats()["compiles"]
    lazy = train("lazysched", 24, **options)  # type: ignore[arg-type]
    assert replays() - before >= 12
    assert lazy_backend.stats()["compiles"] - compiles < 12
    torch.testing.assert_close(lazy, eager, rtol=2e-4, atol=2e-5)


def test_results_that_are_kept_are_not_overwritten() -> None:
    model, inputs = mlp().to("lazysched"), torch.randn(12, 8, 32)
    twin = mlp().cuda()
    before = replays()
    with torch.no_grad():
        kept = []
        for x in inputs:
            kept.append(model(x.to("lazysched")))
            lazy_backend.mark_step()
        assert replays() - before >= 6
        for x, y in zip(inputs, kept):
            torch.testing.assert_close(y.cpu(), twin(x.cuda()).cpu(), rtol=1e-4, atol=1e-5)


def test_what_another_library_sees_stays_as_it_was() -> None:
    model, x = mlp().to("lazysched"), torch.randn(8, 32, device="lazysched")
    with torch.no_grad():
        for _ in range(6):
            y = model(x)
            lazy_backend.mark_step()
        seen = torch.from_dlpack(y)
        copy = seen.clone()
        for scale in (2.0, 3.0):
            x.mul_(scale)
            lazy_backend.mark_step()
            y = model(x)
            lazy_backend.mark_step()
        torch.cuda.synchronize()
        assert torch.equal(seen, copy)


def test_a_stream_of_its_own() -> None:
    model, x = mlp().to("lazysched"), torch.randn(8, 32, device="lazysched")
    with torch.no_grad():
        for _ in range(5):
            y = model(x)
            lazy_backend.mark_step()
        with torch.lazysched.stream(torch.lazysched.Stream()):
            z = model(x)
            lazy_backend.mark_step()
        torch.lazysched.synchronize()
        torch.testing.assert_close(y.cpu(), z.cpu())


def test_graphs_of_one_stream_share_their_memory() -> None:
    """What one uses between its launches and then drops, the next uses too."""
    from lazy_backend import graphs

    def body(_: int) -> None:
        torch.empty(1 << 26, dtype=torch.uint8, device="cuda").fill_(1)

    lazy_backend.mark_step()
    kept = [graphs.capture(0, body)]
    before = torch.cuda.memory_reserved()
    kept += [graphs.capture(0, body) for _ in range(3)]
    assert torch.cuda.memory_reserved() == before
