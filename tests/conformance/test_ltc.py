"""What PyTorch's own lazy tensors (LTC) promise in their tests, kept by the device: closures, views, seeds, frames, metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._lazy
import torch._lazy.computation
import torch._lazy.config
import torch._lazy.debug
import torch._lazy.ir_cache
import torch._lazy.metrics as metrics
from torch import nn
from torch._lazy.device_context import get_device_context

import lazy_backend
from tests.conformance.features import filled, randn, same
from tests.device import DEVICE, here


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    lazy_backend.mark_step(wait=True)
    metrics.reset()
    yield
    context = get_device_context()
    context.step_closures, context.async_step_closures = [], []


def compiles(step: Callable[[int], Any], rounds: int) -> list[int]:
    """Graphs compiled in each of ``rounds`` calls, each ended by a mark_step."""
    counts = []
    torch._lazy.mark_step()
    for index in range(rounds):
        before = lazy_backend.stats()["compiles"]
        step(index)
        torch._lazy.mark_step()
        counts.append(lazy_backend.stats()["compiles"] - before)
    return counts


# ---- step closures ------------------------------------------------------------------------------------------------------


def test_closures_run_in_order_after_the_step() -> None:
    x, seen = torch.zeros((), device=DEVICE), []
    for number in range(3):
        torch._lazy.add_step_closure(lambda t, n: seen.append((n, t.item())), args=(x + number, number))
    assert seen == []
    torch._lazy.mark_step()
    assert seen == [(0, 0.0), (1, 1.0), (2, 2.0)]
    torch._lazy.mark_step()
    assert len(seen) == 3


def test_an_error_in_a_closure_reaches_the_step_and_leaves_the_next_one_alone() -> None:
    def fail() -> None:
        raise RuntimeError("no print today")

    torch._lazy.add_step_closure(fail)
    with pytest.raises(RuntimeError, match="no print today"):
        torch._lazy.mark_step()
    torch._lazy.mark_step()
    assert (torch.ones(2, device=DEVICE) + 1).tolist() == [2.0, 2.0]


def test_an_error_in_an_asynchronous_closure_is_told_to_the_next_one() -> None:
    def fail() -> None:
        raise RuntimeError("no print today")

    get_device_context().async_closure_handler = None
    torch._lazy.add_step_closure(fail, run_async=True)
    torch._lazy.mark_step()
    get_device_context().async_closure_handler._closure_event_loop.join(10)
    torch._lazy.add_step_closure(fail, run_async=True)
    with pytest.raises(RuntimeError, match="previously raised exception"):
        torch._lazy.mark_step()
    get_device_context().async_closure_handler = None


def test_an_asynchronous_closure_blocks_nobody() -> None:
    go, done, seen = threading.Event(), threading.Event(), []
    x = torch.ones(2, device=DEVICE)

    def look(t: torch.Tensor) -> None:
        go.wait(10)
        seen.append(t.tolist())
        done.set()

    torch._lazy.add_step_closure(look, args=(x + 1,), run_async=True)
    torch._lazy.mark_step()
    assert (x * 3).tolist() == [3.0, 3.0] and not seen
    go.set()
    assert done.wait(10) and seen == [[2.0, 2.0]]


# ---- views and writes, across barriers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("barrier", [None, torch._lazy.mark_step, torch._lazy.wait_device_ops])
def test_a_view_stays_a_view(barrier: Callable[[], Any] | None) -> None:
    def write(device: str) -> Any:
        x = randn(device, 4)
        y = x.view(2, 2)
        y.add_(1)
        total = x + x
        if barrier:
            barrier()
        y.add_(1)
        x[1:3].mul_(2)
        return x, y, total

    same(write)


def test_writing_to_a_moved_tensor_leaves_its_source_alone() -> None:
    source = torch.ones(3)
    moved = source.to(DEVICE)
    moved.add_(1)
    source.add_(5)
    torch._lazy.mark_step()
    assert (source.tolist(), moved.tolist()) == ([6.0] * 3, [2.0] * 3)


def test_views_of_a_tensor_made_on_the_device() -> None:
    same(lambda device: torch.tensor([[1, 2, 3, 4, 5]], device=device).view(-1))


def test_assigning_data() -> None:
    def assign(device: str) -> Any:
        x, other = randn(device, 3), randn(device, 3)
        view = x.view(3, 1)
        x += 1
        torch._lazy.mark_step()
        x.data = other
        x += 1
        return x, other, view

    same(assign)


def test_a_module_made_under_the_device() -> None:
    def make(device: str) -> Any:
        with torch.device(device):
            layer = nn.Linear(4, 2, bias=False)
            x = torch.ones(4)
        torch._lazy.mark_step()
        filled(layer)
        return x @ layer.weight.to(device).transpose(0, 1)

    same(make)


# ---- the same program is compiled once (LTC: reuse of IR) ------------------------------------------------------------------


def test_a_repeated_step_is_compiled_once() -> None:
    x, y, z = (torch.ones(2, 3, device=DEVICE) for _ in range(3))
    assert compiles(lambda index: z.add_(x + y), 10)[1:] == [0] * 9
    assert z.tolist() == [[21.0] * 3] * 2


def test_a_step_that_changes_is_compiled_once_more() -> None:
    x, y, z = (torch.ones(4, 3, device=DEVICE) for _ in range(3))
    found = compiles(lambda index: z.add_(x + y) if index < 5 else z.add_(x - y), 10)
    assert sum(found[1:]) == found[5] == 1 and z.tolist() == [[11.0] * 3] * 4


def test_batch_norm_is_compiled_once() -> None:
    def normalise(device: str) -> Any:
        x, layer, out = randn(device, 4, 3, 5, 5), filled(nn.BatchNorm2d(3)).to(device), []
        found = compiles(lambda index: out.append(layer(x).sum()), 6)
        assert device != DEVICE or found[2:] == [0] * 4
        return out, dict(layer.state_dict())

    same(normalise)


@pytest.mark.parametrize("own", [False, True])
def test_another_seed_compiles_nothing(own: bool) -> None:
    def draw(index: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(index) if own else None
        torch.manual_seed(index)
        results.append(torch.rand(3, device=DEVICE, generator=generator) + torch.randn(3, device=DEVICE, generator=generator))

    results: list[torch.Tensor] = []
    assert compiles(draw, 5)[2:] == [0] * 3
    assert len({tuple(result.tolist()) for result in results}) == 5


def test_a_fallback_in_the_middle_of_a_loop() -> None:
    def loop(device: str) -> Any:
        x, y = randn(device, 6), torch.zeros((), device=device)
        for _ in range(5):
            x = x - 0.1
            y = y + x[x.nonzero().flatten()].sum()
            y = y + 1
        return y

    before = metrics.counter_value("aten::nonzero") or 0
    same(loop)
    assert (metrics.counter_value("aten::nonzero") or 0) - before == 5
    assert "aten::nonzero" in lazy_backend.metrics_report()


NUMBERS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x % 2, lambda x: torch.fmod(x, 2), lambda x: x // 2, lambda x: x & 1, lambda x: x << 1, lambda x: x**2,
    lambda x: x == 2, lambda x: torch.where(x > 1, x, 2), lambda x: x.clamp(1, 2), lambda x: torch.copysign(x, 2),
    lambda x: torch.xlogy(x, 2), lambda x: x / 2, lambda x: x[0] % 2, lambda x: x[0].float() % 2.5,
]  # fmt: skip


def test_ops_with_python_numbers_are_recorded() -> None:
    before = lazy_backend.stats()["fallbacks"]
    for compute in NUMBERS:
        same(lambda device, compute=compute: compute(torch.arange(3, device=device)))
    assert lazy_backend.stats()["fallbacks"] == before


# ---- errors, where the op is written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [
    lambda: torch.ones(2, device=DEVICE) + torch.ones(3, device=DEVICE),
    lambda: torch.ones(2, 3, device=DEVICE) @ torch.ones(2, 3, device=DEVICE),
    lambda: torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE, dtype=torch.int64),
    lambda: torch.ones(2, device=DEVICE) + torch.ones(2),
    lambda: torch.ones(2, device=DEVICE, dtype=torch.int64).add_(0.5),
    lambda: torch.ones(2, device=DEVICE).index_select(0, torch.zeros(1, device=DEVICE)),
    lambda: torch.nn.functional.conv2d(torch.ones(1, 2, 4, 4, device=DEVICE), torch.ones(1, 3, 2, 2, device=DEVICE)),
    lambda: torch.ones(2, device=DEVICE).view(3),
])  # fmt: skip
def test_a_wrong_call_is_refused_when_it_is_recorded(wrong: Callable[[], Any]) -> None:
    runs = lazy_backend.stats()["nodes_run"]
    with pytest.raises((RuntimeError, IndexError)):
        wrong()
    assert lazy_backend.stats()["nodes_run"] - runs <= 2  # the operands, at most: eager mode chose the words


# ---- what can be looked at ------------------------------------------------------------------------------------------------


def test_the_dumped_ir_names_the_python_line() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    y = x @ x; line = here()  # noqa: E702
    for text in (torch._lazy.debug.dump_ir([y], "text"), lazy_backend.debug.text([y])):
        assert f"test_ltc.py:{line} in test_the_dumped_ir_names_the_python_line" in text
    assert torch._lazy.debug.render_ir_graph([y]).startswith("digraph")
    assert "def forward" in torch._lazy.debug.dump_ir([y], "backend")
    with pytest.raises(RuntimeError, match="Unrecognized IR format"):
        torch._lazy.debug.dump_ir([y], "poem")


def test_one_program_has_one_hash() -> None:
    def program(number: float) -> str:
        torch._lazy.mark_step()
        return torch._lazy.computation.get_graph_hash([torch.ones(3, device=DEVICE) * number])

    assert program(2.0) == program(3.0)
    assert program(2.0) != torch._lazy.computation.get_graph_hash([torch.ones(4, device=DEVICE) * 2.0])
    with pytest.raises(RuntimeError, match="lazysched tensors"):
        torch._lazy.computation.get_tensors_ts_device_data_node([torch.ones(3, device=DEVICE)])


def test_names_of_torch_lazy_take_our_tensors_and_devices() -> None:
    x, y = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
    assert torch._lazy.get_tensor_id(x) == torch._lazy.get_tensor_id(x) != torch._lazy.get_tensor_id(y)
    z = x + y
    torch._lazy.sync_multi([z], [])
    assert torch._lazy.to_cpu({"z": z})["z"].tolist() == [2.0, 2.0]
    torch._lazy.mark_step(f"{DEVICE}:0", wait=True)
    torch._lazy.wait_device_ops([f"{DEVICE}:0"])
    torch._lazy.config.set_reuse_ir(False)
    torch._lazy.ir_cache.reset()


def test_metrics_count_and_can_be_reset() -> None:
    x = torch.ones(5, 7, device=DEVICE)
    for _ in range(3):
        x = x * 2
        torch._lazy.mark_step()
    counts = {name: metrics.counter_value(name) for name in ("MarkStep", "UncachedCompile", "CachedCompile")}
    assert counts["MarkStep"] == 3 and (counts["UncachedCompile"] or 0) + (counts["CachedCompile"] or 0) == 3
    metrics.reset()
    assert not metrics.counter_value("MarkStep")


def test_shapes_that_depend_on_values() -> None:
    same(lambda device: torch.nonzero(torch.tensor([[0, 1.0, 2.0], [3.0, 0, 0]], device=device, requires_grad=True)))
    same(lambda device: nn.AdaptiveAvgPool3d(2)(randn(device, 2, 3, 4, 5, 6)))
