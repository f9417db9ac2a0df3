"""What memory the device holds, as `torch.cuda.memory` tells it. Imports torch and lazy_backend's `api`, `core` and `heap`.

On CUDA these are the figures of its caching allocator. On a CPU they count the bytes that tensors of the device hold and what
a running recording allocates. What is recorded has no memory yet.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from typing import Any

import torch

from lazy_backend import api, core, heap

__all__ = [
    "empty_cache", "empty_host_cache", "ipc_collect", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
    "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats", "memory_stats_as_nested_dict", "memory_summary",
    "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_peak_memory_stats", "set_per_process_memory_fraction",
]  # fmt: skip

Device = torch.device | str | int | None


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Bytes by kind, pool and figure: ``["allocated_bytes"]["all"]["peak"]``. Empty before the device's first use."""
    if not core.is_started():
        return {}
    index = api.device_index(device)
    if core.physical_is_cuda():
        return torch.cuda.memory_stats_as_nested_dict(index)
    counted = api.stats()
    kinds = ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes")
    return {kind: {"all": {"current": counted["held_bytes"], "peak": counted["peak_bytes"]}} for kind in kinds}


def memory_stats(device: Device = None) -> OrderedDict[str, Any]:
    """The same by names such as ``allocated_bytes.all.peak``, sorted."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                walk(f"{prefix}.{name}" if prefix else name, item)
        else:
            flat[prefix] = value

    walk("", memory_stats_as_nested_dict(device))
    return OrderedDict(sorted(flat.items()))


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors hold now."""
    return int(memory_stats(device).get("allocated_bytes.all.current", 0))


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes that were held at once since the start or the last reset_peak_memory_stats()."""
    return int(memory_stats(device).get("allocated_bytes.all.peak", 0))


def memory_reserved(device: Device = None) -> int:
    """Bytes taken from the system; a CPU keeps none in reserve."""
    return int(memory_stats(device).get("reserved_bytes.all.current", 0))


def max_memory_reserved(device: Device = None) -> int:
    return int(memory_stats(device).get("reserved_bytes.all.peak", 0))


def reset_peak_memory_stats(device: Device = None) -> None:
    index = api.device_index(device)
    if core.physical_is_cuda():
        torch.cuda.reset_peak_memory_stats(index)
    else:
        core.get().reset_peak()


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    index = api.device_index(device)
    if core.physical_is_cuda():
        torch.cuda.reset_accumulated_memory_stats(index)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of the physical device."""
    index = api.device_index(device)
    if core.physical_is_cuda():
        return torch.cuda.mem_get_info(index)
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def empty_cache() -> None:
    """Give unused memory back to the system."""
    if core.physical_is_cuda():
        torch.cuda.empty_cache()
    else:
        heap.give_back()


def empty_host_cache() -> None:
    """Give unused pinned memory back to the system."""
    if core.physical_is_cuda():
        torch._C._host_emptyCache()


def ipc_collect() -> None:
    if core.physical_is_cuda():
        torch.cuda.ipc_collect()


def memory_snapshot() -> list[dict[str, Any]]:
    """The segments of CUDA's allocator; a CPU has none."""
    return torch.cuda.memory_snapshot() if core.physical_is_cuda() else []


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Raises NotImplementedError on a CPU, where memory is not the device's to share out."""
    if not core.physical_is_cuda():
        raise NotImplementedError("lazysched runs on the CPU here, whose memory it can't limit; use ulimit or cgroups")
    torch.cuda.set_per_process_memory_fraction(fraction, api.device_index(device))


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """A table to print."""
    if core.physical_is_cuda():
        return torch.cuda.memory_summary(api.device_index(device), abbreviated)
    rows = [("allocated now", memory_allocated(device)), ("allocated at most", max_memory_allocated(device)),
            ("free on this machine", mem_get_info(device)[0]), ("total of this machine", mem_get_info(device)[1])]
    return "\n".join([f"memory of lazysched:{api.device_index(device)} (on the CPU)"] + [f"{n:>16,} bytes {t}" for t, n in rows])


def install() -> None:
    """Let programs pin memory before the device is used, and under PyTorch for CUDA where there is no GPU, whose pinning asks
    for one: where there is no CUDA, pinning is a copy."""
    original = torch.Tensor.pin_memory
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies = not torch.cuda.is_available() and (torch.backends.cuda.is_built() or not core.is_started())
        return self.clone() if copies and self.device.type == "cpu" else original(self, *args, **kwargs)

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
