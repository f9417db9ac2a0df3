"""Layers with a ReLU train alike whether their products apply it or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lazy_backend
from barriers.passes.epilogues import TOGETHER
from ir_nodes import settings
from lazy_backend import core, flush
from tests.device import DEVICE


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 8), nn.Flatten(0))


def train(device: str, batch: int, steps: int = 5) -> list[Tensor]:
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draws = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(batch, 24, generator=draws).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [one.cpu() for one in (*losses, *model.parameters())]


@pytest.mark.parametrize("joined", [True, False])
def test_training_with_and_without(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "replays", lambda: True)
    found: list[str] = []
    batch = 16 if joined else 32  # or the second would find what the first has compiled
    watch = lambda graph, remarks: found.extend(node.target for node in graph.nodes)  # noqa: E731
    flush.watchers.append(watch)
    try:
        with settings.override(engine="triton", disable=frozenset() if joined else frozenset(("epilogues",))):
            ours = train(DEVICE, batch)
    finally:
        flush.watchers.remove(watch)
    products = [target for target in found if target.startswith("aten::addmm") or target == TOGETHER]
    assert products and products.count(TOGETHER) * 3 == (2 * len(products) if joined else 0)
    near = {"rtol": 1e-4, "atol": 1e-5} if core.physical_is_cuda() else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours, train("cpu", batch), **near)


def test_explain_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "replays", lambda: True)
    model = build().to(DEVICE)
    with torch.no_grad(), settings.override(engine="triton"):
        told = str(lazy_backend.explain(lambda: model(torch.zeros(16, 24, device=DEVICE))))
    assert "cuBLAS applies the ReLU to what it has in registers" in told


def test_without_cuda_graphs_no_python_runs_for_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "replays", lambda: False)
    model = build().to(DEVICE)
    with torch.no_grad(), settings.override(engine="triton"):
        told = str(lazy_backend.explain(lambda: model(torch.zeros(16, 24, device=DEVICE))))
    assert "cuBLAS applies" not in told
