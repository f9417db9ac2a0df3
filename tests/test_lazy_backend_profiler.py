"""PyTorch's profilers see ops under the user's ranges; anomaly mode and hooks on saved tensors work as in eager mode."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import lazy_backend
from lazy_backend import register_segment
from tests.device import DEVICE, here


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with record_function("forward"):
        loss = model(torch.ones(4, 8, device=DEVICE)).square().mean()
    with record_function("backward pass"):
        loss.backward()
    with record_function("update"):
        optimizer.step()
        optimizer.zero_grad()


def within(inner: object, outer: object) -> bool:
    return outer.time_range.start <= inner.time_range.start and inner.time_range.end <= outer.time_range.end


@pytest.mark.parametrize("activities", [None, [ProfilerActivity.CPU], [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]],
                         ids=["default", "cpu", "cpu and device"])  # fmt: skip
def test_ops_appear_under_the_users_ranges(activities: list[ProfilerActivity] | None, tmp_path: Path) -> None:
    model = nn.Linear(8, 8).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step(model, optimizer)
    with profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True) as result:
        step(model, optimizer)
    events = result.events()
    names = {event.name for event in events}
    assert {"forward", "backward pass", "update", "aten::linear", "AddmmBackward0"} <= names
    forward, update = (next(event for event in events if event.name == name) for name in ("forward", "update"))
    assert any(event.name == "aten::linear" and within(event, forward) for event in events), "as it is recorded"
    runs = [event for event in events if "addmm" in event.name and within(event, update)]
    assert runs or torch.cuda.is_available(), "and as it runs, at the barrier"
    assert "aten::linear" in result.key_averages(group_by_input_shape=True).table(row_limit=100)
    result.export_chrome_trace(str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


class Nested(nn.Module):
    """A method with another one inside, and ops around it."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.inner(x @ x) + x)


def test_segments_are_ranges_of_what_runs() -> None:
    model = Nested()
    x = torch.eye(4, device=DEVICE) * 2
    handles = [register_segment(model.forward, "outer"), register_segment(model.inner, "inner")]
    for _ in range(2):  # compiled, then cached
        with profile() as result:
            y = model(x)
            lazy_backend.mark_step()
        host = [event for event in result.events() if event.device_type.name == "CPU"]  # a GPU's side has the ranges once more
        outer, inner = ([e for e in host if e.name == f"{name} (lazysched)"] for name in ("outer", "inner"))
        assert len(outer) == len(inner) == 1 and within(inner[0], outer[0])
        products = [event for event in host if event.name == "aten::mm" and within(event, outer[0])]
        assert [within(product, inner[0]) for product in products] == [False, True]
        assert any("inv" in event.name and within(event, outer[0]) for event in result.events())
    assert y.shape == x.shape
    for handle in handles:
        handle.remove()


def test_the_older_profiler_knows_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    with torch.autograd.profiler.profile(use_device=DEVICE) as result:
        with record_function("mine"):
            x = torch.ones(4, 4, device=DEVICE) @ torch.ones(4, 4, device=DEVICE)
    assert {"mine", "aten::matmul"} <= {event.name for event in result.function_events}
    assert result.key_averages().table(sort_by="cpu_time_total", row_limit=5)
    assert "aten::mm" not in lazy_backend.debug.text([x]), "what was recorded has run when the profile ends"
    assert "Exception" not in capfd.readouterr().err


def test_an_error_inside_leaves_the_profiler_usable() -> None:
    with pytest.raises(ValueError, match="mine"), profile():
        torch.ones(2, device=DEVICE).exp()
        raise ValueError("mine")
    with profile() as result:
        torch.ones(2, device=DEVICE).exp().tolist()
    assert any("exp" in event.name for event in result.events())


def test_anomaly_mode_names_the_forward_line() -> None:
    x = torch.tensor([-1.0], device=DEVICE, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values in its 0th"):
            line, y = here(), x.sqrt()
            y.sum().backward()
    said = "".join(str(warning.message) for warning in caught)
    assert "Traceback of forward call" in said and f"line {line}" in said and Path(__file__).name in said


def test_saved_tensors_hooks_and_save_on_cpu() -> None:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.device.type)
        return tensor.cpu()

    grads = []
    contexts = (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(DEVICE)),
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=DEVICE),
    )
    for context in contexts:
        x = torch.linspace(0, 1, 5).to(DEVICE).requires_grad_()
        with context:
            y = (x.exp() * x * x).sum()
        y.backward()
        grads.append(x.grad.tolist())
    assert packed and set(packed) == {DEVICE} and all(grad == grads[0] for grad in grads)


def test_forbidding_saved_tensors() -> None:
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        with torch.autograd.graph.save_on_cpu():
            x.exp()
