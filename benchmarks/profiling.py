"""Which kernels a call runs on the GPU, by name and by kind, and how much memory. Imports torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

Kernel = tuple[str, int, float]  # name, launches, microseconds of all of them
# Generated kernels have Python names; a library's rarely are, and those that are begin so.
LIBRARIES = ("nvjet", "cutlass", "cublas", "cudnn", "flash", "fmha", "gemm", "gemv", "sm80_", "sm90_", "ampere", "hopper", "xmma")
KINDS = {  # kind of a library's kernel: what its name holds; the first that fits
    "copy or fill": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "attention", "sdpa", "dot_do_o", "convert_dq", "unpack_cudnn"),
    "convolution": ("conv", "implicit_gemm", "fprop", "dgrad", "wgrad", "cudnn"),
    "matrix product": ("gemm", "gemv", "nvjet", "cutlass", "splitk", "xmma", "cublas"),
    "optimizer": ("multi_tensor_apply", "adam"),
    "reduction": ("reduce", "softmax", "norm", "sum"),
}


def kind(name: str) -> str:
    """Which row of the table a kernel belongs to."""
    if re.fullmatch(r"[a-z_][a-z0-9_]*", name) and not name.startswith(LIBRARIES):
        return "triton"
    lowered = name.lower()
    return next((row for row, words in KINDS.items() if any(word in lowered for word in words)), "other")


def gpu_kernels(call: Callable[[], Any]) -> list[Kernel]:
    """What ``call`` runs on the GPU, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        # Where a PrivateUse1 device is registered, the profiler files the GPU's kernels under it.
        on_gpu = event.device_type in (torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.PrivateUse1)
        if on_gpu and not event.is_user_annotation:  # such as the range of a whole optimizer step
            count, time = found.get(event.name, (0, 0.0))
            found[event.name] = (count + 1, time + event.time_range.elapsed_us())
    return sorted(((name, count, time) for name, (count, time) in found.items()), key=lambda kernel: -kernel[2])


def by_kind(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """Launches and microseconds of each kind."""
    found: dict[str, list[float]] = {}
    for name, count, time in kernels:
        row = found.setdefault(kind(name), [0, 0.0])
        row[0] += count
        row[1] += time
    return found


def listing(title: str, kernels: list[Kernel]) -> str:
    """The kernels as text, one a line: microseconds, launches, microseconds of one, kind, name."""
    total = sum(time for _, _, time in kernels)
    lines = [f"{title}: {sum(count for _, count, _ in kernels)} launches, {total / 1e3:.3f} ms on the GPU",
             f"{'us':>10} {'calls':>6} {'us each':>9} {'share':>6}  kind             name"]
    for name, count, time in kernels:
        lines.append(f"{time:10.1f} {count:6d} {time / count:9.2f} {time / total:6.1%}  {kind(name):<15}  {name}")
    return "\n".join(lines)


def peak_on_gpu() -> int:
    """Bytes that were in use at most since the peak was reset, those of CUDA graphs' own memory included: a replay writes there,
    but PyTorch's allocator counts only what was allocated while the graph was captured."""
    pools = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
    return torch.cuda.max_memory_allocated() + sum(int(one["total_size"]) - int(one["allocated_size"]) for one in pools)
