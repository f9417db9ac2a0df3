"""Attention's projections under autocast train alike whether products are joined or not, and a factor of 1 is a constant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazy_backend
from ir_nodes import settings
from lazy_backend import flush
from tests.device import DEVICE, ON_GPU

WIDTH, STEPS = 64, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(2, (2, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(self.out(made) + x)


def train(device: str, batch: int, autocast: bool = True) -> list[Tensor]:
    """Losses, then parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).to(device)
    if not autocast:
        model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x = torch.randn(batch, 64, WIDTH, generator=draws).to(next(model.parameters()))
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(x).square().sin().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [one.detach().cpu().double() for one in (*losses, *model.parameters())]


@pytest.mark.parametrize("joined", [True, False])
def test_training_with_and_without(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "replays", lambda: True)
    found: list[list[str]] = []
    watch = lambda graph, remarks: found.append([remark.why for remark, _ in remarks.all()  # noqa: E731
                                                 if remark.done and remark.optimisation == "join_products"])
    batch = 2 if joined else 3  # or the second would find what the first has compiled
    flush.watchers.append(watch)
    try:
        with settings.override(engine="triton", autotune=True, verify=True, disable=set() if joined else {"join_products"}):
            ours = train(DEVICE, batch)
    finally:
        flush.watchers.remove(watch)
    told = " ".join(why for whys in found for why in whys)
    assert bool(told) == joined, found
    if joined and not ON_GPU:  # on a GPU it depends on which library's attention PyTorch takes
        assert "one product by matrices" in told and "of weights, and of their input," in told, told
    for mine, theirs, true in zip(ours, train("cpu", batch), train("cpu", batch, False)):
        off, before = float((mine - true).norm()), float((theirs - true).norm())
        assert off <= 1.5 * before + 2e-3 * float(true.norm()), (off, before)


def test_a_factor_of_one_is_a_constant_and_others_are_not() -> None:
    x, y = (torch.randn(7, 5).to(DEVICE) for _ in range(2))

    def compiles(*alphas: float) -> int:
        before = lazy_backend.stats()["compiles"]
        for alpha in alphas:
            made = torch.add(x, y, alpha=alpha)
            torch.testing.assert_close(made.cpu(), torch.add(x.cpu(), y.cpu(), alpha=alpha))
        return lazy_backend.stats()["compiles"] - before

    assert compiles(1, 1) == 1 and compiles(2, 3, 4) == 1
    assert compiles(0.5, 1.0, 2.5) == 1, "a float is a number to fill in, whatever it is"
    assert compiles(1, 5, 1.5) == 0
