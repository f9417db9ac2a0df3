"""A copy of a window onto itself goes, every other copy stays."""

from __future__ import annotations

import torch

from barriers.passes.noops import eliminate_noops
from ir_nodes import reference
from ir_nodes.ops import info
from ir_nodes.verify import verify
from tests.recording import Recorder, Recording


def check(recording: Recording, left: list[str]) -> None:
    graph = eliminate_noops(recording.graph)
    assert [node.name for node in graph.nodes] == left
    verify(graph)
    got = reference.run(graph, recording.inputs, recording.scalars)
    for index, data in recording.expected.items():
        unchanged = recording.inputs.get(index)
        assert torch.equal(got.get(index, unchanged), data)


def test_a_copy_onto_itself_between_two_ops_goes() -> None:
    x = torch.randn(4)
    with Recorder() as recorder:
        x.add_(1.0)
        torch.ops.aten.copy_(x, x.detach())
        x.mul_(2.0)
        y = x + 1.0
    check(recorder.finish([x, y]), ["add_", "mul_", "add"])


def test_a_partial_copy_onto_itself_goes_and_later_partial_writes_keep_their_bytes() -> None:
    x = torch.randn(4)
    with Recorder() as recorder:
        x.add_(1.0)
        torch.ops.aten.copy_(x[1:3], x[1:3])
        x[:1].zero_()
    check(recorder.finish([x]), ["add_", "zero_"])


def test_a_chain_of_copies_of_an_input_leaves_no_output() -> None:
    x = torch.randn(4)
    with Recorder() as recorder:
        torch.ops.aten.copy_(x, x.detach())
        torch.ops.aten.copy_(x, x.detach())
    recording = recorder.finish([x])
    check(recording, [])
    assert recording.graph.outputs() == []


def test_copies_between_different_windows_stay() -> None:
    x = torch.arange(9.0).reshape(3, 3)
    with Recorder() as recorder:
        torch.ops.aten.copy_(x[0], x[1])
        torch.ops.aten.copy_(x[2], x[:, 2].clone())
    check(recorder.finish([x]), ["copy_", "clone", "copy_"])


def test_a_copy_of_memory_that_nothing_wrote_stays_so_that_the_buffer_is_made() -> None:
    with Recorder() as recorder:
        x = torch.empty(4)
        torch.ops.aten.copy_(x, x.detach())
    graph = eliminate_noops(recorder.finish([x]).graph)
    assert len(graph.nodes) == 1


def test_writes_without_an_element_go() -> None:
    """As those to the half of a head that a rotary embedding leaves alone, where it leaves none."""
    x = torch.arange(12.0).reshape(3, 4)
    with Recorder() as recorder:
        y = x * 2
        torch.ops.aten.copy_(y[:, 4:], x[:, 4:])
        torch.ops.aten.mul_(y[3:], 3)
        torch.ops.aten.copy_(y[:, 3:], x[:, 3:])
    check(recorder.finish([x, y]), ["mul", "copy_"])


def test_a_write_without_an_element_is_what_makes_a_buffer() -> None:
    with Recorder() as recorder:
        x = torch.empty(4)
        torch.ops.aten.zero_(x[4:])
    assert len(eliminate_noops(recorder.finish([x]).graph).nodes) == 1


def test_a_collective_that_receives_nothing_stays_for_it_may_send() -> None:
    x, y = torch.ones(4), torch.ones(4)
    with Recorder() as recorder:
        torch.ops.aten.copy_(y[4:], x[4:])
    graph = recorder.finish([x, y]).graph
    graph.nodes[0].target = "lazysched::all_to_all"
    assert info(graph.nodes[0].target).kind == "collective" and len(eliminate_noops(graph).nodes) == 1
