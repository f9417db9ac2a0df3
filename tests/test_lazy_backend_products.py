"""A training step whose products run by algorithms of the library's gives the numbers of one whose products ATen runs. On a GPU
the library is judged, in steps that replay; elsewhere one that multiplies on the CPU stands for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import children
import pytest
import torch
import torch.nn.functional as F
from cublaslt import multiplying
from torch import nn

import lazy_backend
from codegen import products
from ir_nodes import settings
from tests.device import DEVICE, ON_GPU

STEPS, LAST = 10 if ON_GPU else 3, 3
"""The first runs by itself, the second has a momentum; the last ones replay."""


class Block(nn.Module):
    def __init__(self, width: int, relu: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = F.relu if relu else F.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def trained(device: str, rows: int, width: int, after: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    """Losses, then parameters. ``after``: called after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(width, False), Block(width, True), nn.Linear(width, 2 * width, bias=False)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        after()
    return [one.detach().cpu() for one in (*losses, *model.parameters())]


def by_the_library() -> None:
    """Runs in a process whose engine is Triton's interpreter: every product is the library's second suggestion."""
    with multiplying() as (functions, chosen), settings.override(autotune=True):
        ours = trained(DEVICE, 48, 32)
    multiplied = len(functions.calls)
    for got, wanted in zip(ours, trained("cpu", 48, 32)):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=5e-3)
    assert {"mm", "addmm", "_addmm_activation"} <= set(chosen) and multiplied > STEPS * 10, (chosen, multiplied)


@pytest.mark.skipif(ON_GPU, reason="on a GPU the library itself is judged")
def test_a_training_step_by_the_librarys_algorithms() -> None:
    done = children.call(by_the_library, engine="triton", device="cpu")
    assert "gives up" not in done.stderr, done.stderr


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: the library itself multiplies, and steps replay")
def test_replayed_steps_run_the_librarys_algorithms_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain, decide = products.launch, products.decide

    def launch(*given: Any) -> None:
        calls.append(1)
        plain(*given)

    def never_aten(names: Any, times: Any, better: float) -> str:
        return decide(names[1:], times[1:], better) if any(times[1:]) else names[0]

    monkeypatch.setattr(products, "launch", launch)
    monkeypatch.setattr(products, "decide", never_aten)
    monkeypatch.setattr(products, "SMALLEST", 1 << 28)
    before, counted = lazy_backend.stats()["graphs_replayed"], list[int]()
    with settings.override(autotune=True, cache_dir=tmp_path, start_early="never"):
        ours = trained(DEVICE, 1040, 512, lambda: counted.append(len(calls)))  # a size that no other test has
    assert counted[0] and counted[-LAST] == counted[-1], f"a step that replays runs no Python: {counted}"
    assert lazy_backend.stats()["graphs_replayed"] >= before + LAST
    assert list((tmp_path / "kernels").glob("multiply_*.json"))
    for mine, wanted in zip(ours, trained("cuda", 1040, 512)):
        torch.testing.assert_close(mine, wanted, rtol=2e-2, atol=5e-3)
