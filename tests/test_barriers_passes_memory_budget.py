"""Under a budget of memory, values are computed again; numbers stay bit for bit."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any, Callable

import children
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as effort

from barriers.model import memory
from barriers.passes.memory_budget import fit_budget
from codegen.explanation import explain
from codegen.fuse import plan
from codegen.partition import partition
from ir_nodes import Graph
from ir_nodes.estimate import CUDA
from ir_nodes.remarks import Remarks
from tests import programs
from tests.optimised import SameNumbers, assert_equals_eager, names
from tests.recording import Recorder, Recording


def recorded(program: Callable[..., Any], *inputs: torch.Tensor) -> Recording:
    with Recorder() as recorder:
        result = program(*inputs)
    return recorder.finish([*(result if isinstance(result, tuple) else [result]), *inputs])


def peak(graph: Graph) -> int:
    return max(memory(graph, graph.nodes), default=0)


def layers(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tower of residual blocks, forward and backward."""
    leaves = [weight.detach().requires_grad_() for weight in weights]
    for up, down in zip(leaves[::2], leaves[1::2]):
        x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down
    return torch.autograd.grad(x.square().sum(), leaves)


def tower(depth: int = 4) -> list[torch.Tensor]:
    sizes = [size for _ in range(depth) for size in ((64, 256), (256, 64))]
    return [torch.randn(256, 64), *(torch.randn(size) / 16 for size in sizes)]


def fitted(budget: float, *inputs: torch.Tensor) -> tuple[int, Graph]:
    """The peak without a budget, and the graph that keeps to ``budget`` of it."""
    recording = recorded(layers, *inputs)
    before = peak(recording.graph)
    graph = fit_budget(recording.graph, int(budget * before))
    assert_equals_eager(graph, recording)
    return before, graph


@pytest.mark.parametrize("budget", [0.9, 0.75, 0.6])
def test_a_tower_fits(budget: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before, graph = fitted(budget, *tower())
    assert peak(graph) <= budget * before
    assert any(node.again for node in graph.nodes)


def test_what_costs_little_goes_first() -> None:
    _, a_little = fitted(0.9, *tower())
    _, a_lot = fitted(0.6, *tower())
    again = [node.name for node in a_little.nodes if node.again]
    assert again and "mm" not in again
    assert "mm" in [node.name for node in a_lot.nodes if node.again]


def test_a_chain_stays_right() -> None:
    """Each link reads the last one, which is gone by then too; every link is computed twice at most."""
    def program(x: torch.Tensor) -> torch.Tensor:
        chain = [x.exp()]
        for _ in range(6):
            chain.append(chain[-1].cos())
        for link in reversed(chain):
            x = x * link
        return x

    recording = recorded(program, torch.rand(1 << 12))
    before = peak(recording.graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = fit_budget(recording.graph, before // 2)
    assert_equals_eager(graph, recording)
    assert peak(graph) <= before


def test_without_need_nothing_changes() -> None:
    recording = recorded(layers, *tower())
    was = names(recording.graph)
    assert names(fit_budget(recording.graph, peak(recording.graph))) == was


def test_too_small_a_budget_says_what_is_left_and_where() -> None:
    with pytest.warns(RuntimeWarning, match=r"asks for 1,000 bytes, but .* are held while `\w+` float32\[.*smaller batches"):
        recording = recorded(layers, *tower())
        fit_budget(recording.graph, 1000)


def test_operands_that_are_overwritten_meanwhile_are_not_read_again() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sine = y.sin()
        y.mul_(2)  # a copy of the sine would read this
        z = x.exp() + x.cos() + x.sin()
        return z * sine

    recording = recorded(program, torch.rand(4096), torch.rand(4096))
    with pytest.warns(RuntimeWarning):
        graph = fit_budget(recording.graph, 1)
    assert_equals_eager(graph, recording)
    assert names(graph).count("sin") == 2


def test_nothing_is_drawn_twice() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        return (x.exp() + x.cos() + x.sin()) * noise

    recording = recorded(program, torch.rand(4096))
    with pytest.warns(RuntimeWarning):
        assert names(fit_budget(recording.graph, 1)).count("rand_like") == 1


@pytest.mark.parametrize("budget", [0.85, 0.7])
def test_the_kernels_memory_fits_too(budget: float) -> None:
    """What stays in kernels takes none; casts that readers do for themselves keep what they cast."""
    def program(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return layers(x, *weights)

    def planned(graph: Graph) -> int:
        return max(explain(graph, plan(graph), CUDA).held)

    most = planned(recorded(program, *tower(6)).graph)
    recording = recorded(program, *tower(6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = fit_budget(recording.graph, int(budget * most), partition, remarks := Remarks())
    assert sum(count for _, count in remarks.all()) > 3 and "MEMORY_BUDGET allows no more" in str(remarks.all()[0][0])
    assert_equals_eager(graph, recording)
    assert planned(graph) <= 1.02 * budget * most


@effort(max_examples=60, deadline=None)
@given(programs.steps(barriers=False))
def test_any_program_stays_right_under_no_memory_at_all(program: list[programs.Step]) -> None:
    tensors = programs.inputs("cpu")
    with SameNumbers() as recorder:
        held = programs.interpret(program, tensors)
    recording = recorder.finish(held[::2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = fit_budget(recording.graph, 1)
    assert_equals_eager(graph, recording)


def train() -> None:
    """Prints the peak of a step and a digest of its gradients."""
    import lazy_backend

    torch.manual_seed(0)
    blocks = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))]
    model = torch.nn.Sequential(*blocks).to("lazysched")
    x = torch.randn(4096, 64).to("lazysched")
    lazy_backend.mark_step()
    torch.lazysched.reset_peak_memory_stats()
    model(x).square().mean().backward()
    lazy_backend.mark_step()
    grads = torch.cat([one.grad.flatten().cpu() for one in model.parameters()])
    print(torch.lazysched.max_memory_allocated(), hash_tensor(grads))


def hash_tensor(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_a_training_step_holds_less_and_gives_the_same_numbers() -> None:
    # On a GPU the peak is cuBLAS's workspace, more than twice of what the step holds.
    most, numbers = children.call(train, engine="aten", device="cpu").stdout.split()
    less, same = children.call(train, engine="aten", device="cpu", memory_budget=int(0.6 * int(most))).stdout.split()
    assert same == numbers
    assert int(less) < 0.65 * int(most)
