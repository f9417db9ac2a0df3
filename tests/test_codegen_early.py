"""What may begin while a recording is made shares no kernel with what can't, where the loop waits for its steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lazy_backend
from codegen import early
from codegen.fuse import plan
from codegen.kernel import KernelStep, Plan
from ir_nodes import Graph, Node, settings
from ir_nodes.remarks import Remarks
from lazy_backend import core, flush

DEVICE = "lazysched"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """The graphs that are compiled, as an engine gets them, where programs may begin early as on a GPU."""
    found: list[Graph] = []

    def watch(graph: Graph, remarks: Remarks) -> None:
        found.append(graph)

    monkeypatch.setattr(flush, "watchers", [watch])
    monkeypatch.setattr(flush, "on_gpu", lambda: True)
    monkeypatch.setattr(flush, "facts", lambda: (False, False, False))
    monkeypatch.setattr(early, "LEAST", 0.0)
    with settings.override(engine="aten", start_early="auto", auto_barrier=False):
        core.configure(core.get())
        yield found
    core.configure(core.get())


def trained(reads: bool, width: int, accumulated: bool = False) -> None:
    """Three steps; ``reads``: each but the first begins after a loss was read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    batch = torch.randn(64, 8).to(DEVICE)
    for _ in range(3):
        loss = model(batch).square().mean()
        optimizer.zero_grad(set_to_none=not accumulated)
        loss.backward()
        optimizer.step()
        loss.item() if reads else lazy_backend.mark_step()


def mixed(made: Plan, late: set[Node]) -> list[KernelStep]:
    """Kernels with some nodes that are ``late`` and some that are not."""
    kernels = [step for step in made.steps if isinstance(step, KernelStep)]
    return [step for step in kernels if 0 < len(late.intersection(step.nodes)) < len(step.nodes)]


def updates(graph: Graph) -> set[Node]:
    """The optimizer's."""
    return {node for node in graph.nodes if node.name.startswith("_foreach") and node.name != "_foreach_zero_"}


@pytest.mark.parametrize("accumulated", [False, True])
def test_backward_shares_no_kernel_with_updates_where_losses_are_read(compiled: list[Graph], accumulated: bool) -> None:
    trained(True, 24 + accumulated, accumulated)
    graph = compiled[-1]
    late = {node for node in graph.nodes if node.stage}
    assert updates(graph) and updates(graph) <= late and len(late) < len(graph.nodes) / 2
    assert not mixed(plan(graph), late)
    for node in graph.nodes:
        node.stage = 0
    assert mixed(plan(graph), late), "without stages, none would have waited anyhow"


def test_updates_stay_in_the_kernels_of_gradients_where_nobody_waits(compiled: list[Graph]) -> None:
    trained(False, 26)
    assert not any(node.stage for node in compiled[-1].nodes)
    assert mixed(plan(compiled[-1]), updates(compiled[-1]))


@pytest.mark.parametrize("start", ["auto", "always"])
def test_they_stay_where_the_optimisation_is_off(compiled: list[Graph], start: str) -> None:
    with settings.override(start_early=start, disable=frozenset({"early_kernels"})):
        trained(True, 27 + 4 * (start == "always"))
    assert not any(node.stage for node in compiled[-1].nodes)


def test_they_stay_in_steps_too_short_to_begin_early(compiled: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LEAST", 2e-3)
    trained(True, 28)
    assert not any(node.stage for node in compiled[-1].nodes)


def test_nothing_is_apart_where_nothing_is_updated(compiled: list[Graph]) -> None:
    """Inference, whose results are read at every step: nothing comes late."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU()).to(DEVICE)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(4, 8).to(DEVICE)).sum().item()
    assert not any(node.stage for node in compiled[-1].nodes)


def test_what_follows_an_update_is_late_too(compiled: list[Graph]) -> None:
    """A second network that reads the first's new parameters, as in adversarial training."""
    weight = torch.randn(16, 16).to(DEVICE).requires_grad_()
    other = torch.randn(16, 16).to(DEVICE)
    for _ in range(3):
        (weight @ other).square().sum().backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight -= 0.001 * weight.grad
            weight.grad = None
            shown = (weight.t() @ other).sum()
        shown.item()
    stages = [node.stage for node in compiled[-1].nodes]
    assert stages == sorted(stages) and 0 < sum(stages) < len(stages)
    assert compiled[-1].nodes[-1].stage == 1
