"""Fusion by measurement: both ways are right, what was faster is kept and remembered. Imports `codegen` and tests' parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from graphs import execute, kernels, record, typed

from codegen.benchmark_fusion import Sides, doubtful_cuts, sides_of
from codegen.contest import Contest
from codegen.fuse import fused, plan, units_of
from codegen.tuning import HOPPER
from ir_nodes import settings


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Work in front of reductions, which wait for one another, and behind them."""
    return F.layer_norm((x * 2).tanh(), (x.shape[-1],), w).exp()


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum(-1)


class FakeTimer:
    def __init__(self, *times: float | None) -> None:
        self.times, self.contests = times, list[Contest]()

    def __call__(self, contests: Sequence[Contest]) -> list[list[float | None]]:
        self.contests += contests
        return [list(self.times[: len(contest)]) for contest in contests]


def chosen(program: Callable[..., Any], inputs: list[torch.Tensor], folder: Path, timer: FakeTimer) -> tuple[Any, Sides]:
    recording, _ = record(program, *inputs)
    return recording, sides_of(recording.graph, HOPPER, "a GPU", folder, timer)


LARGE = [torch.ones(1024, 1024), torch.ones(1024)]


@pytest.mark.parametrize(("times", "count"), [((1.0, 2.0, 2.0), 1), ((1.0, 0.5, 2.0), 2), ((1.0, 2.0, 0.5), 2),
                                              ((1.0, 0.97, 0.97), 1), ((None, None, None), 1)])  # fmt: skip
def test_the_faster_way_is_planned(times: tuple[float | None, ...], count: int, tmp_path: Path) -> None:
    timer = FakeTimer(*times)
    recording, sides = chosen(norm, LARGE, tmp_path, timer)
    (contest,) = timer.contests
    assert [len(way) for way in contest] == [1, 2, 2], "together, cut in front of the norm, cut behind it"
    made = plan(recording.graph, sides=sides)
    assert len(kernels(made)) == count
    assert count == 1 or any("faster apart" in refusal.reason for refusal in made.refusals)


@pytest.mark.parametrize("times", [(1.0, 0.5, 2.0), (1.0, 2.0, 0.5)], ids=["in front", "behind"])
def test_both_ways_compute_the_same(times: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codegen.benchmark_fusion.SMALLEST", 1)
    inputs = [torch.randn(20, 300), torch.randn(300)]
    recording, sides = chosen(norm, inputs, tmp_path, FakeTimer(*times))
    made = plan(recording.graph, sides=sides)
    assert len(kernels(made)) == 2
    wanted = norm(*inputs)
    (held,) = [value.buffer.index for value in recording.graph.outputs() if value.version or value.buffer.index > 1]
    torch.testing.assert_close(typed(execute(recording, made)[held], wanted), wanted, rtol=2e-5, atol=2e-6)


def test_it_is_measured_once(tmp_path: Path) -> None:
    first, second = FakeTimer(1.0, 0.5, 2.0), FakeTimer()
    _, sides = chosen(norm, LARGE, tmp_path, first)
    assert chosen(norm, LARGE, tmp_path, second)[1] == sides and sides and not second.contests
    (file,) = tmp_path.glob("fusion_*.json")
    assert json.loads(file.read_text())["choice"] == "before reducing"


def test_small_kernels_are_not_asked_about(tmp_path: Path) -> None:
    timer = FakeTimer()
    assert chosen(norm, [torch.ones(64, 64), torch.ones(64)], tmp_path, timer)[1] == {} and not timer.contests


def test_a_cut_never_turns_a_dependency_around() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = norm(x, w) * 3
        return (y - y.amax(-1, keepdim=True)).exp() + x

    graph = record(program, *LARGE)[0].graph
    for group in fused(units_of(graph, (), HOPPER), HOPPER, {}).groups():
        for cut in doubtful_cuts(group).values():
            assert all(cut[other.position] <= cut[unit.position] for unit in group.units for other in unit.before
                       if other.position in cut)


def test_the_setting_is_off_unless_asked_for() -> None:
    assert not settings.read({}).benchmark_fusion
    assert settings.read({"LAZYSCHED_BENCHMARK_FUSION": "1"}).benchmark_fusion
