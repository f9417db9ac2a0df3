"""The automatic barrier after `optimizer.step()`. Imports torch and `lazy_backend.core`."""

from __future__ import annotations

from typing import Any

import torch
import torch._lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ir_nodes import settings
from lazy_backend import core


def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """End the recording of each lazysched device that holds parameters of ``optimizer``."""
    if not core.is_started() or not settings.current().auto_barrier:
        return
    if core.step_ends.put_off:
        core.step_ends.asked = True
        return
    firsts = (group["params"][0] for group in optimizer.param_groups if group["params"])
    indices = dict.fromkeys(p.device.index for p in firsts if p.device.type == "lazysched")
    for index in indices:
        core.get().barrier(index, "optimizer_step", f"{type(optimizer).__name__}.step() ended")
    if indices:
        torch._lazy.run_step_closures()


def install() -> None:
    register_optimizer_step_post_hook(after_step)
