"""A replayed function records what it recorded before: the same numbers, without its Python, on other arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import lazy_backend
from tests import programs
from tests.replays import DEVICE, Counted, inputs, refusals, started  # noqa: F401 (a fixture)


def test_later_calls_run_no_python_and_give_the_same() -> None:
    lazy, eager = Counted(DEVICE), Counted("cpu")
    step = lazy_backend.replayed(lazy)
    kept = []
    for mine, theirs in zip(inputs(DEVICE, 7), inputs("cpu", 7)):
        found, wanted = step(mine), eager(theirs)
        kept.append((found, wanted))
        assert found["same"] is mine and found["name"] == "model"
    for found, wanted in kept:  # results are new tensors each time, views of them included
        for name in ("y", "first", "view"):
            torch.testing.assert_close(found[name].cpu(), wanted[name])
    torch.testing.assert_close(lazy.total.cpu(), eager.total)
    assert lazy.runs == 3 and eager.runs == 7


def test_views_of_an_argument_are_views_of_the_new_one() -> None:
    step = lazy_backend.replayed(Counted(DEVICE))
    for x in inputs(DEVICE, 6):
        step(x)["view"].zero_()
        assert not x.cpu().any()


def test_nothing_is_compiled_after_the_first_replays() -> None:
    step = lazy_backend.replayed(Counted(DEVICE))
    counts = []
    for x in inputs(DEVICE, 9):
        step(x)
        lazy_backend.mark_step()
        counts.append(lazy_backend.stats()["compiles"])
    assert counts[-1] == counts[4]


def test_what_is_recorded_around_it_is_one_recording_with_it() -> None:
    lazy, eager = Counted(DEVICE), Counted("cpu")
    step = lazy_backend.replayed(lazy)
    for mine, theirs in zip(inputs(DEVICE, 5), inputs("cpu", 5)):
        before = lazy_backend.stats()["flushes"]
        found = step(step(mine * 2)["y"] + 1)["y"].sum()
        flushed = lazy_backend.stats()["flushes"] - before
        torch.testing.assert_close(found.cpu(), eager(eager(theirs * 2)["y"] + 1)["y"].sum())
    assert flushed == 0


def test_other_layouts_and_other_numbers_are_other_calls() -> None:
    lazy = Counted(DEVICE)
    step = lazy_backend.replayed(lazy)
    (x,) = inputs(DEVICE, 1)
    for _ in range(4):
        step(x, scale=2.0)
    assert lazy.runs == 3
    step(x, scale=3.0)
    step(x.t().contiguous().t(), scale=2.0)
    step(x, scale=2)
    assert lazy.runs == 6


EMPTY: dict[str, Callable[[], Tensor]] = {
    "from a list": lambda: torch.tensor([], device=DEVICE),
    "from the CPU": lambda: torch.empty(0, 8).to(DEVICE),
    "allocated": lambda: torch.empty(0, device=DEVICE),
    "computed": lambda: torch.zeros(0, 8, device=DEVICE) * 2,
}


@pytest.mark.parametrize("how", EMPTY)
def test_a_cache_that_is_empty_at_first(how: str) -> None:
    """As transformers' models have it, which train with such caches unless they are told not to."""
    runs, layer = 0, torch.nn.Linear(8, 8, device=DEVICE)

    def step(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        layer.zero_grad()
        keys, values = EMPTY[how](), EMPTY[how]()
        for part in x.split(2):
            part = layer(part)
            keys, values = torch.cat([keys, part], dim=-2), torch.cat([values, part * 2], dim=-2)
        (keys * values).sum().backward()
        return keys.detach() + values.detach()

    replayed = lazy_backend.replayed(step)
    for x in inputs(DEVICE, 7):
        found, gradient = replayed(x).cpu(), layer.weight.grad.cpu()
        y = layer(x)
        (wanted,) = torch.autograd.grad((2 * y * y).sum(), layer.weight)
        torch.testing.assert_close(found, (3 * y).detach().cpu())
        torch.testing.assert_close(gradient, wanted.cpu())
    assert runs == 3, refusals()


def test_little_that_is_made_of_numbers_in_each_call_counts_as_numbers() -> None:
    """Python's lists as indices are copies from the CPU."""
    runs, layer = 0, torch.nn.Linear(8, 8, device=DEVICE)

    def step(x: Tensor, layer: torch.nn.Linear) -> tuple[Tensor, Tensor]:
        nonlocal runs
        runs += 1
        layer.zero_grad()
        y = layer(x)[:, [5, 0, -1]] * torch.tensor([1.0, 2.0, 0.5], device=x.device)
        y = y + torch.tensor(3, dtype=torch.int32).to(x.device)
        y.square().sum().backward()
        assert layer.weight.grad is not None
        return y.detach(), layer.weight.grad.clone()

    replayed, other = lazy_backend.replayed(step), copy.deepcopy(layer).to("cpu")
    for x in inputs(DEVICE, 9):
        found = replayed(x, layer)
        for one, wanted in zip(found, step(x.cpu(), other)):
            torch.testing.assert_close(one.cpu(), wanted)
    assert runs == 3 + 9, refusals()


def test_what_only_a_circle_holds_is_nobodys() -> None:
    runs = 0

    def step(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        y = x * 2
        circle: list[object] = [y]
        circle.append(circle)
        assert len([[number] for number in range(100_000)])  # the collector runs, if it may, and the circle is no longer young
        return y

    replayed = lazy_backend.replayed(step)
    for x in inputs(DEVICE, 6):
        assert torch.equal(replayed(x).cpu(), x.cpu() * 2)
    assert runs == 3, refusals()


def test_draws_go_on() -> None:
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    step = lazy_backend.replayed(noise)
    torch.manual_seed(3)
    found = [step(x).cpu() for x in inputs(DEVICE, 6)]
    torch.manual_seed(3)
    for mine, x in zip(found, inputs(DEVICE, 6)):
        assert torch.equal(mine, noise(x).cpu())


@settings(max_examples=10, deadline=None)
@given(programs.steps(barriers=False, max_size=14))
def test_random_programs(program: list[programs.Step]) -> None:
    """On arguments and on tensors of its own, both changed in place; what it returns may be, or see, either."""

    def calls(device: str, wrap: bool) -> list[list[Tensor]]:
        own = programs.inputs(device)[3:]
        function = lazy_backend.replayed(lambda *given: programs.interpret(program, [*given, *own])) if wrap else None
        found = []
        for number in range(6):
            given = [one + number for one in programs.inputs(device)[:3]]
            results = function(*given) if function else programs.interpret(program, [*given, *own])
            for one in results[::2]:  # writes through what was returned reach what it sees, and nothing else
                if not any(stride == 0 for stride in one.stride()):
                    one.add_(0.125)
            found.append([one.cpu().clone() for one in (*results, *given, *own)])
        return found

    for mine, theirs in zip(calls(DEVICE, True), calls("cpu", False), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
