"""How long a call takes by the clock and on the GPU alone, and how fast memory is copied. Imports torch and, for
lazysched, lazy_backend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[int], Any]  # given the number of the call


def wait(lazy: bool = False) -> None:
    """Until the physical device has done all that was asked; ``lazy``: of lazysched."""
    if lazy:
        import lazy_backend

        lazy_backend.wait_device_ops()
    elif torch.cuda.is_available():
        torch.cuda.synchronize()


def wall_seconds(run: Run, count: int, lazy: bool = False) -> float:
    """Seconds of one of ``count`` calls, to their end on the device; ``lazy``: on lazysched."""
    wait(lazy)
    start = time.perf_counter()
    for number in range(count):
        run(number)
    wait(lazy)
    return (time.perf_counter() - start) / count


def gpu_seconds(run: Run, count: int, host: float = 1e-4) -> float:
    """Seconds of one call on the GPU, whose launches were all queued before the first one began; by the clock without a GPU.

    ``host``: what a call takes by the clock, at least.
    """
    if not torch.cuda.is_available():
        return wall_seconds(run, count)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9 * min(1.5 * host * count, 0.1)))
    begin.record()
    for number in range(count):
        run(number)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def copy_rate() -> float:
    """Bytes a second of a large copy, reading and writing counted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(1 << 30 if device == "cuda" else 1 << 26, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    sink.copy_(source)
    return 2 * source.nbytes / statistics.median(gpu_seconds(lambda _: sink.copy_(source), 5) for _ in range(3))
