"""What `metrics_report()` tells a reader: exact counts of a known session, places, fallbacks."""

from __future__ import annotations

import re

import children
import pytest
import torch
import torch._lazy.metrics

import lazy_backend
from tests.device import DEVICE

FILE = "test_lazy_backend_report.py"


def session() -> None:
    """5 recordings of 3 kinds: 1 op; 3 ops of which one is dead, three times; 1 op before an op that falls back, twice."""
    x = torch.linspace(-1, 1, 12).to(DEVICE)
    y = x + 1
    lazy_backend.mark_step()
    for _ in range(3):
        y = (x * 2).tanh()
        x.exp()
        lazy_backend.mark_step()
    for _ in range(2):
        assert torch.nonzero(x.relu()).shape == (6, 1)
    assert y.sum().item() == pytest.approx(0, abs=1e-5)
    print(lazy_backend.metrics_report())


def lines(function: str) -> list[int]:
    """Lines of `session` that call ``function``."""
    first = session.__code__.co_firstlineno
    text = (children.ROOT / "tests" / FILE).read_text().splitlines()[first - 1 :]
    return [first + index for index, line in enumerate(text[:14]) if function in line]


@pytest.fixture(scope="module", params=["aten", "triton"])
def report(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The engine, and what the session prints under it."""
    return request.param, children.call(session, engine=request.param).stdout


def row(text: str, name: str) -> str:
    match = re.search(rf"^  {re.escape(name)}  +(.*)$", text, re.MULTILINE)
    assert match is not None, text
    return match[1]


def test_it_counts_graphs_hits_and_ops(report: tuple[str, str]) -> None:
    engine, text = report
    names = (
        "ops recorded",
        "recordings run",
        "graphs compiled",
        "cache hits",
        "dead ops never run",
        "executables dropped from the cache",
    )
    assert [row(text, name) for name in names] == ["13", "7", "4", "3", "3", "0"]


def test_it_counts_steps_and_kernels_a_recording(report: tuple[str, str]) -> None:
    engine, text = report
    steps, kernels = row(text, "steps run (ATen calls and kernels)"), row(text, "Triton kernels launched on a GPU")
    assert steps == ("10 (1.4 a recording)" if engine == "aten" else "7 (1.0 a recording)"), "mul and tanh fuse"
    if engine == "aten":
        assert kernels == "0 (0.0 a recording)"
    elif torch.cuda.is_available():
        assert kernels == "7 (1.0 a recording)"


def test_it_says_why_each_barrier_fired_and_where(report: tuple[str, str]) -> None:
    table = report[1].split("why each barrier fired\n")[1].split("\n\n")[0]
    first, looped = lines("mark_step()")
    (nonzero,), (item,) = lines("torch.nonzero"), lines(".item()")
    wanted = [
        (3, 3, "mark_step", "lazy_backend.mark_step()", looped),
        (1, 1, "mark_step", "lazy_backend.mark_step()", first),
        (2, 1, "data_dependent_shape", "aten::nonzero", nonzero),
        (1, 1, "value_access", "item()", item),
    ]
    for count, ops, kind, reason, line in wanted:
        place = rf"{re.escape(str(children.ROOT))}/tests/{FILE}:{line} in session"
        pattern = rf"^ +{count} +{ops} +[\d.]+ +{kind} +{re.escape(reason)}.* {place}$"
        assert re.search(pattern, table, re.MULTILINE), (pattern, table)
    assert len(table.splitlines()) == 1 + len(wanted)


def test_it_counts_ops_that_fell_back(report: tuple[str, str]) -> None:
    assert re.search(r"^ops that fell back.*\n +2  aten::nonzero$", report[1], re.MULTILINE)


def unused() -> None:
    assert lazy_backend.metrics_report() == "lazysched: the device has not been used"
    torch.ones(1, device=DEVICE)
    assert "ops that fell back: none" in lazy_backend.metrics_report()
    assert "no barrier yet" in lazy_backend.metrics_report()


def test_before_the_first_use_it_says_so() -> None:
    children.call(unused)


def after_a_reset() -> None:
    torch.nonzero(torch.ones(2, device=DEVICE))
    assert "aten::nonzero" in lazy_backend.metrics_report()
    torch._lazy.metrics.reset()
    assert "graphs compiled" in lazy_backend.metrics_report()
    torch.nonzero(torch.ones(2, device=DEVICE))
    assert re.search(r"^ +1  aten::nonzero$", lazy_backend.metrics_report(), re.MULTILINE)


def test_resetting_torchs_metrics_leaves_a_readable_report() -> None:
    children.call(after_a_reset)
