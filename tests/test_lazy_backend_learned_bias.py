"""Attention with a bias that is learned, which PyTorch computes as products and a softmax, in place where it can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lazy_backend
from barriers.passes.recompute import recompute_cheap
from barriers.pipeline import run_passes
from codegen.partition import partition
from ir_nodes.kernels import unstored
from lazy_backend import core
from lazy_backend.trace import to_graph
from tests import children

SHAPES = ((6, 64, 16), (6, 64, 16), (6, 64, 16), (1, 64, 64))


def inputs() -> list[Tensor]:
    """Queries, keys, values and a bias by which nothing sees the second half, and one row nothing at all."""
    torch.manual_seed(0)
    made = [torch.randn(shape) for shape in SHAPES]
    made[3][:, :, 32:] = -torch.inf
    made[3][:, 5] = -torch.inf
    return made


def gradients(given: list[Tensor]) -> list[Tensor]:
    q, k, v, bias = (one.detach().requires_grad_() for one in given)
    scores = q @ k.transpose(-2, -1)
    scores.add_(bias)
    out = torch._safe_softmax(scores, -1).bfloat16() @ v.bfloat16()
    return list(torch.autograd.grad(out.float().square().sum(), (q, k, v, bias)))


def test_its_probabilities_are_made_again_from_the_scores() -> None:
    """That the bias is added to the scores in place, and rows that see nothing are zeroed in place, is no reason against it."""
    held = [one.to("lazysched") for one in inputs()]
    made = gradients(held)
    graph, _ = run_passes(to_graph(core.get().trace_for([*made, *held], 0)))
    softmax = next(node for node in graph.nodes if node.name == "_softmax")
    recompute_cheap(graph, partition)
    again = [node.name for node in graph.nodes if node.again]
    assert all(again.count(name) == 1 for name in ("add", "_softmax", "isneginf", "all", "where")), again
    assert softmax.writes[0].value.buffer.index in unstored(graph, partition(graph))
    lazy_backend.mark_step()


def equals_eager() -> None:
    wanted = gradients(inputs())
    for _ in range(2):
        got = gradients([one.to("lazysched") for one in inputs()])
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("engine", ["aten", "triton"])
def test_gradients_are_eager_modes(engine: str) -> None:
    assert "gives up" not in children.call(equals_eager, engine=engine).stderr
