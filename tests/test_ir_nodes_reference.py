"""The reference interpreter against eager PyTorch on recorded programs."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from ir_nodes import Access, BufferKind, Graph, Layout, Node, reference
from tests import programs
from tests.recording import Recorder, Recording, layout_of


def assert_reproduces(recording: Recording) -> None:
    """Every live buffer holds, byte for byte, what eager left in it."""
    got = reference.run(recording.graph, recording.inputs, recording.scalars)
    assert got.keys() == recording.expected.keys()
    for index, data in recording.expected.items():
        assert torch.equal(got[index], data), f"buffer {index}"


def shuffled(graph: Graph, seed: int) -> list[Node]:
    """Another order of the nodes that keeps only the data flow: a write may come before a reader of the old value."""
    chooser = random.Random(seed)
    waiting = {node: {value.producer for value in node.inputs()} - {None, node} for node in graph.nodes}
    order: list[Node] = []
    while waiting:
        ready = [node for node, needs in waiting.items() if not needs]
        node = chooser.choice(ready)
        del waiting[node]
        order.append(node)
        for needs in waiting.values():
            needs.discard(node)
    return order


def train(dropout: float, steps: int = 3) -> Recording:
    """A small classifier and Adam, recorded op by op."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    with Recorder() as recorder:
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return recorder.finish([loss.detach(), *(p.detach() for p in model.parameters())])


def test_training_steps_are_reproduced_to_the_last_bit() -> None:
    recording = train(dropout=0.3)
    before = torch.get_rng_state()
    assert_reproduces(recording)
    assert torch.equal(torch.get_rng_state(), before), "the default generator must be left alone"


def test_batch_norm_updates_the_running_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    x = torch.randn(2, 2, 6, 6)
    with Recorder() as recorder:
        out = model(x)
    held = [out.detach(), model[1].running_mean, model[1].running_var]
    recording = recorder.finish(held)
    assert len(recording.expected) == 3
    assert_reproduces(recording)


@settings(max_examples=60, deadline=None)
@given(programs.steps(barriers=False))
def test_random_programs_equal_eager_in_any_order_that_the_data_flow_allows(program: list[programs.Step]) -> None:
    tensors = programs.inputs("cpu")
    with Recorder() as recorder:
        held = programs.interpret(program, tensors)
    recording = recorder.finish(held)
    assert_reproduces(recording)
    for seed in range(3):
        recording.graph.nodes = shuffled(recording.graph, seed)
        assert_reproduces(recording)


def test_a_write_moved_before_a_reader_of_the_old_value_changes_nothing() -> None:
    x = torch.arange(4.0)
    with Recorder() as recorder:
        y = x * 10
        x.add_(1)
    recording = recorder.finish([x, y])
    recording.graph.nodes.reverse()
    got = reference.run(recording.graph, recording.inputs, recording.scalars)
    results = [data.view(torch.float32).tolist() for data in got.values()]
    assert sorted(results) == [[0.0, 10.0, 20.0, 30.0], [1.0, 2.0, 3.0, 4.0]]


def test_a_write_through_a_view_keeps_the_other_elements() -> None:
    x = torch.zeros(3, 4)
    with Recorder() as recorder:
        x[:, 1].fill_(7)
        x.t()[2].add_(5)
    recording = recorder.finish([x])
    (data,) = reference.run(recording.graph, recording.inputs, recording.scalars).values()
    assert data.view(torch.float32).tolist() == [0, 7, 5, 0] * 3


def test_bytes_that_nothing_wrote_are_poison() -> None:
    graph = Graph()
    target = graph.add_buffer(8, live=True)
    graph.record("aten::fill_.Scalar", [Access(target, Layout(torch.uint8, (3,), (2,), 1), "w"), 5])
    assert reference.run(graph, {})[0].tolist() == [255, 5, 255, 5, 255, 5, 255, 255]


def test_numbers_are_inputs() -> None:
    graph = Graph()
    layout = Layout.contiguous(torch.float32, (2,))
    source, target = graph.add_buffer(8, BufferKind.INPUT), graph.add_buffer(8, live=True)
    graph.record("aten::mul.Tensor", [Access(source, layout), graph.add_scalar()], [Access(target, layout, "w")])
    data = torch.tensor([1.0, 3.0]).view(torch.uint8)
    for factor, product in ((2.0, [2.0, 6.0]), (-1.5, [-1.5, -4.5])):
        assert reference.run(graph, {0: data}, [factor])[1].view(torch.float32).tolist() == product


def test_inputs_are_not_changed_and_wrong_ones_are_refused() -> None:
    x = torch.ones(3)
    with Recorder() as recorder:
        x.mul_(4.0)
    recording = recorder.finish([x])
    kept = recording.inputs[0].clone()
    assert_reproduces(recording)
    assert torch.equal(recording.inputs[0], kept)
    with pytest.raises(ValueError, match="input b0 is missing"):
        reference.run(recording.graph, {}, recording.scalars)
    with pytest.raises(ValueError, match=r"input b0 is uint8\[12\]"):
        reference.run(recording.graph, {0: torch.zeros(5, dtype=torch.uint8)}, recording.scalars)
    with pytest.raises(ValueError, match="takes 1 numbers, 3 given"):
        reference.run(recording.graph, recording.inputs, [1.0, 2.0, 3.0])


def test_a_shape_that_is_not_the_recorded_one_is_refused() -> None:
    graph = Graph()
    source, target = graph.add_buffer(16, BufferKind.INPUT), graph.add_buffer(16, live=True)
    small = Layout.contiguous(torch.float32, (4,))
    graph.record("aten::relu", [Access(source, small)], [Access(target, Layout.contiguous(torch.float32, (2, 2)), "w")])
    with pytest.raises(ValueError, match=r"gave torch.float32\[4\], recorded was float32\[2,2\]"):
        reference.run(graph, {0: torch.zeros(16, dtype=torch.uint8)})


def test_window_shares_memory() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    data = x.reshape(-1).clone().view(torch.uint8)
    seen = reference.window(data, layout_of(x[1:, ::2]))
    assert seen.tolist() == [[4, 6], [8, 10]]
    seen.zero_()
    assert data.view(torch.float32).tolist() == [0, 1, 2, 3, 0, 5, 0, 7, 0, 9, 0, 11]
