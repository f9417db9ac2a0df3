"""Nodes that compute the same become one, exactly those, and numbers stay bit for bit."""

from __future__ import annotations

import gc
import time
from typing import Any, Callable, Sequence

import pytest
import torch
from hypothesis import given, settings

from barriers.passes.cse import merge_common
from ir_nodes import Access, BufferKind, Graph, Layout
from tests import programs
from tests.optimised import SameNumbers, assert_equals_eager, names


def check(program: Callable[..., Any], *inputs: torch.Tensor, left: Sequence[str], held: Sequence[torch.Tensor] = ()) -> Graph:
    """What is ``left`` of the program's ops; its results are held at the end."""
    with SameNumbers() as recorder:
        result = program(*inputs)
    recording = recorder.finish([*(result if isinstance(result, tuple) else (result,)), *held])
    graph = merge_common(recording.graph)
    assert names(graph) == list(left)
    assert_equals_eager(graph, recording)
    return graph


@settings(max_examples=60, deadline=None)
@given(programs.steps(barriers=False, max_size=15))
def test_random_programs_run_twice_still_equal_eager(program: list[programs.Step]) -> None:
    tensors = programs.inputs("cpu")
    with SameNumbers() as recorder:
        first = programs.interpret(program, tensors)
        second = programs.interpret(program, tensors)
    recording = recorder.finish([*first[::2], *second[1::2]])
    assert_equals_eager(merge_common(recording.graph), recording)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_chains_of_the_same_ops_become_one() -> None:
    check(lambda x: x.sin().exp() + x.sin().exp(), X, left=["sin", "exp", "add"])


def test_casts_of_one_weight_become_one() -> None:
    weight = torch.randn(4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16() @ weight.bfloat16() + (x.bfloat16() @ weight.bfloat16().t()).relu()

    check(program, X, left=["_to_copy", "_to_copy", "mm", "mm", "relu", "add"])


def test_positions_and_masks_become_one() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x.masked_fill(torch.arange(4) > 2, 0.5)
        return x

    check(program, X, left=["arange", "gt", "masked_fill", "masked_fill", "masked_fill"])


@pytest.mark.parametrize("program", [
    lambda x: x.sum(0) + x.sum(1)[:1],
    lambda x: x.sin() + x.t().sin().t(),
    lambda x: x.mul(2.0) + x.mul(3.0),
    lambda x: x.clamp(0, 1).sum() + x.clamp(False, True).sum(),
    lambda x: torch.cumsum(x, 0, dtype=torch.float32) + torch.cumsum(x, 0, dtype=torch.float64),
], ids=["other constant", "other layout", "other number", "bools are not integers", "other dtype"])  # fmt: skip
def test_other_operands_are_other_values(program: Callable[..., Any]) -> None:
    with SameNumbers() as recorder:
        result = program(X)
    recording = recorder.finish([result])
    before = names(recording.graph)
    assert names(merge_common(recording.graph)) == before


def test_draws_stay_apart() -> None:
    with SameNumbers() as recorder:
        result = torch.rand_like(X) - torch.rand_like(X)
    assert names(merge_common(recorder.finish([result]).graph)).count("rand_like") == 2


def test_two_results_that_are_held_are_two_memories() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin(), x.sin(), x.sin() + 1

    check(program, X, left=["sin", "sin", "add"])


def test_the_one_that_is_held_is_the_one_that_stays() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin().exp()
        return x.sin(), y

    graph = check(program, X, left=["sin", "exp"])
    assert graph.nodes[0].writes[0].value.buffer.live


def test_what_is_overwritten_serves_until_then() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        a, b = x.sin(), x.sin()
        early = b * 2
        a.add_(1.0)
        return a + early

    check(program, X, left=["sin", "mul", "add_", "add"])

    def too_late(x: torch.Tensor) -> torch.Tensor:
        a, b = x.sin(), x.sin()
        a.add_(1.0)
        return a + b

    check(too_late, X, left=["sin", "sin", "add_", "add"])


def test_a_copy_that_is_written_to_is_not_merged_away() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        a, b = x.sin(), x.sin()
        b.add_(1.0)
        return a + b

    check(program, X, left=["sin", "sin", "add_", "add"])


def test_ops_after_a_write_are_other_ops() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        x.add_(1.0)
        return a + x.sin()

    x = X.clone()
    check(program, x, left=["sin", "add_", "sin", "add"], held=[x])


def big(graph: Graph, live: bool = False, kind: BufferKind = BufferKind.FRESH) -> Access:
    layout = Layout.contiguous(torch.float32, (1 << 18,))
    return Access(graph.add_buffer(layout.nbytes, kind, live), layout)


def made(graph: Graph, target: str, *args: Any) -> Access:
    out = big(graph)
    graph.record(target, [*args, Access(out.buffer, out.layout, "w")])
    return out


def test_what_checkpointing_computes_again_stays_where_memory_would_grow() -> None:
    """Four layers in a row and then backwards, each of which computes its inner value twice: only one fits below the peak."""
    graph = Graph()
    state = big(graph, kind=BufferKind.INPUT)
    outer, gradient = [], made(graph, "aten::sin.out", state)
    for _ in range(4):
        outer.append(state)
        inner = made(graph, "aten::exp.out", state)
        for _ in range(20):
            inner = made(graph, "aten::neg.out", inner)
        state = inner
    for kept in reversed(outer):
        inner = made(graph, "aten::exp.out", kept)
        gradient = made(graph, "aten::mul.out", gradient, inner)
        for _ in range(20):
            gradient = made(graph, "aten::neg.out", gradient)
    gradient.buffer.live = True
    count = sum(node.name == "exp" for node in merge_common(graph).nodes)
    assert 5 < count <= 8


def test_time_is_linear() -> None:
    seconds = []
    for length in (2000, 20000):
        graph = Graph()
        source = big(graph, kind=BufferKind.INPUT)
        for index in range(length // 4):
            a = made(graph, "aten::sin.out", source)
            b = made(graph, "aten::sin.out", source)
            made(graph, "aten::mul.out", a, b)
            source = made(graph, "aten::exp.out", source) if index % 10 == 0 else source
        source.buffer.live = True
        gc.collect()
        gc.disable()  # its time grows with all that other tests left behind
        start = time.process_time()
        merge_common(graph)
        seconds.append(time.process_time() - start)
        gc.enable()
    assert seconds[1] < 2.0 and seconds[1] < 25 * seconds[0]
