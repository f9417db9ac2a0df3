"""Tiles are measured once and remembered; every candidate computes the same. Imports `codegen` and the tests' recorder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from graphs import compile_all, execute, kernels, record
from recording import Recording

from codegen import autotune, choices
from codegen.autotune import POINTWISE, REDUCTION, candidates, tune
from codegen.contest import Contest, decide
from codegen.fuse import plan
from codegen.kernel import KernelStep, Plan
from codegen.tuning import HOPPER

PROGRAMS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "pointwise": (lambda x, b: (x + b).tanh() * 2, [torch.randn(70, 300), torch.randn(300)]),
    "transpose": (lambda x, y: x.t() + y, [torch.randn(130, 70), torch.randn(70, 130)]),
    "rows": (lambda x: x.softmax(-1), [torch.randn(40, 300)]),
    "long rows": (lambda x: x.softmax(-1), [torch.randn(3, 20000)]),
    "columns": (lambda x: x.exp().sum(0), [torch.randn(300, 200)]),
    "layer norm": (lambda x, w: F.layer_norm(x, (300,), w), [torch.randn(40, 300), torch.randn(300)]),
    "split": (lambda x: x.exp().sum(0), [torch.randn(4096, 16)]),
}


def planned(name: str) -> tuple[Recording, Plan]:
    program, inputs = PROGRAMS[name]
    recording, _ = record(program, *inputs)
    return recording, plan(recording.graph)


def results(recording: Recording, made: Plan) -> list[torch.Tensor]:
    memory = execute(recording, made)
    return [memory[value.buffer.index].view(torch.float32) for value in recording.graph.outputs()]


def large(rows: int = 1024) -> Plan:
    recording, _ = record(lambda x: x.exp() + 1, torch.ones(rows, 1024))
    return plan(recording.graph)


class FakeTimer:
    """Times by what a candidate changes, which the number of warps and block sizes stand for."""

    def __init__(self, fastest: int, broken: Sequence[int] = ()) -> None:
        self.fastest, self.broken, self.asked = fastest, broken, 0

    def __call__(self, contests: Sequence[Contest]) -> list[list[float | None]]:
        self.asked += len(contests)
        return [[None if index in self.broken else 1e-6 if index == self.fastest else 2e-6 for index in range(len(contest))]
                for contest in contests]


@pytest.mark.parametrize("changes", [*POINTWISE, *REDUCTION])
def test_each_variant_is_one_of_the_tuning(changes: str) -> None:
    assert HOPPER.changed(changes) != HOPPER


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_candidate_computes_the_same(name: str) -> None:
    recording, made = planned(name)
    wanted = [recording.expected[value.buffer.index].view(torch.float32) for value in recording.graph.outputs()]
    (index, step), *_ = [(index, step) for index, step in enumerate(made.steps) if isinstance(step, KernelStep)]
    found = candidates(step)
    assert 2 <= len(found) <= autotune.CANDIDATES, list(found)
    assert len({(one.kernel, one.grid) for one in found.values()}) == len(found)
    for changes, other in found.items():
        steps = tuple(other if place == index else old for place, old in enumerate(made.steps))
        again = dataclasses.replace(made, steps=steps)
        torch.testing.assert_close(results(recording, again), wanted, rtol=1e-5, atol=1e-5, msg=f"{changes} differs")


@pytest.mark.parametrize("name", ["pointwise", "rows", "columns"])
def test_every_candidate_compiles(name: str) -> None:
    _, made = planned(name)
    compile_all(dataclasses.replace(made, steps=tuple(candidates(kernels(made)[0]).values())))


def test_the_fastest_is_taken_and_measured_once(tmp_path: Path) -> None:
    timer = FakeTimer(fastest=2)
    first = tune(large(), "a GPU", tmp_path, timer)
    wanted = list(candidates(kernels(large())[0]).values())[2]
    assert timer.asked == 1 and kernels(first)[0].kernel == wanted.kernel
    again = tune(large(), "a GPU", tmp_path, timer)
    assert timer.asked == 1, "it is remembered"
    assert kernels(again)[0].kernel == wanted.kernel and kernels(again)[0].grid == wanted.grid
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["microseconds"][""] == 2.0
    tune(large(1000), "a GPU", tmp_path, timer)
    assert timer.asked == 1, "sizes of one class share a choice"
    tune(large(4096), "a GPU", tmp_path, timer)
    tune(large(), "another GPU", tmp_path, timer)
    assert timer.asked == 3


def test_a_damaged_choice_is_measured_again(tmp_path: Path) -> None:
    timer = FakeTimer(fastest=1)
    tune(large(), "a GPU", tmp_path, timer)
    (file,) = tmp_path.glob("*.json")
    for text in ("", "[1]", "{}", file.read_text()[:-9]):
        file.write_text(text)
        before = timer.asked
        tune(large(), "a GPU", tmp_path, timer)
        assert timer.asked == before + 1 and choices.json.loads(file.read_text())["choice"]


def test_small_kernels_and_those_that_no_timer_runs_stay(tmp_path: Path) -> None:
    timer = FakeTimer(fastest=1, broken=range(9))
    _, small = planned("rows")
    assert tune(small, "a GPU", tmp_path, timer).steps == small.steps and timer.asked == 0
    made = large()
    assert tune(made, "a GPU", tmp_path, timer).steps == made.steps and timer.asked == 1
    assert not list(tmp_path.glob("*.json")), "nothing was learnt"


def test_a_sum_keeps_its_order_where_the_program_asks_for_that(tmp_path: Path) -> None:
    recording, _ = record(lambda x: x.softmax(-1), torch.ones(1024, 1024))
    made = plan(recording.graph)
    torch.use_deterministic_algorithms(True)
    try:
        assert tune(made, "a GPU", tmp_path, FakeTimer(fastest=1)).steps == made.steps
        assert tune(large(), "a GPU", tmp_path, FakeTimer(fastest=1)).steps != large().steps
    finally:
        torch.use_deterministic_algorithms(False)
    assert tune(made, "a GPU", tmp_path, FakeTimer(fastest=1)).steps != made.steps


def test_threads_of_kernels_with_many_operands_take_fewer_elements() -> None:
    def warps(program: Callable[..., Any], count: int) -> int:
        recording, _ = record(program, *(torch.ones(1 << 20) for _ in range(count)))
        (step,) = kernels(plan(recording.graph))
        return step.kernel.num_warps

    def adam(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        m.lerp_(g, 0.1)
        v.mul_(0.9).addcmul_(g, g, value=0.1)
        return p.addcdiv_(m, v.sqrt(), value=-0.1), m, v

    assert warps(adam, 4) == 2 * warps(lambda x, y: x + y, 2)


def test_a_winner_is_clearly_faster() -> None:
    names = ["", "a", "b"]
    assert decide(names, [1.0, 0.98, 1.5], 0.97) == "" and decide(names, [1.0, 0.9, 0.8], 0.97) == "b"
    assert decide(names, [None, 0.9, 0.8], 0.97) == "b"
    assert decide(names, [1.0, None, None], 0.97) == "" == decide(names, [None] * 3, 0.97)
