"""Block sizes follow the GPU: its multiprocessors, and the memory that a program may have of one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, kernels, record
from graphs import drawn as data

from codegen import triton_compile
from codegen.combo import combine
from codegen.engine import Context
from codegen.fuse import plan
from codegen.triton_build import gpu_target
from codegen.triton_engine import tuning_of
from codegen.tuning import HOPPER, Tuning

GPUS = {  # compute capability, multiprocessors, threads and bytes of shared memory of each
    "H200": (90, 132, 2048, 232_448), "H100 PCIe": (90, 114, 2048, 232_448), "A100": (80, 108, 2048, 166_912),
    "RTX 4090": (89, 128, 1536, 101_376), "L4": (89, 58, 1536, 101_376), "A10": (86, 72, 1536, 101_376),
}  # fmt: skip


def tuning_for(name: str, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    arch, cores, threads, shared = GPUS[name]
    found = SimpleNamespace(multi_processor_count=cores, max_threads_per_multi_processor=threads, major=arch // 10,
                            shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return tuning_of(Context(True, 0, Path(CACHE)))


def clipped(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))  # type: ignore[arg-type]


def norm_gradients(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(F.layer_norm(x, x.shape[-1:], weight), (x, weight), grad)


def test_an_h200_is_what_the_defaults_are_measured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuning_for("H200", monkeypatch) == HOPPER


def test_programs_follow_the_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = tuning_for("L4", monkeypatch)
    assert (tuning.cores, tuning.programs, tuning.few, tuning.philox_blocks) == (58, 232, 232, 348)
    x = data(64, 1 << 17)
    (large, _), (small, _) = (kernels(plan(record(torch.sum, x)[0].graph, tuning=one)) for one in (HOPPER, tuning))
    assert small.grid[0] < large.grid[0], "a sum is split over as many programs as keep the machine busy"


def test_rows_are_walked_from_as_large_a_cache_as_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = record(lambda x: x.softmax(-1), data(4096, 50_264, dtype=torch.bfloat16))[0].graph
    found = [kernels(plan(graph, tuning=tuning_for(name, monkeypatch)))[0].kernel for name in ("H200", "A100", "RTX 4090")]
    assert [(kernel.num_warps, kernel.registers) for kernel in found] == [(16, 64), (16, 64), (32, 64)]


@pytest.mark.parametrize("name", ["H200", "A100", "RTX 4090"])
@pytest.mark.parametrize(("program", "inputs"), [
    (clipped, lambda: [data(1 << 23, seed=seed) for seed in range(8)]),
    (norm_gradients, lambda: [data(2048, 5003), data(5003), data(2048, 5003, seed=1)]),
    (lambda x: (x.softmax(-1), x.sum(0)), lambda: [data(1024, 40_000)]),
    (lambda x, y: ((x * y).sum(0), (x - y).square().sum(0)), lambda: [data(1 << 15, 96), data(1 << 15, 96, seed=1)]),
], ids=["norms of eight", "norm's gradients", "long rows", "columns"])  # fmt: skip
def test_kernels_fit_a_multiprocessors_memory(name: str, program: Callable[..., Any], inputs: Callable[[], list[torch.Tensor]],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    arch, *_, shared = GPUS[name]
    made = combine(plan(record(program, *inputs())[0].graph, tuning=tuning_for(name, monkeypatch)))
    built = [triton_compile.compile_kernel(step.kernel, CACHE, gpu_target(arch)) for step in kernels(made)]
    assert built and max(one.shared for one in built) <= shared
