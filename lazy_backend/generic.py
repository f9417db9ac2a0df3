"""Makes `torch.accelerator` answer for the device. Imports torch and `lazy_backend` parts below it.

Its Python functions call native ones that ask libtorch which accelerator there is. Beside CUDA that has to be CUDA, for
autograd's sake (`csrc/accelerator.c`), and the memory functions want an allocator of their own kind; so the device answers here.
Programs that know nothing of this device ask too: nothing here starts it that needn't, and CUDA's current device moves along.
"""

from __future__ import annotations

import torch

from lazy_backend import api, core, memory, streams


def _get_device() -> int:
    if core.is_started():
        return int(core.get().current_device())
    return torch.cuda.current_device() if core.physical_is_cuda() else 0


def _set_device(index: int) -> None:
    if index < 0 or index == _get_device():
        return
    if core.is_started() or not core.physical_is_cuda():
        core.get().set_device(index)
    if core.physical_is_cuda():  # where the device starts, it takes over this index
        torch.cuda.set_device(index)


def _exchange_device(index: int) -> int:
    """Makes ``index`` current, unless it is negative, and returns the one before."""
    before = _get_device()
    _set_device(index)
    return before


def _synchronize(index: int) -> None:
    if core.is_started():
        api.wait_device_ops(index)
    elif core.physical_is_cuda():
        torch.cuda.synchronize(index)


_accelerator = torch._C._get_accelerator


def _get_accelerator(check: bool | None = None) -> torch.device:
    """torch.distributed and FSDP ask, also in programs that never use this device: that must not need the native core."""
    return _accelerator(check) if core.physical_is_cuda() else torch.device("lazysched")


ANSWERS = {
    "getDeviceIndex": _get_device,
    "setDeviceIndex": _set_device,
    "exchangeDevice": _exchange_device,
    "maybeExchangeDevice": _exchange_device,
    "getStream": streams.current_stream,
    "setStream": streams.set_stream,
    "synchronizeDevice": _synchronize,
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
    torch._C._get_accelerator = _get_accelerator
