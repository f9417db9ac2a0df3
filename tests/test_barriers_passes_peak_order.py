"""Ops that grow memory run late where that lowers the peak; every order gives eager's bits."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from barriers.model import memory
from barriers.passes import peak_order
from barriers.passes.peak_order import lower_peak
from tests import programs
from tests.optimised import SameNumbers, assert_equals_eager
from tests.recording import Recorder, Recording


def wasteful() -> Recording:
    """Eight large values are made, then each is summed."""
    x = torch.linspace(-1, 1, 1000)
    with Recorder() as recorder:
        made = [x * float(number) for number in range(8)]
        total = torch.zeros(())
        for one in made:
            total = total + one.sum()
    return recorder.finish([total, x])


def test_values_are_made_when_they_are_needed() -> None:
    recording = wasteful()
    before = max(memory(recording.graph, recording.graph.nodes))
    graph = lower_peak(recording.graph)
    assert max(memory(graph, graph.nodes)) < before / 3
    assert_equals_eager(graph, recording)


def test_the_programs_order_stays_where_more_would_be_moved_or_a_schedule_says_so() -> None:
    graph = wasteful().graph
    nodes = list(graph.nodes)
    assert lower_peak(graph, lambda graph: int(graph.nodes != nodes)).nodes == nodes
    nodes[-1].stage = 1
    assert lower_peak(graph).nodes == nodes


@settings(max_examples=30, deadline=None)
@given(programs.steps(barriers=False))
def test_random_programs_still_equal_eager(program: list[programs.Step]) -> None:
    tensors = programs.inputs("cpu")
    with SameNumbers() as recorder:
        held = programs.interpret(program, tensors)
    recording = recorder.finish(held[::2])
    peak_order.WORTH, before = 2.0, peak_order.WORTH
    try:
        assert_equals_eager(lower_peak(recording.graph), recording)
    finally:
        peak_order.WORTH = before
