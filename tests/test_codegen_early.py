"""What may begin while a recording is made shares no kernel with what can't, where the loop waits for its steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lazy_backend
from codegen import early
from codegen.combo import combine
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
    monkeypatch.setattr(early, "WORTH", 0.0)
    with settings.override(engine="aten", start_early="auto", auto_barrier=False):
        core.configure(core.get())
        torch.ones(1, device=DEVICE).neg_()
        lazy_backend.mark_step()  # whether somebody waited before this test does not matter any more
        found.clear()
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


def chapters(made: Plan) -> list[set[int]]:
    """Of each kernel and each shared launch, those that its nodes lie in."""
    return [{node.chapter for node in step.nodes} for step in made.steps if isinstance(step, KernelStep)]


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


def cast(reads: bool, width: int) -> None:
    """Three steps of layers whose weights autocast casts, each where it is used."""
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(12)]).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = torch.randn(64, width).to(DEVICE)
    for _ in range(3):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item() if reads else lazy_backend.mark_step()


def test_no_launch_waits_for_what_is_recorded_much_later_where_losses_are_read(compiled: list[Graph]) -> None:
    cast(True, 32)
    graph = compiled[-1]
    assert max(node.chapter for node in graph.nodes) > 6
    assert max(map(len, chapters(combine(plan(graph))))) <= max(map(len, chapters(plan(graph))))
    known, before = [node.chapter for node in graph.nodes], len(combine(plan(graph)).steps)
    for node in graph.nodes:
        node.chapter = 0
    together = combine(plan(graph))
    assert len(together.steps) < before
    for node, chapter in zip(graph.nodes, known):
        node.chapter = chapter
    assert max(map(len, chapters(together))) > 4, "without chapters they would share launches"


def test_a_recording_has_one_chapter_where_nobody_waits(compiled: list[Graph]) -> None:
    cast(False, 33)
    assert not any(node.chapter for node in compiled[-1].nodes)


class Loop:
    """Trains one weight, whose loss it may read at every step."""

    def __init__(self, compiled: list[Graph], width: int) -> None:
        self.compiled, self.losses, self.begun = compiled, list[Tensor](), list[int]()
        self.weight = torch.randn(width, width).to(DEVICE).requires_grad_()
        self.optimizer = torch.optim.SGD([self.weight], lr=1e-4)

    def steps(self, count: int, reads: bool) -> int:
        """How many programs were compiled for them."""
        before = len(self.compiled)
        for _ in range(count):
            loss = (self.weight @ self.weight).tanh().square().sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            lazy_backend.mark_step()
            self.losses.append(loss.detach())
            if reads:
                loss.item()
            self.begun.append(lazy_backend.stats()["early_starts"])
        return len(self.compiled) - before


def test_a_loop_that_begins_to_wait_is_compiled_anew_once(compiled: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(compiled, 16)
    steps, begun = loop.steps, loop.begun
    monkeypatch.setattr(early, "SHARE", 2.0)  # so that it begins nothing as it is compiled first
    steps(4, reads=False)
    assert steps(100, reads=False) == 0
    monkeypatch.setattr(early, "SHARE", 0.0)
    assert steps(60, reads=True) == 0, "it may be an evaluation"
    assert steps(2, reads=False) == 0 and steps(90, reads=True) == 1
    assert any(node.stage for node in compiled[-1].nodes) and begun[-1] > begun[-8] > begun[-20]
    monkeypatch.setattr(early, "SHARE", 2.0)
    assert steps(250, reads=False) == 0 and steps(10, reads=False) == 1, "nobody waits any more"
    assert not any(node.stage for node in compiled[-1].nodes)
    assert steps(1000, reads=True) == 0 and steps(40, reads=True) == 1, "each time it takes longer"
    losses = torch.stack(loop.losses).cpu()
    assert losses.isfinite().all() and (losses.diff() < 0).all()


@pytest.mark.parametrize("every", [1000, 10])
def test_a_loop_that_seldom_waits_is_compiled_anew(compiled: list[Graph], monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """As one that prints the first loss, or every tenth."""
    monkeypatch.setattr(early, "SHARE", 0.0)
    loop = Loop(compiled, 18 + len(str(every)))
    torch.ones(3).to(DEVICE).sum().item()
    assert loop.steps(1, reads=False) == 1 and any(node.stage for node in compiled[-1].nodes)
    assert loop.steps(40, reads=False) == 0 and sum(loop.steps(1, reads=step % every == 0) for step in range(60)) == 1
    assert not any(node.stage for node in compiled[-1].nodes)


def test_what_was_kept_apart_in_vain_is_undone_where_nobody_waits(compiled: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "SHARE", 2.0)
    loop = Loop(compiled, 30)
    torch.ones(3).to(DEVICE).sum().item()
    assert loop.steps(1, reads=True) == 1 and any(node.stage for node in compiled[-1].nodes)
    assert loop.steps(100, reads=True) == 0
    assert loop.steps(80, reads=False) == 1 and not any(node.stage for node in compiled[-1].nodes)


def test_a_loop_is_not_compiled_again_and_again(compiled: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing may begin early in any case, or nothing is to be apart."""
    monkeypatch.setattr(early, "SHARE", 2.0)
    x = torch.randn(16, 16).to(DEVICE)
    for disabled, most in ((frozenset(), 2), (frozenset({"early_kernels"}), 1)):
        with settings.override(disable=disabled):
            before = len(compiled)
            for step in range(500):
                total = (x @ x).tanh().sum()
                lazy_backend.mark_step()
                if step > 2:
                    total.item()
        assert len(compiled) - before == most, (disabled, len(compiled) - before)


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
