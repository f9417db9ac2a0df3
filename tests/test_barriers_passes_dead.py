"""Dead nodes go, exactly those; what stays computes what eager computed."""

from __future__ import annotations

import time

import torch
from hypothesis import given, settings

from barriers.passes.dead import eliminate_dead
from ir_nodes import Access, BufferKind, Graph, Layout, reference
from ir_nodes.verify import verify
from tests import programs
from tests.recording import Recorder

FOUR = Layout.contiguous(torch.float32, (4,))


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


@settings(max_examples=80, deadline=None)
@given(programs.steps(barriers=False))
def test_random_programs_still_equal_eager(program: list[programs.Step]) -> None:
    tensors = programs.inputs("cpu")
    with Recorder() as recorder:
        held = programs.interpret(program, tensors)
    recording = recorder.finish(held[::2])  # the others are let go
    graph = eliminate_dead(recording.graph)
    verify(graph)
    got = reference.run(graph, recording.inputs, recording.scalars)
    assert got.keys() == recording.expected.keys()
    for index, data in recording.expected.items():
        assert torch.equal(got[index], data)
    again = len(graph.nodes)
    assert len(eliminate_dead(graph).nodes) == again


def test_every_node_that_is_left_is_needed() -> None:
    """Dropping any further node is refused, because something uses it, or loses an output."""
    x = torch.randn(4)
    with Recorder() as recorder:
        a = x.sin()
        b = a.cos()
        c = (a + b).tanh()
        c.mul_(2.0)
        unused = (b * 3.0).exp()
    recording = recorder.finish([c])
    del unused
    graph = eliminate_dead(recording.graph)
    assert names(graph) == ["sin", "cos", "add", "tanh", "mul_"]


def test_a_result_that_is_overwritten_whole_is_dead() -> None:
    x = torch.randn(4)
    with Recorder() as recorder:
        x.tanh_()
        x.mul_(3.0)
        x.fill_(2.0)
        x.add_(1.0)
    graph = eliminate_dead(recorder.finish([x]).graph)
    assert names(graph) == ["fill_", "add_"]


def test_a_partial_write_keeps_the_value_below_it() -> None:
    x = torch.randn(4)
    with Recorder() as recorder:
        x.tanh_()
        x[:2].fill_(2.0)
    graph = eliminate_dead(recorder.finish([x]).graph)
    assert names(graph) == ["tanh_", "fill_"]


def test_dead_inputs_are_no_longer_inputs() -> None:
    x, y = torch.randn(4), torch.randn(4)
    with Recorder() as recorder:
        kept = x * 2.0
        y.exp()
    graph = recorder.finish([kept]).graph
    assert len(graph.inputs()) == 2
    assert len(eliminate_dead(graph).inputs()) == 1


def _random_graph(state_is_live: bool) -> Graph:
    graph = Graph()
    state = graph.add_buffer(16, BufferKind.GENERATOR, live=state_is_live)
    noise = [graph.add_buffer(16), graph.add_buffer(16, live=True), graph.add_buffer(16)]
    for buffer in noise:
        effect = Access(state, Layout.contiguous(torch.uint8, (16,)), "rw")
        graph.record("aten::normal_", [Access(buffer, FOUR, "w"), 0.0, 1.0, None], effects=[effect])
    return graph


def test_a_live_generator_state_keeps_every_draw() -> None:
    assert len(eliminate_dead(_random_graph(state_is_live=True)).nodes) == 3


def test_a_dead_generator_state_keeps_the_draws_before_a_live_one() -> None:
    graph = _random_graph(state_is_live=False)
    kept = graph.nodes[:2]
    assert eliminate_dead(graph).nodes == kept


def test_a_node_without_results_stays() -> None:
    graph = Graph()
    flag, unused = graph.add_buffer(1, BufferKind.INPUT), graph.add_buffer(1)
    bit = Layout.contiguous(torch.bool, ())
    graph.record("aten::logical_not", [Access(flag, bit)], [Access(unused, bit, "w")])
    graph.record("aten::_assert_async", [Access(unused, bit)])
    graph.record("aten::logical_not", [Access(unused, bit)], [Access(graph.add_buffer(1), bit, "w")])
    assert names(eliminate_dead(graph)) == ["logical_not", "_assert_async"]


def test_values_of_dead_nodes_are_forgotten() -> None:
    x = torch.randn(4)
    with Recorder() as recorder:
        x.tanh_()
        x.fill_(2.0)
    graph = eliminate_dead(recorder.finish([x]).graph)
    assert [str(value) for value in graph.values[0]] == ["b0.0", "b0.2"]


def _chain(length: int) -> Graph:
    graph = Graph()
    x = graph.add_buffer(16, BufferKind.INPUT, live=True)
    for _ in range(length // 2):
        graph.record("aten::relu_", [Access(x, FOUR, "rw")])
        graph.record("aten::relu", [Access(x, FOUR)], [Access(graph.add_buffer(16), FOUR, "w")])
    return graph


def test_time_is_linear() -> None:
    """Ten times the nodes take about ten times as long, not a hundred; and no recursion."""
    seconds = []
    for length in (2_000, 20_000):
        graph = _chain(length)
        start = time.process_time()
        eliminate_dead(graph)
        seconds.append(time.process_time() - start)
        assert len(graph.nodes) == length // 2
    assert seconds[1] < 40 * max(seconds[0], 1e-3)
