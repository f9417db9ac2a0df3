"""An optimisation that raises costs its own gain, not the user's step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import lazy_backend
from barriers.pipeline import PassFailed, run_passes
from ir_nodes import Graph, settings
from ir_nodes.verify import VerificationError
from lazy_backend import flush
from tests.device import DEVICE


def half_done(graph: Graph) -> Graph:
    """Rewrites some of the graph, then fails."""
    graph.nodes[-1].args = ()
    del graph.nodes[0]
    raise KeyError("a node without a place")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    real, asked = flush.ordered_passes, []

    def passes(*args: Any) -> list[Any]:
        asked.append(args)
        return [*real(*args), half_done]

    monkeypatch.setattr(flush, "ordered_passes", passes)
    return asked


def test_the_step_runs_without_optional_passes_and_the_user_is_told(failing: list[Any]) -> None:
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    mine = x.to(DEVICE)
    lazy_backend.mark_step()
    failing.clear()

    def step(t: torch.Tensor) -> torch.Tensor:
        return (t.sin() * 3 + t.sum(0)).softmax(1)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = [step(mine).cpu() for _ in range(2)]
    assert all(torch.allclose(one, step(x), rtol=1e-5, atol=1e-6) for one in made)
    (text,) = [str(one.message) for one in seen if issubclass(one.category, RuntimeWarning)]
    assert "the pass half_done failed, KeyError" in text and "a node without a place" in text and "please report" in text
    assert len(failing) == 1, "the second step finds the program of the first"


def test_schedules_hold_without_passes(failing: list[Any]) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(6, 6), torch.randn(3, 6)
    mine, inputs = weight.to(DEVICE).requires_grad_(), x.to(DEVICE)
    lazy_backend.mark_step()
    with pytest.warns(RuntimeWarning, match="half_done"), lazy_backend.segment("product"):
        loss = (inputs @ mine).tanh().sum()
        loss.backward()
        found = mine.grad.cpu()
    theirs = weight.clone().requires_grad_()
    (x @ theirs).tanh().sum().backward()
    torch.testing.assert_close(found, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_pass_is_named_and_a_verifier_is_not_silenced() -> None:
    with pytest.raises(PassFailed, match="the pass half_done failed, IndexError"):
        run_passes(Graph(), [half_done])

    def forgets(graph: Graph) -> Graph:
        graph.nodes.pop(0)
        return graph

    x = torch.ones(3, device=DEVICE)
    lazy_backend.mark_step()
    with pytest.MonkeyPatch.context() as patch, settings.override(verify=True):
        patch.setattr(flush, "ordered_passes", lambda *args: [forgets])
        held = x.exp() + 1
        with pytest.raises(RuntimeError, match="after forgets"):
            lazy_backend.mark_step()
        del held
    assert issubclass(VerificationError, Exception)
