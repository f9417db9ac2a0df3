"""Random programs with random barriers leave on lazysched what they leave on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lazy_backend
from tests import programs
from tests.device import CLOSE, DEVICE, ON_GPU


def some_barrier(held: list[torch.Tensor], choice: int) -> None:
    """One of the ways to end a recording; which one depends on the program alone."""
    tensor = held[choice % len(held)]
    kind = (choice // 7) % 6
    if kind == 0:
        lazy_backend.mark_step()
    elif kind == 1:
        tensor.sum().item()
    elif kind == 2:
        tensor.cpu()
    elif kind == 3:
        lazy_backend.sync(tensor)
    elif kind == 4:
        torch.lazysched.synchronize()
    else:
        tensor.nonzero()


def check(program: list[programs.Step]) -> None:
    wanted = programs.interpret(program, programs.inputs("cpu"))
    got = programs.interpret(program, programs.inputs(DEVICE), some_barrier)
    assert len(got) == len(wanted)
    for index, (mine, theirs) in enumerate(zip(got, wanted)):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), f"result {index}"
        assert mine.stride() == theirs.stride() or not theirs.numel(), f"result {index}"
        tolerance = 1e-2 if theirs.dtype is torch.bfloat16 else 10 * CLOSE if ON_GPU else CLOSE
        torch.testing.assert_close(mine.cpu(), theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(programs.steps(barriers=True))
@example([("in_place", 0, 4, 3), ("view", 0, 0, 0), ("barrier", 0, 0, 0), ("in_place", 5, 0, 1), ("barrier", 6, 0, 0)])
@example([("view", 0, 1, 0), ("unary", 53, 0, 134)])  # abs of a transpose keeps its strides
def test_random_programs_with_random_barriers(program: list[programs.Step]) -> None:
    check(program)


@settings(max_examples=30, deadline=None)
@given(programs.steps(barriers=True, max_size=80))
def test_long_random_programs(program: list[programs.Step]) -> None:
    check(program)


@settings(max_examples=30, deadline=None)
@given(programs.steps(barriers=False), st.integers(1, 6))
def test_the_same_program_twice_is_compiled_once(program: list[programs.Step], every: int) -> None:
    """Held tensors included, the second run of a program hits the cache."""
    results = []
    for _ in range(2):
        tensors = programs.inputs(DEVICE)
        lazy_backend.mark_step()
        before = lazy_backend.stats()["compiles"]
        held = programs.interpret(program, tensors)[::every]
        del tensors
        lazy_backend.mark_step()
        results.append((lazy_backend.stats()["compiles"] - before, [tensor.cpu() for tensor in held]))
    assert results[1][0] == 0
    for first, second in zip(results[0][1], results[1][1]):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def _gradients(program: list[programs.Step], device: str) -> list[torch.Tensor]:
    """Gradients of the inputs of a program without writes, through all of its float results."""
    tensors = [tensor.requires_grad_() for tensor in programs.inputs(device)]
    held = programs.interpret(program, tensors, some_barrier if device == DEVICE else None)
    results = [t for t in held if t.requires_grad and t.is_floating_point()]
    total = sum((t.float().tanh().sum() for t in results), torch.zeros((), device=device))
    total.backward()
    return [t.grad if t.grad is not None else torch.zeros_like(t) for t in tensors]


def _without_writes(program: list[programs.Step]) -> list[programs.Step]:
    return [step for step in program if step[0] not in ("in_place", "drop")]


@settings(max_examples=50, deadline=None)
@given(programs.steps(barriers=True, max_size=12).map(_without_writes))
def test_gradients_of_random_programs(program: list[programs.Step]) -> None:
    for mine, theirs in zip(_gradients(program, DEVICE), _gradients(program, "cpu")):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=10 * CLOSE, atol=10 * CLOSE, equal_nan=True)


@pytest.mark.parametrize("kind", range(6))
def test_each_barrier_of_the_programs_leaves_the_numbers(kind: int) -> None:
    x = torch.arange(6.0).reshape(2, 3).to(DEVICE)
    view = x.t()
    x.add_(1)
    some_barrier([x], 7 * kind)
    view[1].mul_(10)
    assert x.tolist() == [[1.0, 20.0, 3.0], [4.0, 50.0, 6.0]]
