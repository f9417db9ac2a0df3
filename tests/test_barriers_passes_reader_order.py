"""What is read often is written in its readers' order; numbers stay bit for bit."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from graphs import execute
from hypothesis import given, settings

from barriers.passes import reader_order
from barriers.passes.reader_order import lay_for_readers
from codegen.fuse import plan
from ir_nodes import Graph
from ir_nodes.remarks import Remarks
from tests import programs
from tests.optimised import SameNumbers, assert_equals_eager
from tests.recording import Recorder, Recording


def recorded(program: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Recording:
    with Recorder() as recorder:
        out = program(*inputs)
    return recorder.finish([out, *inputs])


def biased(scores: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Scores of [batch, heads, rows, columns] with a bias for each distance, looked up in a table of [distances, heads]."""
    bias = table[places].permute(2, 0, 1).unsqueeze(0).to(scores.dtype)
    return ((scores + bias) * 2 + bias).softmax(-1)


def attended(batch: int = 16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    distances = (torch.arange(24)[:, None] - torch.arange(24)).abs()
    return torch.randn(batch, 4, 24, 24, dtype=torch.bfloat16), torch.randn(24, 4), distances


def steps(graph: Graph, dtype: torch.dtype) -> set[int]:
    """The last strides by which sums read operands of ``dtype`` that the graph makes."""
    return {read.layout.stride[-1] for node in graph.nodes if node.name == "add" for read in node.reads
            if read.layout.dtype is dtype and read.value.producer is not None and read.layout.size[0] == 1}


def test_a_bias_looked_up_for_all_heads_lies_in_rows() -> None:
    plain, recording = recorded(biased, *attended()), recorded(biased, *attended())
    graph = lay_for_readers(recording.graph, remarks := Remarks())
    assert steps(plain.graph, torch.bfloat16) == {4} and steps(graph, torch.bfloat16) == {1}
    assert [(one.optimisation, one.done) for one, _ in remarks.all()] == [("reader_order", True)]
    assert_equals_eager(graph, recording)
    memory, without = execute(recording, plan(graph)), execute(plain, plan(plain.graph))
    for value in graph.outputs():
        assert torch.equal(memory[value.buffer.index], without[value.buffer.index])


def few(*inputs: torch.Tensor) -> torch.Tensor:
    return biased(inputs[0][:4], *inputs[1:])


def multiplied(scores: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    bias = table[places].permute(2, 0, 1).to(scores.dtype)
    return (scores + bias) + bias @ bias


def in_part(scores: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    bias = table[places].permute(2, 0, 1).to(scores.dtype)
    return scores + bias + bias[:, :1]


def overwritten(scores: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    bias = table[places].permute(2, 0, 1).to(scores.dtype)
    out = scores + bias
    bias[:, 0] = 1
    return out + bias


@pytest.mark.parametrize("program", [few, multiplied, in_part, overwritten])
def test_other_memory_stays_as_it_is(program: Callable[..., Any]) -> None:
    """Read too seldom, by a product, in part, or written to again."""
    recording = recorded(program, *attended())
    before = recording.graph.describe()
    assert lay_for_readers(recording.graph).describe() == before


def test_what_is_held_stays_as_it_is() -> None:
    inputs = attended()
    with Recorder() as recorder:
        bias = inputs[1][inputs[2]].permute(2, 0, 1).to(torch.bfloat16)
        out = inputs[0] + bias
    graph = recorder.finish([out, bias, *inputs]).graph
    before = graph.describe()
    assert lay_for_readers(graph).describe() == before


@settings(max_examples=25, deadline=None)
@given(programs.steps(barriers=False))
def test_random_programs_still_equal_eager(program: list[programs.Step]) -> None:
    often, reader_order.OFTEN = reader_order.OFTEN, 0
    try:
        tensors = programs.inputs("cpu")
        with SameNumbers() as recorder:
            held = programs.interpret(program, tensors)
        recording = recorder.finish(held[::2])
        assert_equals_eager(lay_for_readers(recording.graph), recording)
    finally:
        reader_order.OFTEN = often
