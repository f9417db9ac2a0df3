"""Lets PyTorch's profilers see what the device runs. Imports torch, `lazy_backend.core` and `lazy_backend.api` only.

Ops are seen as they are recorded and again as they run, under whatever `record_function` is open then. What is recorded when
the profile ends runs before it does, and device times are those of the physical device.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd import profiler

from lazy_backend import api, core


def _init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_device") == "lazysched":
            kwargs["use_device"] = "cuda" if core.physical_is_cuda() else None
        original(self, *args, **kwargs)

    return __init__


def _exit(original: Any) -> Any:
    @functools.wraps(original)
    def __exit__(self: Any, *error: Any) -> Any:
        if self.enabled and core.is_started() and not core.is_in_bad_fork():
            api.wait_device_ops()
        return original(self, *error)

    return __exit__


def install() -> None:
    """Wrap `torch.autograd.profiler.profile`, on which `torch.profiler` stands."""
    if not hasattr(profiler.profile.__init__, "__wrapped__"):
        profiler.profile.__init__ = _init(profiler.profile.__init__)
        profiler.profile.__exit__ = _exit(profiler.profile.__exit__)
