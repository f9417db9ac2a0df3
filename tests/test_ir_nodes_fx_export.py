"""The fx export gives the numbers that eager gave when the program was recorded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from ir_nodes import Access, BufferKind, Graph, Layout
from ir_nodes.printer import fx_inputs, to_fx
from tests import programs
from tests.recording import Recorder, Recording


def assert_export_reproduces(recording: Recording) -> torch.fx.GraphModule:
    """The module's outputs are, byte for byte, what eager left; its inputs are not changed."""
    graph = recording.graph
    module = to_fx(graph)
    given_in = fx_inputs(graph, recording.inputs)
    kept = [tensor.clone() for tensor in given_in]
    with torch.random.fork_rng(devices=[]):
        for buffer in graph.buffers:
            if buffer.kind is BufferKind.GENERATOR:
                torch.set_rng_state(recording.inputs[buffer.index])
        outputs = module(*given_in, *recording.scalars)
    values = [value for value in graph.outputs() if value.buffer.kind is not BufferKind.GENERATOR]
    assert len(outputs) == len(values)
    for value, output in zip(values, outputs):
        assert torch.equal(output.view(torch.uint8), recording.expected[value.buffer.index]), str(value)
    for before, after in zip(kept, given_in):
        assert torch.equal(before.view(-1).view(torch.uint8), after.view(-1).view(torch.uint8)), "an input was changed"
    return module


@settings(max_examples=60, deadline=None)
@given(programs.steps(barriers=False))
def test_random_programs(program: list[programs.Step]) -> None:
    tensors = programs.inputs("cpu")
    with Recorder() as recorder:
        held = programs.interpret(program, tensors)
    assert_export_reproduces(recorder.finish(held))


def test_training_steps_with_dropout_and_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.4), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    x, y = torch.randn(5, 2, 6, 6), torch.tensor([0, 1, 2, 0, 1])
    with Recorder() as recorder:
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    recording = recorder.finish([loss.detach(), *state])
    module = assert_export_reproduces(recording)
    targets = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert {"aten.convolution.default", "aten.convolution_backward.default", "aten._foreach_add_.List"} <= targets


def test_placeholders_are_the_inputs_then_the_numbers() -> None:
    x = torch.tensor([1.0, 2.0])
    with Recorder() as recorder:
        y = x * 3.0 + 0.5
    recording = recorder.finish([y])
    module = to_fx(recording.graph)
    assert [node.name for node in module.graph.nodes if node.op == "placeholder"] == ["b0", "s0", "s1"]
    assert module(torch.tensor([1.0, 2.0]), 10.0, -1.0)[0].tolist() == [9.0, 19.0]


def test_one_buffer_seen_in_two_dtypes() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, -4.0])
    with Recorder() as recorder:
        bits = x.view(torch.int32).bitwise_and(0x7FFFFFFF)
        x.view(torch.int16)[1::2].bitwise_xor_(-32768)
        y = x + bits.view(torch.float32)
    recording = recorder.finish([x, bits, y])
    module = assert_export_reproduces(recording)
    assert module(*fx_inputs(recording.graph, recording.inputs), *recording.scalars)[-1].tolist() == [0.0, 4.0, 0.0, 8.0]


def test_a_window_that_ends_before_its_buffer() -> None:
    """Seven bytes seen first as bytes, then as one float32."""
    graph = Graph()
    source, target = graph.add_buffer(7, BufferKind.INPUT), graph.add_buffer(4, live=True)
    one = Layout.contiguous(torch.float32, (1,))
    graph.record("aten::neg", [Access(source, one)], [Access(target, one, "w")])
    data = torch.cat([torch.tensor([2.5]).view(torch.uint8), torch.zeros(3, dtype=torch.uint8)])
    (flat,) = fx_inputs(graph, {0: data})
    assert flat.dtype is torch.uint8
    assert to_fx(graph)(flat)[0].tolist() == [-2.5]


def test_strides_count_from_the_tensor_that_is_given_not_from_its_storage() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with Recorder() as recorder:
        y = x.t() + 0.0
    recording = recorder.finish([y])
    offset = torch.arange(20.0)[10:16]
    result = to_fx(recording.graph)(offset, *recording.scalars)[0]
    assert result.as_strided((3, 2), y.stride()).tolist() == [[10, 13], [11, 14], [12, 15]]


def test_a_number_input_where_the_op_takes_a_tensor() -> None:
    graph = Graph()
    x, y = graph.add_buffer(8, BufferKind.INPUT), graph.add_buffer(8, live=True)
    two = Layout.contiguous(torch.float32, (2,))
    graph.record("aten::mul.Tensor", [Access(x, two), graph.add_scalar()], [Access(y, two, "w")])
    (flat,) = fx_inputs(graph, {0: torch.tensor([1.0, 2.0]).view(torch.uint8)})
    assert to_fx(graph)(flat, 3.0)[0].tolist() == [3.0, 6.0]


def test_results_in_lists_and_undefined_results() -> None:
    layout = Layout.contiguous(torch.float32, (2,))
    graph = Graph()
    a, b = graph.add_buffer(8, BufferKind.INPUT), graph.add_buffer(8, BufferKind.INPUT)
    outs = [Access(graph.add_buffer(8, live=True), layout, "w") for _ in range(2)]
    graph.record("aten::_foreach_mul.Scalar", [[Access(a, layout), Access(b, layout)], graph.add_scalar()], outs)
    module = to_fx(graph)
    results = module(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), 10.0)
    assert [result.tolist() for result in results] == [[10.0, 20.0], [30.0, 40.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    with Recorder() as recorder:
        y = torch.cat([x.t(), x.t()], 1).flip(0)
    assert_export_reproduces(recorder.finish([y]))
