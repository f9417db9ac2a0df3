"""The verifier accepts what was recorded from real programs, and names each way in which a graph can be broken."""

from __future__ import annotations

import dataclasses
from typing import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from ir_nodes import Access, BufferKind, Frame, Graph, Layout, Operand, Target, Value, Write
from ir_nodes.verify import VerificationError, reach, verify
from tests import programs
from tests.recording import Recorder

FOUR = Layout.contiguous(torch.float32, (4,))


def graph_of_three() -> Graph:
    """``t = relu(x); x += t; y = x * s``, with a frame on each."""
    graph = Graph()
    x, t, y = graph.add_buffer(16, BufferKind.INPUT, live=True), graph.add_buffer(16), graph.add_buffer(16, live=True)
    one, two, three = (Frame("train.py", line, "main") for line in (1, 2, 3))
    graph.record("aten::relu", [Access(x, FOUR)], [Access(t, FOUR, "w")], frame=one)
    graph.record("aten::add_.Tensor", [Access(x, FOUR, "rw"), Access(t, FOUR), 1], frame=two)
    graph.record("aten::mul.Tensor", [Access(x, FOUR), graph.add_scalar()], [Access(y, FOUR, "w")], frame=three)
    return graph


def refused(graph: Graph, problem: str) -> None:
    with pytest.raises(VerificationError, match=problem):
        verify(graph)


def test_a_good_graph_passes_with_every_shape_inferred() -> None:
    assert verify(graph_of_three()) == []


def test_an_error_names_pass_node_frame_and_problem() -> None:
    graph = graph_of_three()
    graph.nodes[0].writes[0].value.users.clear()
    with pytest.raises(VerificationError) as caught:
        verify(graph, after="reorder")
    assert str(caught.value).startswith("after reorder: b1.1: use list is wrong: lacks b0.1")
    graph = graph_of_three()
    graph.nodes.reverse()
    with pytest.raises(VerificationError, match=r"after reorder: b2.1.* \(recorded at train.py:3 in main\): reads b0.1"):
        verify(graph, after="reorder")


def _double_assignment(graph: Graph) -> None:
    node = graph.nodes[2]
    node.writes = (dataclasses.replace(node.writes[0], value=graph.nodes[0].writes[0].value),)


def _same_version(graph: Graph) -> None:
    node = graph.nodes[2]
    twin = Value(graph.buffers[1], 1, node)
    graph.values[1].append(twin)
    node.writes = (Write(twin, FOUR, None, False),)


def _foreign_value(graph: Graph) -> None:
    node = graph.nodes[2]
    node.writes = (Write(Value(graph.buffers[2], 2, node), FOUR, None, False),)


def _foreign_buffer(graph: Graph) -> None:
    node = graph.nodes[2]
    other = Graph().add_buffer(16)
    node.writes = (Write(Value(other, 1, node), FOUR, None, False),)


def _write_before_reader(graph: Graph) -> None:
    x = graph.buffers[0]
    early = graph.record("aten::fill_.Scalar", [Access(x, FOUR, "w"), 0.0])
    graph.nodes.remove(early)
    graph.nodes.insert(2, early)


def _use_before_definition(graph: Graph) -> None:
    graph.nodes[0], graph.nodes[1] = graph.nodes[1], graph.nodes[0]


def _stale_user(graph: Graph) -> None:
    graph.nodes.pop()


def _missing_user(graph: Graph) -> None:
    graph.values[0][0].users.pop(graph.nodes[0])


def _outside(graph: Graph) -> None:
    graph.buffers[2].nbytes = 12


def _before_the_start(graph: Graph) -> None:
    layout = Layout(torch.float32, (4,), (-1,), 2)
    graph.record("aten::relu", [Access(graph.buffers[2], layout)], [Access(graph.add_buffer(16), FOUR, "w")])


def _wrong_size(graph: Graph) -> None:
    square = Layout.contiguous(torch.float32, (2, 2))
    graph.record("aten::relu", [Access(graph.buffers[2], FOUR)], [Access(graph.add_buffer(16), square, "w")])


def _wrong_dtype(graph: Graph) -> None:
    whole = Layout.contiguous(torch.int32, (4,))
    graph.record("aten::relu", [Access(graph.buffers[2], FOUR)], [Access(graph.add_buffer(16), whole, "w")])


def _wrong_out(graph: Graph) -> None:
    three = Layout.contiguous(torch.float32, (3,))
    graph.record("aten::relu.out", [Access(graph.buffers[2], FOUR), Access(graph.add_buffer(12), three, "w")])


def _shapes_do_not_fit(graph: Graph) -> None:
    three = Layout.contiguous(torch.float32, (3,))
    operands = [Access(graph.buffers[2], FOUR), Access(graph.buffers[2], three), 1]
    graph.record("aten::add.Tensor", operands, [Access(graph.add_buffer(16), FOUR, "w")])


def _read_of_a_written_argument(graph: Graph) -> None:
    graph.record("aten::relu_", [Access(graph.buffers[2], FOUR)])


def _write_of_a_read_argument(graph: Graph) -> None:
    graph.record("aten::add_.Tensor", [Access(graph.buffers[2], FOUR, "rw"), Access(graph.buffers[1], FOUR, "rw"), 1])


def _old_elements_forgotten(graph: Graph) -> None:
    graph.record("aten::relu_", [Access(graph.buffers[2], FOUR, "w")])


def _lost_bytes(graph: Graph) -> None:
    node = graph.record("aten::fill_.Scalar", [Access(graph.buffers[0], Layout(torch.float32, (2,), (1,), 1), "w"), 0.0])
    node.writes[0].base.users.pop(node)
    node.writes = (dataclasses.replace(node.writes[0], base=None),)


def _old_base(graph: Graph) -> None:
    node = graph.nodes[1]
    late = graph.record("aten::relu_", [Access(graph.buffers[0], FOUR, "rw")])
    late.writes[0].base.users.pop(late)
    late.writes = (dataclasses.replace(late.writes[0], base=node.writes[0].base),)
    node.writes[0].base.users[late] = None


def _reads_differ(graph: Graph) -> None:
    node = graph.nodes[1]
    node.reads = (Operand(node.reads[0].value, Layout.contiguous(torch.float32, (2,))),)


def _target_out_of_place(graph: Graph) -> None:
    node = graph.nodes[1]
    node.args = (Target(1), *node.args[1:])


def _too_many_arguments(graph: Graph) -> None:
    graph.nodes[0].args += (1,)


def _unknown_op(graph: Graph) -> None:
    graph.nodes[0].target = "aten::no_such_op"


@pytest.mark.parametrize(
    ("breakage", "problem"),
    [
        (_double_assignment, "as its producer"),
        (_same_version, "b1.1 is assigned twice, first by b1.1"),
        (_foreign_value, "b2.2 is missing from its buffer's values"),
        (_foreign_buffer, "is no buffer of this graph"),
        (_write_before_reader, "reads b0.1 but b0.2 has replaced it"),
        (_use_before_definition, "reads b1.1 but it is not made yet"),
        (_stale_user, "b0.1: use list is wrong: has no longer b2.1"),
        (_missing_user, "b0.0: use list is wrong: lacks b1.1"),
        (_outside, r"b2.1:float32\[4\] touches bytes 0..16 of 12"),
        (_before_the_start, r"touches bytes -4..12 of 16"),
        (_wrong_size, r"is recorded as float32\[2,2\], the op gives float32\[4\]"),
        (_wrong_dtype, r"is recorded as int32\[4\], the op gives float32\[4\]"),
        (_wrong_out, r"is recorded as float32\[3\], the op gives float32\[4\]"),
        (_shapes_do_not_fit, "the op refuses these arguments: .*3"),
        (_read_of_a_written_argument, "only reads self, which the op writes"),
        (_write_of_a_read_argument, "writes other, which the op only reads"),
        (_old_elements_forgotten, "the op reads the old self, the write does not say so"),
        (_lost_bytes, "loses the bytes of b0.1"),
        (_old_base, "keeps bytes of b0.0 but the buffer then holds b0.1"),
        (_reads_differ, "its reads are not the operands of its arguments"),
        (_target_out_of_place, "are not its targets and returns"),
        (_too_many_arguments, "takes 1 arguments, holds 2"),
        (_unknown_op, "torch has no op 'aten::no_such_op'"),
    ],
)  # fmt: skip
def test_each_broken_rule_is_named(breakage: Callable[[Graph], None], problem: str) -> None:
    graph = graph_of_three()
    breakage(graph)
    refused(graph, problem)


def test_the_op_may_read_and_write_one_buffer() -> None:
    """``add(a, b, out=a)``: the read is an operand of its own, the write covers all."""
    graph = Graph()
    a, b = graph.add_buffer(16, BufferKind.INPUT, live=True), graph.add_buffer(16, BufferKind.INPUT)
    graph.record("aten::add.out", [Access(a, FOUR), Access(b, FOUR), 1, Access(a, FOUR, "w")])
    assert verify(graph) == []
    assert graph.nodes[0].writes[0].base is None


@settings(max_examples=40, deadline=None)
@given(programs.steps(barriers=False))
def test_random_recorded_programs_verify_without_a_skip(program: list[programs.Step]) -> None:
    tensors = programs.inputs("cpu")
    with Recorder() as recorder:
        held = programs.interpret(program, tensors)
    assert verify(recorder.finish(held).graph) == []


def test_a_transformer_step_verifies_without_a_skip() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 11))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(0, 11, (2, 5))
    with Recorder() as recorder:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    graph = recorder.finish([loss.detach()]).graph
    assert len(graph.nodes) > 80
    assert verify(graph) == []


def test_what_cannot_be_inferred_is_reported_with_its_reason() -> None:
    graph = Graph()
    x, found = graph.add_buffer(4, BufferKind.INPUT), graph.add_buffer(16)
    mask = Layout.contiguous(torch.bool, (4,))
    graph.record("aten::nonzero", [Access(x, mask)], [Access(found, Layout.contiguous(torch.int64, (2, 1)), "w")])
    assert verify(graph) == ["aten::nonzero: its result depends on data"]


def test_a_missing_meta_kernel_is_reported_not_raised() -> None:
    library = torch.library.Library("lazysched_test_verify", "DEF")
    library.define("cpu_only(Tensor x) -> Tensor")
    library.impl("cpu_only", lambda x: x.clone(), "CPU")
    graph = Graph()
    x, y = graph.add_buffer(16, BufferKind.INPUT), graph.add_buffer(16)
    graph.record("lazysched_test_verify::cpu_only", [Access(x, FOUR)], [Access(y, FOUR, "w")])
    (line,) = verify(graph)
    assert line.startswith("lazysched_test_verify::cpu_only: no meta kernel")


@pytest.mark.parametrize(
    ("layout", "span"),
    [
        (Layout(torch.float32, (4,), (1,), 0), (0, 16)),
        (Layout(torch.float32, (2, 3), (8, 2), 1), (4, 4 * 14)),
        (Layout(torch.int64, (3,), (-2,), 4), (0, 40)),
        (Layout(torch.uint8, (5, 0), (1, 1), 7), (0, 0)),
        (Layout(torch.float64, (), (), 3), (24, 32)),
        (Layout(torch.float32, (9, 2), (0, 1), 0), (0, 8)),
    ],
)
def test_reach(layout: Layout, span: tuple[int, int]) -> None:
    assert reach(layout) == span


def test_batch_norm_in_inference_gives_no_statistics_though_meta_says_so() -> None:
    one = torch.ones(4)
    with Recorder() as recorder:
        out = torch.ops.aten.native_batch_norm(torch.randn(2, 4, 3, 3), one, one, one, one, False, 0.1, 1e-5)
    assert out[1].shape == (0,)
    assert any("in inference" in line for line in verify(recorder.finish([out[0]]).graph))


def test_grouped_products_in_float32_are_no_error_though_meta_refuses_them() -> None:
    ends = torch.tensor([3, 8], dtype=torch.int32)
    with Recorder() as recorder:
        out = torch._grouped_mm(torch.randn(8, 16), torch.randn(2, 16, 16), ends)
    assert any("Meta refuses" in line for line in verify(recorder.finish([out]).graph))


def test_layer_norm_in_16_bits_is_no_error_though_meta_keeps_its_statistics_in_32() -> None:
    one = torch.ones(16, dtype=torch.bfloat16)
    with Recorder() as recorder:
        out = torch.ops.aten.native_layer_norm(torch.randn(4, 16).bfloat16(), [16], one, one, 1e-5)
    assert any("statistics in 16 bits" in line for line in verify(recorder.finish([out[0]]).graph))
