"""What DistributedDataParallel can't do on the device is said when it is made. Imports torch and `lazy_backend.core`."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch import nn

from lazy_backend import core

_PINNED = ("DistributedDataParallel with find_unused_parameters or static_graph sends a map of the parameters that were used "
           "through pinned memory, and a device that runs on a CPU has none. Leave both False, or train on GPUs.")  # fmt: skip


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        asks = kwargs.get("find_unused_parameters") or kwargs.get("static_graph")
        if asks and not core.physical_is_cuda() and any(p.device.type == "lazysched" for p in module.parameters()):
            raise NotImplementedError(_PINNED)
        original(self, module, *args, **kwargs)

    return init


def install() -> None:
    """Wrap DistributedDataParallel's constructor."""
    parallel = torch.nn.parallel.DistributedDataParallel
    if not hasattr(parallel.__init__, "__wrapped__"):
        parallel.__init__ = _checked(parallel.__init__)  # type: ignore[method-assign]
