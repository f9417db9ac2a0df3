"""Starts a function as several ranks of one machine, and times what they do. Imports torch, `ir_nodes.settings` and
lazy_backend."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing

import lazy_backend
from ir_nodes import settings


def transport(ranks: int) -> str:
    """What the ranks talk through: NCCL wants a GPU for each."""
    return "NCCL" if torch.cuda.device_count() >= ranks else "gloo"


def spawn(worker: Callable[..., None], ranks: int, *arguments: Any, channels: int = 0) -> None:
    """``worker(*arguments)`` in ``ranks`` processes that form a process group. ``channels``: see `nccl_options`. Raises where one
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")  # the ranks meet through a file: no port is needed
        torch.multiprocessing.spawn(_enter, (worker, ranks, path, arguments, channels), nprocs=ranks)


def _enter(rank: int, worker: Callable[..., None], ranks: int, path: str, arguments: Sequence[Any], channels: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    with settings.override(device="cuda" if transport(ranks) == "NCCL" else "cpu"):  # with too few GPUs all run on the CPU
        if on_gpus():
            torch.lazysched.set_device(rank)
            torch.cuda.set_device(rank)
        dist.init_process_group("lazysched", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks,
                                pg_options=nccl_options(channels))
        try:
            worker(*arguments)
            dist.barrier()
        finally:
            dist.destroy_process_group()


def on_gpus() -> bool:
    """Does lazysched run on GPUs here?"""
    return lazy_backend.core.physical_is_cuda()


def physical_device() -> torch.device:
    """What lazysched runs on here."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus() else torch.device("cpu")


def nccl_options(channels: int) -> Any:
    """For groups whose NCCL kernels take ``channels`` multiprocessors at most from what runs beside them; None, NCCL's own
    choice, for 0 and on a CPU."""
    if not channels or not on_gpus():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = channels
    return options


def plain_group(channels: int = 0) -> dist.ProcessGroup:
    """A group of all ranks for tensors that are not lazy."""
    return dist.new_group(backend="nccl" if on_gpus() else "gloo", pg_options=nccl_options(channels))


def finish() -> None:
    """Run what is recorded and wait for the device."""
    lazy_backend.mark_step(wait=True)
    if on_gpus():
        torch.cuda.synchronize()


def medians(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, called in turn, so that drift hits all alike. The slowest rank counts."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 2):
        for name, step in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            finish()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number >= 2:  # the first two compile
                taken[name].append(seconds.item() * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def say_medians(contestants: dict[str, Callable[[], object]], rounds: int) -> None:
    """A line for each contestant: its median, alone and against that of "eager"."""
    times = medians(contestants, rounds)
    for name, milliseconds in times.items():
        say(f"{name:<22} {milliseconds:8.2f} ms a step, {milliseconds / times['eager']:.2f} of eager")


def say(text: str) -> None:
    """Prints on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)
