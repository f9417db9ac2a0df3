"""CUDA graphs in which ATen's ops draw random numbers give what eager mode draws. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazy_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def replays() -> int:
    return lazy_backend.stats()["graphs_replayed"]


class Attentive(nn.Module):
    """Draws in kernels and in ATen's attention by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            q, k, v = (one.unflatten(-1, (2, 32)).transpose(1, 2) for one in self.qkv(self.norm(x)).split(64, -1))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
            x = x + torch.nn.functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x


def attend(device: str, steps: int, dtype: torch.dtype | None, parted: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = Attentive().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for step in range(steps):
        if step == 15:
            torch.manual_seed(99)
        x = torch.randn(4, 32, 64, generator=generator).to(device)
        with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
            loss = (model(x) - x.roll(1, 1)).square().mean()
        if parted:
            lazy_backend.mark_step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack([loss.float().cpu() for loss in losses])


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("parted", [False, True])
def test_attention_that_drops_out_replays_and_draws_as_eager_mode_does(dtype: torch.dtype | None, parted: bool) -> None:
    """A whole step is one graph, if forward and backward belong to one recording. Else efficient attention, which float32 asks
    for, runs by itself: its backward needs the seed in the host's memory then."""
    eager = attend("cuda", 24, dtype, parted)
    before = replays()
    lazy = attend("lazysched", 24, dtype, parted)
    fewest, most = (0, 999) if parted and dtype is None else (16, 999) if parted else (16, 24)
    assert fewest <= replays() - before <= most
    torch.testing.assert_close(lazy, eager, rtol=2e-3, atol=2e-4)


def test_draws_of_atens_own_follow_their_generator() -> None:
    """In a graph, between kernels that draw, from the default generator and from one that is handed over."""

    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(7)
        own = torch.Generator(device).manual_seed(3)
        x, seen = torch.ones(4096, device=device), []
        for step in range(12):
            if step == 8:
                own.manual_seed(3)
            y = torch.nn.functional.dropout(x, 0.5) + torch.empty_like(x).exponential_(generator=own)
            z = torch.bernoulli(torch.full_like(x, 0.3)) + torch.nn.functional.dropout(y, 0.25)
            for _ in range(3):
                z = (z.view(64, 64) @ x.view(64, 64) / 64).flatten() + torch.empty_like(x).normal_(generator=own)
            lazy_backend.mark_step()
            seen.append(z.cpu())
        return [*seen, torch.rand(4, device=device).cpu(), torch.rand(4, device=device, generator=own).cpu()]

    before = replays()
    for ours, theirs in zip(draw("lazysched"), draw("cuda")):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert replays() > before
