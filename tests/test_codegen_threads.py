"""What one thread does alone on a CPU: which calls, which compiled loops; other numbers and other threads do not notice."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Callable

import children
import pytest
import torch
from graphs import record
from torch import nn
from torch.nn import functional as F

from codegen import threads
from codegen.threads import GRAIN, small
from ir_nodes import settings
from tests.device import DEVICE

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="threads are a CPU's")


def judged(program: Callable[..., Any], *inputs: torch.Tensor) -> dict[str, bool]:
    """For each op that ``program`` records: does one thread run it alone?"""
    recording, _ = record(program, *inputs)
    return {node.target.removeprefix("aten::").partition(".")[0]: small(node) for node in recording.graph.nodes}


@pytest.mark.parametrize(("rows", "alone"), [(32, True), (GRAIN // 64, False)])
def test_one_thread_does_little_work_whose_numbers_it_does_not_change(rows: int, alone: bool) -> None:
    found = judged(lambda x, w: F.layer_norm(F.gelu(x @ w), (64,)).sum(), torch.randn(rows, 64), torch.randn(64, 64))
    assert found == {"mm": False, "gelu": alone, "native_layer_norm": alone, "sum": False}


def test_a_norms_gradients_are_added_up_by_as_many_threads_as_in_eager_mode() -> None:
    def program(x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> Any:
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, (64,), weight, weight, 1e-5)
        return torch.ops.aten.native_layer_norm_backward(gradient, x, (64,), mean, rstd, weight, weight, (True, True, True))

    assert judged(program, torch.randn(32, 64), torch.randn(32, 64), torch.randn(64))["native_layer_norm_backward"] is False


@pytest.mark.parametrize(("width", "alone"), [(64, True), (512, False)])
def test_the_mean_tensor_of_a_fused_optimizer_decides(width: int, alone: bool) -> None:
    def program(*lists: torch.Tensor) -> list[torch.Tensor]:
        parameters, gradients, means, squares = (list(lists[first : first + 2]) for first in range(0, 8, 2))
        torch._fused_adamw_(parameters, gradients, means, squares, [], [lists[8], lists[8].clone()], lr=0.1, beta1=0.9,
                            beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False, grad_scale=lists[8],
                            found_inf=lists[9])
        return []

    pairs = [torch.rand(shape) for _ in range(4) for shape in ((width, width), (width,))]
    assert judged(program, *pairs, torch.tensor(1.0), torch.tensor(0.0))["_fused_adamw_"] is alone


@pytest.mark.parametrize("count", [1, 2, 64, 1000])
def test_compiled_loops_share_the_same_amount_whatever_the_number_of_threads(count: int) -> None:
    assert threads.chunk(count) == max(GRAIN // count, 512)


def workers() -> int:
    return len(os.listdir("/proc/self/task"))


def program_of(rows: int) -> torch.Tensor:
    x = torch.linspace(-2, 2, rows * 64).reshape(rows, 64)
    return F.gelu(F.layer_norm(x.to(DEVICE), (64,))).cpu() - F.gelu(F.layer_norm(x, (64,)))


def few_threads() -> None:
    x = torch.linspace(-2, 2, 2048).reshape(32, 64).to(DEVICE)
    layers = [x, x.repeat(128, 1)]
    for one in layers:
        F.layer_norm(one, (64,)).cpu()  # an op that is new is tried while it is recorded, by as many threads as there are
    torch.set_num_threads(2)
    before = workers()
    F.layer_norm(layers[0], (64,)).cpu()
    assert workers() == before, "OpenMP starts a worker for the first parallel region"
    assert torch.get_num_threads() == 2
    F.layer_norm(layers[1], (64,)).cpu()
    assert workers() == before + 1, "a large op still has two threads"
    for rows in (3, 32, 4096):
        assert not program_of(rows).any()


@on_cpu
def test_small_calls_begin_no_parallel_region_and_leave_the_number_of_threads_as_it_was() -> None:
    children.call(few_threads, engine="aten")


def trained(width: int, batch: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        loss = model(torch.ones(batch, width).to(DEVICE)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach().cpu()


def regions(width: int, batch: int) -> int:
    """Parallel regions in all that is compiled for a training of these sizes."""
    with settings.override(cache_dir=tempfile.mkdtemp()):
        trained(width, batch)
        sources = [file.read_text() for file in Path(settings.current().cache_dir).rglob("*.py") if file.is_file()]
    assert any("cpp_fused" in source for source in sources)
    return sum(source.count("#pragma omp parallel") for source in sources)


def compiled_loops() -> None:
    torch.zeros(1).to(DEVICE)  # the native core lies in the folder that is there
    torch.set_num_threads(2)
    assert regions(64, 32) == 0
    assert regions(64, 4096) > 0


@on_cpu
def test_small_compiled_loops_have_no_parallel_region() -> None:
    children.call(compiled_loops, engine="inductor")
