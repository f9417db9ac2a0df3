"""Values that would wait for backward are made again by kernels that read what they come from; numbers stay bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import execute
from hypothesis import HealthCheck, given, settings

from barriers.passes import hold_less as module
from barriers.passes.hold_less import hold_less
from barriers.passes.recompute import recompute_cheap
from codegen.explanation import Explanation, explain
from codegen.fuse import plan
from codegen.partition import partition
from ir_nodes import Graph
from ir_nodes.estimate import CUDA
from ir_nodes.kernels import Kernel
from ir_nodes.own import DROPPED
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify
from tests import programs
from tests.optimised import SameNumbers, assert_equals_eager
from tests.recording import Recorder, Recording


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests hold little memory, and launches are most of their time."""
    monkeypatch.setattr(module, "ENOUGH", 0)
    monkeypatch.setattr(module, "LEAST", 1 << 10)
    monkeypatch.setattr(module, "PART", 1.0)


def training(layers: int = 4, gated: bool = False, norm: bool = False) -> Recording:
    """Forward and backward of products with an activation between; gives the weights' gradients."""
    torch.manual_seed(0)
    x = torch.randn(256, 12) / 7
    ups, downs = torch.randn(layers, 12, 16) / 4, torch.randn(layers, 16, 12) / 4
    with Recorder() as recorder:
        weights = [one.detach().requires_grad_() for one in (*ups.unbind(), *downs.unbind())]
        y = x
        for up, down in zip(weights, weights[layers:]):
            y = F.layer_norm(y, (12,)) if norm else y
            z = y @ up
            y = y + (F.silu(z) * (y @ (up + 1.0)) if gated else F.gelu(z)) @ down
        grads = torch.autograd.grad(y.square().sum(), weights)
    return recorder.finish([*grads, x, ups, downs])


def facts(graph: Graph) -> Explanation:
    return explain(graph, plan(graph), CUDA)


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"norm": True}])
def test_activations_are_made_again_in_kernels_that_are_there_anyway(options: dict[str, bool]) -> None:
    plain, recording = training(**options), training(**options)  # type: ignore[arg-type]
    graph = hold_less(recording.graph, partition)
    again = sum(node.joins is not None for node in graph.nodes)
    assert again >= 3
    assert_equals_eager(graph, recording)
    (kernels, steps, held, moved), (fewer, shorter, less, more) = (
        (one.kernels, len(one.steps), max(one.held), one.moved) for one in map(facts, (plain.graph, graph)))
    assert fewer <= kernels and shorter <= steps and less < held
    assert more - moved <= again * 256 * 16 * 4 + 4096, "only what is made again is written"
    memory, without = execute(recording, plan(graph)), execute(plain, plan(plain.graph))
    for value, same in zip(graph.outputs(), plain.graph.outputs()):
        assert torch.equal(memory[value.buffer.index], without[same.buffer.index])


def attending(p: float, cast: bool) -> Recording:
    """Forward and backward of four layers of attention as products and softmax, with dropout; gives the inputs' gradients."""
    torch.manual_seed(0)
    given = torch.randn(4, 3, 64, 8).unbind()
    with Recorder() as recorder:
        q, k, v, w = (one.detach().requires_grad_() for one in given)
        y = w
        for _ in range(4):
            scores = (y * q) @ k.transpose(-2, -1)
            y = (torch.tanh(scores / 3) * 3 if cast else scores).softmax(-1)
            y = torch.native_dropout(y, p, True)[0] if p else y
            y = (y.double() @ v.double()).float() if cast else y @ v
        grads = torch.autograd.grad(y.square().sum(), (q, k, v, w))
    return recorder.finish([*grads, *given])


@pytest.mark.parametrize("p, cast", [(0.3, False), (1.0, False), (0.3, True), (0.0, True)])
def test_probabilities_are_made_again_where_their_softmax_is(p: float, cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing may be spent: that softmax need not be stored pays for the write. Dropout takes its mask again."""
    monkeypatch.setattr(module, "PART", 0.0)
    plain, recording = attending(p, cast), attending(p, cast)
    for one in (plain, recording):
        recompute_cheap(one.graph, partition)
    graph = hold_less(recording.graph, partition)
    verify(graph)
    made = [node.target for node in graph.nodes if node.joins is not None]
    assert made == 3 * [*[DROPPED] * (p > 0), *["aten::_to_copy"] * cast], "not the last layer's, used where the most is held"
    without, shared = facts(plain.graph), facts(graph)
    assert shared.kernels <= without.kernels and max(shared.held) < max(without.held)
    memory, other = execute(recording, plan(graph)), execute(plain, plan(plain.graph))
    for value, same in zip(graph.outputs(), plain.graph.outputs()):
        assert torch.equal(memory[value.buffer.index], other[same.buffer.index])


def test_it_takes_no_more_than_a_part_of_the_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 1e-9)
    recording = training()
    assert not any(node.again for node in hold_less(recording.graph, partition).nodes)


@pytest.mark.parametrize("why", ["a schedule", "little"])
def test_it_says_why_a_graph_stays_as_it_is(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, remarks = training(), Remarks()
    nodes = list(recording.graph.nodes)
    if why == "a schedule":
        nodes[-1].stage = 1
    else:
        monkeypatch.setattr(module, "ENOUGH", 1 << 28)
    assert all(one is other for one, other in zip(hold_less(recording.graph, partition, remarks).nodes, nodes, strict=True))
    ((remark, _),) = remarks.all()
    assert remark.optimisation == "hold_less" and not remark.done and remark.why


def test_a_copy_that_would_not_join_its_kernel_is_taken_back() -> None:
    recording, remarks = training(), Remarks()
    calls = []

    def apart(graph: Graph) -> list[Kernel]:
        calls.append(graph)
        if len(calls) == 1:
            return partition(graph)
        return [Kernel((node,), one.fused, one.stores) for one in partition(graph) for node in one.nodes]

    graph = hold_less(recording.graph, apart, remarks)
    assert not any(node.again for node in graph.nodes)
    assert any(not one.done for one, _ in remarks.all())
    assert_equals_eager(graph, recording)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs.steps(barriers=False))
def test_random_programs_still_equal_eager(program: list[programs.Step]) -> None:
    module.LEAST = 1
    tensors = programs.inputs("cpu")
    with SameNumbers() as recorder:
        held = programs.interpret(program, tensors)
    recording = recorder.finish(held[::2])
    assert_equals_eager(hold_less(recording.graph, partition), recording)
