"""A plan on a GPU, with every choice that can be measured: what was chosen is told. A timer of our own stands for the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import pytest
import torch
from graphs import kernels, record

from codegen import autotune, benchmark_fusion, contest, templates, triton_engine
from codegen.contest import Contest
from codegen.engine import Context
from codegen.kernel import Plan
from codegen.tuning import HOPPER
from ir_nodes import Graph, settings
from ir_nodes.remarks import Remarks


def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product with what follows it, a norm with work around it, and a kernel that reduces nothing."""
    y = ((x @ weight).exp() * 2).relu()
    return torch.layer_norm(y.sin() + 1, (1024,)) * 3


class Timer:
    """The last of each contest is the fastest, or all take the same."""

    def __init__(self, last: bool) -> None:
        self.last, self.contests = last, 0

    def __call__(self, contests: Sequence[Contest]) -> list[list[float | None]]:
        self.contests += len(contests)
        return [[1e-6 if self.last and index == len(one) - 1 else 2e-6 for index in range(len(one))] for one in contests]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (autotune, benchmark_fusion, templates):
        monkeypatch.setattr(module, "machine_name", lambda device: "a GPU")
    monkeypatch.setattr(triton_engine, "tuning_of", lambda context: HOPPER)
    monkeypatch.setattr(triton_engine, "warm_up", lambda folder, nodes: None)
    monkeypatch.setattr(triton_engine, "why_not_overlapping", lambda context: "")


def graph() -> Graph:
    return record(program, torch.ones(1024, 1024, dtype=torch.bfloat16), torch.ones(1024, 1024, dtype=torch.bfloat16))[0].graph


def fused(folder: Path, measures: bool = True) -> tuple[Plan, list[str]]:
    remarks = Remarks()
    with settings.override(autotune=True, benchmark_fusion=True, templates=True):
        made = triton_engine.fuse(graph(), Context(True, 0, folder, remarks=remarks, measures=measures))
    return made, [f"{remark.optimisation} {remark.done} {remark}" for remark, _ in remarks.all()]


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("last", [True, False], ids=["another", "the usual"])
def test_choices_are_told_and_recalled_without_measuring(last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer(last)
    monkeypatch.setattr(triton_engine, "on_gpu", lambda folder, device: timer)
    made, told = fused(tmp_path)
    assert timer.contests and {line.split()[0] for line in told} >= {"autotune", "fusion", "templates"}
    words = "1 us measured instead of 2" if last else "2 us measured"
    assert all(words in line for line in told), told
    assert all(any(line.startswith(f"{name} {last} ") for line in told) for name in ("autotune", "templates"))
    asked = timer.contests
    again, recalled = fused(tmp_path, measures=False)
    assert timer.contests == asked and recalled == told
    assert [step.kernel for step in kernels(again)] == [step.kernel for step in kernels(made)]


@pytest.mark.usefixtures("on_gpu")
def test_what_was_never_measured_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "on_gpu", None)
    made, told = fused(tmp_path, measures=False)
    assert kernels(made) and not told and not list(tmp_path.iterdir())
