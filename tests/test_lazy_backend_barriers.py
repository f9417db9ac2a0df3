"""What ends a recording, and what the log says about it: kind, reason and the user's line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Callable, Iterator

import pytest
import torch
import torch._lazy
import torch._lazy.metrics
from torch import nn

import lazy_backend
from ir_nodes import settings
from lazy_backend import api
from tests.barrier_log import barriers_of, configured, only, pending, settle
from tests.device import DEVICE, here


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    settle()
    yield
    lazy_backend.mark_step(wait=True)


VALUE_ACCESSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[0]),
    "bool": lambda t: bool(t[0]),
    "if": lambda t: 1 if t.sum() > 0 else 0,
    "tolist": lambda t: t.tolist(),
    "format": lambda t: f"{t[0]:.2f}",
    "equal": lambda t: torch.equal(t, t + 1),
    "allclose": lambda t: torch.allclose(t, t),
}
COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "copy_": lambda t: torch.zeros(4).copy_(t),
    "numpy": lambda t: t.cpu().numpy(),
}
SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 1],
    "unique": lambda t: t.unique(),
    "masked_select": lambda t: torch.masked_select(t, t > 1),
}


@pytest.mark.parametrize("name", VALUE_ACCESSES)
def test_looking_at_a_number(name: str) -> None:
    tensor = pending()
    fired = barriers_of(lambda: VALUE_ACCESSES[name](tensor))
    assert fired[0].kind.label == "value_access" and fired[0].reason
    assert fired[0].frame is not None and fired[0].frame.file.endswith("test_lazy_backend_barriers.py")


def test_printing_names_the_line_that_prints() -> None:
    tensor = pending()
    line = here() + 1
    fired = barriers_of(lambda: str(tensor))
    assert fired and fired[0].frame is not None and fired[0].frame.line == line


@pytest.mark.parametrize("name", COPIES)
def test_copying_to_another_device(name: str) -> None:
    tensor = pending()
    barrier = only(barriers_of(lambda: COPIES[name](tensor)))
    assert barrier.kind.label == "value_access" and barrier.reason == "copied to cpu"
    assert barrier.frame is not None and barrier.frame.file.endswith("test_lazy_backend_barriers.py")


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_data(name: str) -> None:
    tensor = pending()
    barrier = barriers_of(lambda: SHAPES[name](tensor))[0]
    assert barrier.kind.label == "data_dependent_shape" and "aten::" in barrier.reason


def test_the_frame_is_the_users_line_and_ops_are_counted() -> None:
    x = torch.ones(4, device=DEVICE)
    lazy_backend.mark_step()
    y = x + 1
    y = (y * 2).sum()
    barrier = only(barriers_of(lambda: y.item())); line = here()  # noqa: E702
    assert barrier.frame is not None
    assert (barrier.frame.line, barrier.frame.function) == (line, "<lambda>")
    assert barrier.ops == 3 and barrier.milliseconds > 0


def test_mark_step_from_both_modules() -> None:
    x = pending()
    barrier = only(barriers_of(lazy_backend.mark_step))
    assert barrier.kind.label == "mark_step" and barrier.reason == "lazy_backend.mark_step()"
    y = x + 1
    barrier = only(barriers_of(torch._lazy.mark_step))
    assert barrier.kind.label == "mark_step" and barrier.reason == "torch._lazy.mark_step()"
    assert y.tolist() == [4.0] * 4


def test_mark_step_counts_in_the_metrics_of_torch_lazy() -> None:
    before = torch._lazy.metrics.counter_value("MarkStep") or 0
    lazy_backend.mark_step()
    torch._lazy.mark_step()
    assert torch._lazy.metrics.counter_value("MarkStep") == before + 2


@pytest.mark.parametrize("device", [None, "lazysched", "lazysched:0", 0, torch.device("lazysched", 0)])
def test_mark_step_takes_a_device(device: Any) -> None:
    _kept = pending()
    assert only(barriers_of(lambda: lazy_backend.mark_step(device, wait=True))).kind.label == "mark_step"


def test_mark_step_refuses_another_device() -> None:
    with pytest.raises(ValueError, match="expected a lazysched device, got cpu"):
        lazy_backend.mark_step("cpu")


def test_sync_and_wait() -> None:
    x = pending()
    assert only(barriers_of(lambda: lazy_backend.sync([x]))).kind.label == "sync"
    y = x + 1
    assert only(barriers_of(lambda: lazy_backend.sync(y))).kind.label == "sync"
    z = y + 1
    assert only(barriers_of(lazy_backend.wait_device_ops)).kind.label == "wait"
    assert z.tolist() == [5.0] * 4
    w = z + 1
    assert only(barriers_of(torch._lazy.wait_device_ops)).kind.label == "wait"
    v = w + 1
    assert only(barriers_of(torch.lazysched.synchronize)).kind.label == "wait"
    assert v.tolist() == [7.0] * 4


def test_the_end_of_an_optimizer_step() -> None:
    model = nn.Linear(3, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    barrier = only(barriers_of(optimizer.step))
    assert barrier.kind.label == "optimizer_step" and barrier.reason == "SGD.step() ended"


def test_the_automatic_barrier_can_be_switched_off() -> None:
    model = nn.Linear(3, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    with settings.override(auto_barrier=False):
        assert barriers_of(optimizer.step) == []


def test_an_optimizer_of_another_device_causes_no_barrier() -> None:
    _kept = pending()
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    assert barriers_of(torch.optim.SGD(model.parameters(), lr=0.1).step) == []


def test_a_matmul_or_a_rare_op_is_no_barrier() -> None:
    x = torch.ones(6, 6, device=DEVICE)

    def work() -> torch.Tensor:
        y = (x @ x).softmax(-1)
        y = torch.linalg.vector_norm(y.cumsum(0).sort(-1).values, dim=1)
        return nn.functional.grid_sample(x.view(1, 1, 6, 6), x.view(1, 3, 6, 2) / 8, align_corners=False).sum() + y

    assert barriers_of(work) == []


def test_reading_a_generators_state() -> None:
    _kept = torch.randn(3, device=DEVICE)
    state = torch.lazysched.get_rng_state()
    barrier = only(barriers_of(lambda: state.tolist()))  # to keep it and to put it back are recorded
    assert barrier.kind.label == "generator_state"
    _kept = torch.randn(3, device=DEVICE)
    barrier = only(barriers_of(lambda: torch.lazysched.default_generators[0].get_state()))
    assert barrier.kind.label == "generator_state"


def test_eager_mode_runs_each_op_at_once() -> None:
    fired = configured(lambda: pending() + 1, mode="eager")
    assert len(fired) >= 2 and {(barrier.kind.label, barrier.ops) for barrier in fired} == {("eager", 1)}


def test_the_recorded_reasons_reach_the_report() -> None:
    pending().sum().item()
    report = lazy_backend.metrics_report()
    assert "value_access" in report and "test_lazy_backend_barriers.py" in report
    assert "graphs compiled" in report


def test_the_debug_level_prints_each_barrier_with_reason_and_frame() -> None:
    program = "import torch, lazy_backend\nx = torch.ones(3, device='lazysched') + 1\nprint(x.sum().item())\n"
    environment = settings.child_environment(debug={"barriers"})
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "lazysched: barrier value_access" in line]
    assert len(lines) == 1 and "<string>:3 in <module>" in lines[0]


def test_a_failing_log_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(api, "listeners", [lambda barrier, order: 1 / 0])
    monkeypatch.setattr("sys.unraisablehook", told.append)
    assert torch.ones(2, device=DEVICE).add(1).sum().item() == 4
    assert [type(one.exc_value) for one in told] == [ZeroDivisionError] and "barrier log" in told[0].err_msg


def test_results_are_not_copied_for_the_strides_of_dimensions_of_one() -> None:
    """A convolution to one pixel promises other strides than it gives, in dimensions where strides mean nothing."""
    with torch.no_grad():
        layer = torch.nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last)
        wanted = layer(torch.ones(2, 8, 3, 3).to(memory_format=torch.channels_last))
        layer = layer.to("lazysched")
        x = torch.ones(2, 8, 3, 3).to("lazysched").to(memory_format=torch.channels_last)
        for _ in range(2):
            with torch.profiler.profile() as profile:
                found = layer(x)
                lazy_backend.mark_step(wait=True)
        torch.testing.assert_close(found.cpu(), wanted)
    names = [event.key for event in profile.key_averages()]
    assert any("conv" in name for name in names) and "aten::copy_" not in names
