"""Makes `torch.accelerator` answer for the device. Imports torch and `lazy_backend` parts below it.

Its Python functions call native ones that ask libtorch which accelerator there is. Beside CUDA that has to be CUDA, for
autograd's sake (`csrc/accelerator.c`), and the memory functions want an allocator of their own kind; so the device answers here.
"""

from __future__ import annotations

import torch

from lazy_backend import api, core, memory, streams


def _set_device(index: int) -> None:
    if index >= 0:
        core.get().set_device(index)


def _exchange_device(index: int) -> int:
    """Makes ``index`` current, unless it is negative, and returns the one before."""
    before = int(core.get().current_device())
    _set_device(index)
    return before


ANSWERS = {
    "getDeviceIndex": lambda: int(core.get().current_device()),
    "setDeviceIndex": _set_device,
    "exchangeDevice": _exchange_device,
    "maybeExchangeDevice": _exchange_device,
    "getStream": streams.current_stream,
    "setStream": streams.set_stream,
    "synchronizeDevice": api.wait_device_ops,
    "isAllocatorInitialized": core.is_started,
    "emptyCache": memory.empty_cache,
    "emptyHostCache": memory.empty_host_cache,
    "getDeviceStats": memory.memory_stats_as_nested_dict,
    "resetAccumulatedStats": memory.reset_accumulated_memory_stats,
    "resetPeakStats": memory.reset_peak_memory_stats,
    "getMemoryInfo": memory.mem_get_info,
}


def install() -> None:
    """Put the answers in the place of those functions that this torch has."""
    for name, answer in ANSWERS.items():
        if hasattr(torch._C, f"_accelerator_{name}"):
            setattr(torch._C, f"_accelerator_{name}", answer)
