"""Attention's projections and a gated MLP train alike whether gradients' products add up in place or not."""

from __future__ import annotations

from pathlib import Path

import children
import pytest
import torch
import torch.nn.functional as F
from cublaslt import multiplying
from torch import Tensor, nn

import lazy_backend
from barriers.passes.product_sums import ONTO
from ir_nodes import settings
from lazy_backend import flush
from tests.device import DEVICE, ON_GPU

WIDTH, STEPS = 32, 4 if ON_GPU else 2
LAYERS = (False, True)
SUMS = len(LAYERS) * (2 + 1)
"""Of queries, keys and values two, of a gate and what it lets through one."""


class Layer(nn.Module):
    """``after``: norms come behind residuals, as in BERT, so that these join the sums, else before the products, as in Llama."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.after = after
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.after else self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(1, 2) * WIDTH**-0.5
        x = x + self.out(scores.softmax(-1) @ self.v(y))
        x = self.norm(x) if self.after else x
        y = x if self.after else self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.norm2(x) if self.after else x


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer(after) for after in LAYERS)).to(torch.bfloat16)


def train(device: str, batch: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Losses, then the first step's gradients, then parameters."""
    model = build().to(device=device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draws = torch.Generator().manual_seed(1)
    losses, gradients = [], []
    for _ in range(STEPS):
        loss = model(torch.randn(batch, 8, WIDTH, generator=draws).to(device=device, dtype=dtype)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or [one.grad.clone() for one in model.parameters()]
        optimizer.step()
        losses.append(loss.detach())
    return [one.detach().cpu() for one in (*losses, *gradients, *model.parameters())]


def watched(batch: int, **changes: object) -> tuple[list[Tensor], list[int]]:
    """What training gives, and how many products of each new graph add to another's result."""
    found: list[int] = []
    watch = lambda graph, remarks: found.append(sum(node.target == ONTO for node in graph.nodes))  # noqa: E731
    flush.watchers.append(watch)
    try:
        with settings.override(**{"engine": "triton", "autotune": True, "verify": True, **changes}):
            return train(DEVICE, batch), found
    finally:
        flush.watchers.remove(watch)


def assert_near(ours: list[Tensor], batch: int) -> None:
    """What training gives is about as near to float64's as eager mode's."""
    for mine, theirs, true in zip(ours, train("cpu", batch), train("cpu", batch, torch.float64)):
        off, before = (float((one.double() - true).norm()) for one in (mine, theirs))
        assert off <= 1.5 * before + 2e-3 * float(true.norm()), (off, before)


@pytest.mark.parametrize("added", [True, False])
def test_training_with_and_without(added: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flush, "replays", lambda: True)
    batch = 2 if added else 4  # or the second would find what the first has compiled
    ours, found = watched(batch, disable=set() if added else {"product_sums"})
    assert max(found) == (SUMS if added else 0), found
    assert_near(ours, batch)


def by_the_library() -> None:
    """Runs in a process whose engine is Triton's interpreter: every product is the library's second suggestion."""
    with multiplying() as (functions, chosen):
        ours, found = watched(2)
    assert max(found) == SUMS and chosen.count("addmm_") == sum(found), (found, chosen)
    assert sum(call.beta == 1 for call in functions.calls) >= SUMS * STEPS
    assert_near(ours, 2)


@pytest.mark.skipif(ON_GPU, reason="a library that multiplies on the CPU stands for the GPU's")
def test_training_by_the_librarys_algorithms() -> None:
    done = children.call(by_the_library, engine="triton", device="cpu")
    assert "gives up" not in done.stderr, done.stderr


def test_explain_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "replays", lambda: True)
    model = build().to(DEVICE)

    def step() -> list[Tensor | None]:
        model(torch.zeros(6, 8, WIDTH, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
        return [one.grad for one in model.parameters()]

    with settings.override(engine="triton", autotune=True):
        told = lazy_backend.explain(step).text(everything=True)
    assert "mm and mm and add: the later product adds to what the earlier one has left (4 times)" in told, told
    assert "addmm_ and mm and add: the later product adds to what the earlier one has left (2 times)" in told
    assert "what it is added to is no product's result" in told


@pytest.mark.parametrize("why", ["no graphs", "deterministic", "not asked for"])
def test_where_last_bits_count_or_steps_do_not_replay(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "replays", lambda: why != "no graphs")
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        _, found = watched({"no graphs": 3, "deterministic": 5, "not asked for": 7}[why], autotune=why != "not asked for")
    finally:
        torch.use_deterministic_algorithms(False)
    assert found and not any(found)
