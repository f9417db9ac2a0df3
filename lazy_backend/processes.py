"""Refuses, with a reason, what would spread a model or its tensors over threads and processes by itself. Imports torch only."""

from __future__ import annotations

import functools
import importlib
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch import nn
from torch.multiprocessing import reductions
from torch.utils.data import get_worker_info

_parallel = importlib.import_module("torch.nn.parallel.data_parallel")  # torch.nn.parallel gives this name to a function


def refuse_data_parallel(module: nn.Module) -> None:
    """Raises NotImplementedError for a module on the device."""
    if any(tensor.device.type == "lazysched" for tensor in chain(module.parameters(), module.buffers())):
        raise NotImplementedError(
            "nn.DataParallel copies the model to every device at each step and runs the copies in threads, so that each step "
            "would be recorded anew; use torch.nn.parallel.DistributedDataParallel with one process per device"
        )


def _init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: nn.DataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        refuse_data_parallel(module)
        original(self, module, *args, **kwargs)

    return __init__


def _forward(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
        refuse_data_parallel(self.module)
        return original(self, *inputs, **kwargs)

    return forward


def _function(original: Any) -> Any:
    @functools.wraps(original)
    def data_parallel(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        refuse_data_parallel(module)
        return original(module, *args, **kwargs)

    return data_parallel


def _choice(original: Any) -> Any:
    """DataParallel moves a model to the accelerator that it finds; a model on the CPU has to stay where it is."""

    @functools.wraps(original)
    def choose() -> str | None:
        found = original()
        return None if found == "lazysched" else found

    return choose


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """How a storage travels. Workers of a DataLoader hand their batches over, so a copy will do; others would expect to share."""
    if storage.device.type != "lazysched":
        return reductions.reduce_storage(storage)
    if get_worker_info() is None:
        raise NotImplementedError("tensors of lazysched can't be sent to another process; send tensor.cpu() and move it there")
    return _arrive, (storage.cpu(), str(storage.device))


def _arrive(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    return storage.to(device=torch.device(device))


def install() -> None:
    """Wrap `nn.DataParallel` and register what multiprocessing does with a storage."""
    if not hasattr(nn.DataParallel.__init__, "__wrapped__"):
        nn.DataParallel.__init__ = _init(nn.DataParallel.__init__)  # type: ignore[method-assign]
        nn.DataParallel.forward = _forward(nn.DataParallel.forward)  # type: ignore[method-assign]
        nn.parallel.data_parallel = _parallel.data_parallel = _function(_parallel.data_parallel)
        _parallel._get_available_device_type = _choice(_parallel._get_available_device_type)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
