"""Whatever measurements choose, a training step gives the same numbers. Imports lazy_backend."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any, Sequence

import children
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazy_backend  # noqa: F401  (registers the device)
from codegen import autotune, benchmark_fusion, templates, triton_engine
from codegen.contest import Contest
from codegen.kernel import Plan
from ir_nodes import Graph

DEVICE = "lazysched"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


def train(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x).float().softmax(-1).square().sum()
        loss.backward()
        optimizer.step()
    return [loss.detach().cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]


def by_chance() -> None:
    """Runs in a process whose engine is Triton's interpreter: every contest is decided by lot."""
    plain = triton_engine.plan
    chosen = {"apart": 0, "products": 0, "tiles": 0}
    lots = random.Random(1)

    def timer(contests: Sequence[Contest]) -> list[list[float]]:
        return [[lots.random() for _ in contest] for contest in contests]

    def plan(graph: Graph, tuning: Any, **_: Any) -> Plan:
        folder = Path(tempfile.mkdtemp())
        sides = benchmark_fusion.sides_of(graph, tuning, "a GPU", folder, timer)
        products = templates.products_of(graph, tuning, "a GPU", folder, timer)
        made = templates.with_tiles(plain(graph, tuning=tuning, sides=sides, products=products), products)
        tuned = autotune.tune(made, "a GPU", folder, timer)
        chosen["apart"] += len(sides)
        chosen["products"] += len(products)
        chosen["tiles"] += sum(one is not other for one, other in zip(made.steps, tuned.steps))
        return tuned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_engine, "plan", plan)
        patch.setattr(benchmark_fusion, "SMALLEST", 1)
        patch.setattr(autotune, "SMALLEST", 1)
        for got, wanted in zip(train(DEVICE), train("cpu")):
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=2e-3)
    assert all(chosen.values()), chosen


def test_a_training_step_does_not_depend_on_what_was_measured() -> None:
    done = children.call(by_chance, engine="triton", device="cpu")
    assert "gives up" not in done.stderr, done.stderr
