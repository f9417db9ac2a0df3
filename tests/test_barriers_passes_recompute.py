"""Cheap values are computed again where that moves fewer bytes, in the kernels that need them; numbers stay bit for bit."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from graphs import execute, typed
from hypothesis import given, settings

from barriers.passes import recompute
from barriers.passes.recompute import recompute_cheap
from codegen.explanation import explain
from codegen.fuse import plan
from codegen.partition import partition
from ir_nodes import Graph
from ir_nodes.estimate import CUDA
from ir_nodes.kernels import Kernel
from ir_nodes.remarks import Remarks
from tests import programs
from tests.optimised import SameNumbers, assert_equals_eager
from tests.recording import Recorder, Recording


def recorded(program: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Recording, list[torch.Tensor]]:
    with Recorder() as recorder:
        result = program(*inputs)
    outs = list(result) if isinstance(result, tuple) else [result]
    return recorder.finish([*outs, *inputs]), outs


class Facts(NamedTuple):
    kernels: int
    moved: int
    peak: int
    largest: int  # what one step writes


def check(program: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Facts, Facts]:
    """What is planned without and with the pass; both give the same bits, and eager's numbers."""
    plain, _ = recorded(program, *inputs)
    recording, outs = recorded(program, *inputs)
    graph = recompute_cheap(recording.graph, partition)
    assert_equals_eager(graph, recording)
    memory, without = execute(recording, plan(graph)), execute(plain, plan(plain.graph))
    for value in graph.outputs():
        assert torch.equal(memory[value.buffer.index], without[value.buffer.index])
    for out in outs:
        index = next(i for i, data in recording.expected.items() if data.numel() == out.untyped_storage().nbytes()
                     and torch.equal(typed(data, out), out))
        torch.testing.assert_close(typed(memory[index], out), out, rtol=2e-2, atol=2e-3)
    return facts(plain.graph), facts(graph)


def facts(graph: Graph) -> Facts:
    told = explain(graph, plan(graph), CUDA)
    return Facts(told.kernels, told.moved, max(told.held), max(step.written for step in told.steps))


def copies(program: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    graph = recompute_cheap(recorded(program, *inputs)[0].graph, partition)
    return [node.name for node in graph.nodes if node.again]


def new_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


def trained(forward: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Forward and backward; gives the parameters' gradients."""
    def program(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        return torch.autograd.grad(forward(*leaves), leaves)

    return program


def made(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size) / size[-1] ** 0.5 for size in sizes]


def test_a_gelu_made_of_many_ops_keeps_its_operand_only() -> None:
    before, after = check(trained(lambda x, up, down: (new_gelu(x @ up) @ down).square().sum()),
                          *made((32, 48), (48, 64), (64, 48)))
    assert after.kernels <= before.kernels
    assert after.moved < 0.85 * before.moved
    assert after.peak < before.peak


def test_the_log_softmax_of_a_cross_entropy_never_reaches_memory() -> None:
    def loss(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x.bfloat16() @ head.bfloat16()).float(), torch.arange(32) % 128)

    before, after = check(trained(loss), *made((32, 16), (16, 128)))
    assert after.kernels <= before.kernels
    assert after.moved <= before.moved
    assert after.largest < 32 * 128 * 4, "16-bit logits are read again"


def test_a_norm_in_float32_of_16_bit_numbers_keeps_the_16_bits() -> None:
    def norm(x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = (x.bfloat16() @ w.bfloat16()).float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return ((weight * y).bfloat16() @ w.bfloat16()).float().square().sum()

    before, after = check(trained(norm), *made((64, 64), (64, 64), (64,)))
    assert after.moved <= before.moved and after.peak <= before.peak


def test_every_norm_along_a_residual_stream_is_computed_again() -> None:
    """However much history the gradient of the stream has, which is summed in place."""
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return weight.bfloat16() * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()

    def stream(x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, w = x.bfloat16(), w.bfloat16()
        for _ in range(3):
            y = norm(x, weight)
            x = x + ((y @ w) * (y @ w.t()) + y @ (w + 1)) @ w
            y = norm(x, weight)
            x = x + ((y @ w) * (y @ w.t())) @ w
        return x.float().square().sum()

    before, after = check(trained(stream), *made((64, 64), (64, 64), (64,)))
    assert after.moved < 0.84 * before.moved and after.peak < 0.7 * before.peak


def test_norms_times_one_more_than_a_weight_are_computed_again_but_not_their_weights() -> None:
    """Gemma's. The gradient of each weight is a sum of columns, as large as the weight, which shares no walk with "1 + weight":
    a copy of that would have all others for the same kernel taken back."""
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight)).type_as(x)

    def stream(x: torch.Tensor, w: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for first, second in zip(weights[::2], weights[1::2]):
            x = x + norm(norm(x, first).bfloat16() @ w.bfloat16(), second)
        return x.square().mean()

    recording, _ = recorded(trained(stream), *made((2048, 256), (256, 256), *[(256,)] * 4))
    before = facts(recording.graph)
    after = facts(recompute_cheap(recording.graph, partition))
    assert after.kernels == before.kernels and after.moved < 0.9 * before.moved and after.peak < 0.7 * before.peak
    assert_equals_eager(recording.graph, recording)
    again = [node for node in recording.graph.nodes if node.again]
    assert {node.writes[0].layout.numel for node in again} == {2048, 2048 * 256}


def test_norms_of_queries_are_computed_again_in_the_order_of_the_kernel_that_needs_them() -> None:
    """Queries are normed token by token and used head by head: a copy reads what lies in the other order."""
    tokens, heads, width = 256, 4, 64
    angles = torch.randn(2, 1, 1, tokens, width, generator=torch.Generator().manual_seed(0))

    def attended(x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = (x.bfloat16() @ w.bfloat16()).view(2, tokens, heads, width).float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        q = (weight * y.bfloat16()).transpose(1, 2)
        q = q * angles[0] + torch.cat((-q[..., width // 2 :], q[..., : width // 2]), -1) * angles[1]
        return (q.bfloat16() @ q.bfloat16().mT).float().square().mean()

    recording, _ = recorded(trained(attended), *made((2, tokens, heads * width), (heads * width, heads * width), (width,)))
    before = facts(recording.graph)
    after = facts(recompute_cheap(recording.graph, partition))
    assert after.kernels == before.kernels and after.moved < before.moved
    assert_equals_eager(recording.graph, recording)
    assert {"pow", "mean", "rsqrt", "mul"} <= {node.name for node in recording.graph.nodes if node.again}


def test_the_norm_of_an_embedding_is_computed_again_in_the_kernel_that_scatters_its_gradient() -> None:
    """The gradient goes to a table of more rows, in several kernels; what is computed again is as large as what was picked."""
    tokens = torch.arange(64) * 5 % 256

    def norm(table: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, table.bfloat16())
        y = x.float()
        y = weight.bfloat16() * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
        return (x + y @ w.bfloat16()).float().square().sum()

    again = copies(trained(norm), *made((256, 64), (64, 64), (64,)))
    assert {"pow", "mul"} <= {*again}
    before, after = check(trained(norm), *made((256, 64), (64, 64), (64,)))
    assert after.kernels <= before.kernels and after.moved < before.moved and after.peak <= before.peak


def test_copies_for_one_kernel_wait_for_what_another_makes_in_between() -> None:
    """The last product's kernel computes both factors again; what the second comes from is made after the first one's reader."""
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = x.exp()
        early = first * (first @ w)
        second = x - (w @ w).mean(-1, keepdim=True)
        return early + second * (second @ w)

    assert {"exp", "sub"} <= {*copies(program, *made((64, 64), (64, 64)))}
    before, after = check(program, *made((64, 64), (64, 64)))
    assert after.moved < before.moved


def test_what_an_earlier_copy_reads_may_itself_be_computed_again_for_a_later_kernel() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wave = wide.cos()
        early = wave * (wave @ w) + wide.t()  # turned round, so that this kernel reads it anyway
        return (early @ w + wide @ w) @ w * wide

    x, w = made((64, 64), (64, 64))
    assert {"cos", "_to_copy"} <= {*copies(program, x.bfloat16(), w)}
    before, after = check(program, x.bfloat16(), w)
    assert after.moved < before.moved


def test_swiglu_keeps_gate_and_input_only() -> None:
    before, after = check(trained(lambda x, a, b, c: ((F.silu(x @ a) * (x @ b)) @ c).square().sum()),
                          *made((64, 32), (32, 48), (32, 48), (48, 32)))
    assert after.moved < before.moved


def test_residual_streams_are_kept_for_two_operands_are_more_than_one() -> None:
    assert copies(lambda x, w: ((x @ w + x) @ w + x) + ((x @ w + x) @ w @ w), *made((32, 32), (32, 32))) == []


def test_what_is_overwritten_by_then_is_not_read_again() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        y = h.sin()
        z = y @ w
        h.zero_()
        return z + y + h.sum()

    assert copies(program, *made((64, 64), (64, 64))) == []


def test_results_that_are_held_are_read() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x @ w).sin()
        return y, (y @ w) + y

    assert copies(program, *made((64, 64), (64, 64))) == []


def test_draws_and_small_values_are_never_made_again() -> None:
    assert copies(lambda x, w: (lambda m: (x * m) @ w + m)(torch.rand_like(x)), *made((64, 64), (64, 64))) == []
    assert copies(lambda x, w: (lambda y: y @ w + y.sin())(x.exp()), *made((4, 4), (4, 4))) == []


def test_copies_that_would_not_join_their_kernel_are_taken_back() -> None:
    def apart(graph: Graph) -> list[Kernel]:
        return [Kernel((node,), True, tuple(write.value for write in node.writes)) for node in graph.nodes]

    recording, _ = recorded(trained(lambda x, a, b: (new_gelu(x @ a) @ b).sum()), *made((32, 48), (48, 64), (64, 48)))
    graph = recompute_cheap(recording.graph, apart)
    assert not any(node.again for node in graph.nodes)
    assert_equals_eager(graph, recording)


def test_copies_that_join_stay_where_others_that_do_not_move_more() -> None:
    def clumsy(graph: Graph) -> list[Kernel]:
        """Copies of a sigmoid's parts are kernels of their own."""
        alone = [node for node in graph.nodes if node.again and node.name in ("exp", "reciprocal")]
        rest = [kernel._replace(nodes=tuple(node for node in kernel.nodes if node not in alone)) for kernel in partition(graph)]
        return [*(kernel for kernel in rest if kernel.nodes),
                *(Kernel((node,), True, tuple(write.value for write in node.writes)) for node in alone)]

    def both(*tensors: torch.Tensor) -> torch.Tensor:  # squared, so that gradients wait for results
        x, a, b, y, c, d = tensors
        gate = y @ c
        return (new_gelu(x @ a) @ b).square().sum() + ((gate * (1.0 / (1.0 + torch.exp(gate * -1.7)))) @ d).square().sum()

    shapes = ((32, 48), (48, 64), (64, 48), (512, 48), (48, 96), (96, 48))
    recording, _ = recorded(trained(both), *made(*shapes))
    remarks = Remarks()
    graph = recompute_cheap(recording.graph, clumsy, remarks)
    again = {node.name for node in graph.nodes if node.again}
    assert "tanh" in again and "exp" not in again
    assert {remark.why for remark, _ in remarks.all() if not remark.done} == {recompute.JOINS_NOTHING}
    assert_equals_eager(graph, recording)


@pytest.mark.parametrize("least", [-(10**9), 0], ids=["every cut", "every saving"])
def test_random_programs_still_equal_eager(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "LEAST", least)

    @settings(max_examples=20, deadline=None)
    @given(programs.steps(barriers=False))
    def run(program: list[programs.Step]) -> None:
        tensors = programs.inputs("cpu")
        with SameNumbers() as recorder:
            held = programs.interpret(program, tensors)
        recording = recorder.finish(held[::2])
        assert_equals_eager(recompute_cheap(recording.graph, partition), recording)

    run()
