"""Whole plans: random programs and a transformer block against eager, and how long planning takes."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from graphs import check
from hypothesis import given, settings
from programs import Step, inputs, interpret, steps

from codegen.fuse import plan
from codegen.tuning import HOPPER, Tuning
from ir_nodes import Access, BufferKind, Graph, Layout

LOOPED = Tuning(tile=64, persistent=16, looped=16)


def whole(graph: Graph, dtype: torch.dtype, size: tuple[int, ...], kind: BufferKind, live: bool = False) -> Access:
    layout = Layout.contiguous(dtype, size)
    return Access(graph.add_buffer(layout.nbytes, kind, live), layout)


def chain(length: int) -> Graph:
    """A residual network of ``length`` nodes: elementwise steps, some of them ATen's, on buffers of two sizes."""
    graph = Graph()
    state = whole(graph, torch.float32, (64, 32), BufferKind.INPUT)
    square = whole(graph, torch.float32, (32, 32), BufferKind.INPUT)
    skip = state
    for index in range(length):
        out = whole(graph, torch.float32, (64, 32), BufferKind.FRESH, index == length - 1)
        target = Access(out.buffer, out.layout, "w")
        if index % 7 == 3:
            graph.record("aten::mm.out", [state, square, target])
        elif index % 7 == 5:
            graph.record("aten::add.out", [state, skip, graph.add_scalar(), target])
            skip = out
        else:
            graph.record("aten::mul.out", [state, graph.add_scalar(), target])
        state = out
    return graph


def test_planning_time_is_linear_and_short() -> None:
    plan(chain(50))
    seconds = []
    for length in (500, 2000):
        graph = chain(length)
        gc.collect()
        gc.disable()  # its time grows with all that other tests left behind
        start = time.process_time()
        plan(graph)
        seconds.append(time.process_time() - start)
        gc.enable()
    assert seconds[1] < 4 and seconds[1] < 12 * seconds[0]


def listed(length: int) -> Graph:
    """Three ops of an optimizer over ``length`` parameters."""
    graph = Graph()
    weights = [whole(graph, torch.float32, (64, 32), BufferKind.INPUT, True) for _ in range(length)]
    gradients = [whole(graph, torch.float32, (64, 32), BufferKind.INPUT) for _ in range(length)]
    for _ in range(3):
        targets = tuple(Access(weight.buffer, weight.layout, "rw") for weight in weights)
        graph.record("aten::_foreach_add_.List", [targets, tuple(gradients), graph.add_scalar()])
    return graph


def test_planning_lists_of_tensors_takes_linear_time() -> None:
    plan(listed(20))
    seconds = []
    for length in (200, 1000):
        graph = listed(length)
        gc.collect()
        gc.disable()
        start = time.process_time()
        assert len(plan(graph).steps) <= length
        seconds.append(time.process_time() - start)
        gc.enable()
    assert seconds[1] < 15 * seconds[0]


@settings(max_examples=25, deadline=None)
@given(program=steps(barriers=False))
def test_random_programs_equal_eager(program: list[Step]) -> None:
    check(lambda *given: interpret(program, list(given)), *inputs("cpu"), extern=None, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["hopper", "looped"])
def test_a_transformer_block_forward_and_backward(tuning: Tuning) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        layer(x).square().mean().backward()
        return [parameter.grad for parameter in layer.parameters()]

    check(program, torch.randn(2, 5, 16), extern=None, tuning=tuning, rtol=1e-3, atol=1e-4)
