"""Copies and casts that change nothing go, others stay, and numbers stay bit for bit."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import pytest
import torch
from hypothesis import given, settings

from barriers.passes.dead import eliminate_dead
from barriers.passes.fold import forward_copies, keeps
from ir_nodes import Graph
from tests import programs
from tests.optimised import SameNumbers, assert_equals_eager, names


def check(program: Callable[..., Any], *inputs: torch.Tensor, left: Sequence[str], held: Sequence[torch.Tensor] = ()) -> Graph:
    """What is ``left`` of the program's ops; its results are held at the end."""
    with SameNumbers() as recorder:
        result = program(*inputs)
    recording = recorder.finish([*(result if isinstance(result, tuple) else (result,)), *held])
    graph = eliminate_dead(forward_copies(recording.graph))
    assert names(graph) == list(left)
    assert_equals_eager(graph, recording)
    return graph


@settings(max_examples=60, deadline=None)
@given(programs.steps(barriers=False))
def test_random_programs_still_equal_eager(program: list[programs.Step]) -> None:
    tensors = programs.inputs("cpu")
    with SameNumbers() as recorder:
        copies = [tensor.clone() for tensor in tensors]
        held = programs.interpret(program, copies)
        held = [tensor.clone() if index % 3 else tensor for index, tensor in enumerate(held)]
    recording = recorder.finish(held[::2])
    assert_equals_eager(eliminate_dead(forward_copies(recording.graph)), recording)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_a_copy_is_its_source() -> None:
    check(lambda x: x.clone().sin() + x.contiguous().clone().clone().exp(), X, left=["sin", "exp", "add"])


def test_a_copy_of_a_part_that_starts_the_buffer_is_its_source() -> None:
    check(lambda x: x[:2].clone().sin(), X, left=["sin"], held=[X])


def test_a_small_part_does_not_hold_a_large_result() -> None:
    check(lambda x: (x.exp()[:1].clone() + 1).sin(), X, left=["exp", "clone", "add", "sin"])


def test_a_copy_in_another_layout_stays() -> None:
    check(lambda x: x.t().contiguous().sin() + x[1:].clone().sum(), X, left=["clone", "sin", "clone", "sum", "add"])


def test_casts_that_lose_nothing_cancel() -> None:
    check(lambda x: x.float().bfloat16().sin(), X.bfloat16(), left=["sin"])
    check(lambda x: x.float().double().float().half().sin(), X.half(), left=["sin"])
    check(lambda x: x.long().float().bool().logical_not(), X > 0, left=["logical_not"])


def test_casts_that_lose_something_stay() -> None:
    check(lambda x: x.bfloat16().float().sin(), X, left=["_to_copy", "_to_copy", "sin"])
    check(lambda x: x.half().bfloat16().sin(), X.bfloat16(), left=["_to_copy", "_to_copy", "sin"])


def test_the_middle_of_a_chain_stays_where_somebody_needs_it() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.float()
        return wide.bfloat16().sin(), wide.exp()

    check(program, X.bfloat16(), left=["_to_copy", "sin", "exp"])


def test_a_copy_that_is_held_keeps_a_memory_of_its_own() -> None:
    check(lambda x: x.clone(), X, left=["clone"], held=[X])


def test_a_held_copy_of_a_result_that_dies_is_that_result() -> None:
    check(lambda x: (x.exp() + 1).clone(), X, left=["exp", "add"])


def test_a_copy_of_what_dies_is_changed_in_its_sources_memory() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y.clone().add_(1.0).mul_(y.size(0))

    check(program, X, left=["exp", "add_", "mul_"])


@pytest.mark.parametrize("program", [
    lambda y: y.clone().add_(1.0) + y,
    lambda y: (y.clone(), y.add_(1.0))[0].sin(),
], ids=["the source is used later", "the source is changed before"])  # fmt: skip
def test_a_copy_that_parts_from_its_source_stays(program: Callable[..., Any]) -> None:
    with SameNumbers() as recorder:
        result = program(X.exp())
    recording = recorder.finish([result])
    graph = forward_copies(recording.graph)
    assert "clone" in names(graph)
    assert_equals_eager(graph, recording)


def test_a_source_may_change_once_the_copy_is_used() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        old = x.clone()
        early = old * 3
        x.add_(1.0)
        return early

    x = X.clone()
    check(program, x, left=["mul", "add_"], held=[x])


def test_which_dtypes_keep_which() -> None:
    every = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
             torch.bfloat16, torch.float16, torch.float32, torch.float64]  # fmt: skip
    for narrow in every:
        if narrow.is_floating_point:
            numbers = torch.randn(2000, dtype=torch.float64).exp().mul(0.3).to(narrow)
            numbers = torch.cat([numbers, torch.tensor([torch.finfo(narrow).max, torch.finfo(narrow).tiny, -0.0], dtype=narrow)])
        elif narrow is torch.bool:
            numbers = torch.tensor([True, False])
        else:
            limits = torch.iinfo(narrow)
            numbers = torch.cat([torch.tensor([limits.min, limits.max]), torch.arange(max(limits.min, -300), 256) % limits.max])
            numbers = numbers.to(narrow)
        for wide in every:
            if keeps(narrow, wide):
                assert torch.equal(numbers.to(wide).to(narrow), numbers), (narrow, wide)
