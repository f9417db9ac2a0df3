"""`torch._lazy`'s functions take tensors of the device. Imports torch and `lazy_backend` parts below.

PyTorch's own would read such a tensor as one of LTC's and crash.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch._lazy
import torch._lazy.computation
import torch._lazy.debug

from lazy_backend import api, core, debug


def ours(value: Any) -> bool:
    """Is this a tensor or the name of our device, or a list that holds one?"""
    if isinstance(value, torch.Tensor):
        return value.device.type == "lazysched"
    if isinstance(value, str):
        return value.partition(":")[0] == "lazysched"
    return isinstance(value, (list, tuple)) and any(map(ours, value))


def takes_ours(module: ModuleType, name: str, function: Callable[..., Any], also: Callable[[], bool] = lambda: False) -> None:
    """Let ``module.name`` call ``function`` where an argument is of our device, or ``also`` says so."""
    original = getattr(module, name)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        wanted = function if also() or any(map(ours, (*args, *kwargs.values()))) else original
        return wanted(*args, **kwargs)

    setattr(module, name, chosen)


def dump_ir(tensors: Iterable[torch.Tensor], ir_format: str) -> str:
    """What is recorded for ``tensors``: as ``text``, or with ``backend`` as Python that runs on plain tensors."""
    if ir_format not in ("text", "backend"):
        raise RuntimeError(f"Unrecognized IR format: {ir_format}")
    return debug.text(tensors) if ir_format == "text" else debug.fx_graph(tensors).code


def mark_step(device: str = "", wait: bool = False) -> None:
    """Of ``device``, or of all of ours."""
    api.mark_step(device or None, wait)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("this is of LTC's TorchScript backend; for lazysched tensors see lazy_backend.debug.fx_graph(tensors)")


def install() -> None:
    """Redirect once what is given our tensors or devices, and let waiting for every device wait for ours too."""
    takes_ours(torch._lazy, "mark_step", mark_step, lambda: core.step_ends.put_off)
    takes_ours(torch._lazy, "sync_multi", lambda tensors, devices: api.sync(tensors))
    takes_ours(torch._lazy, "get_tensor_id", lambda tensor: tensor._cdata)
    takes_ours(torch._lazy.debug, "render_ir_graph", debug.dot)
    takes_ours(torch._lazy.debug, "dump_ir", dump_ir)
    takes_ours(torch._lazy.computation, "get_graph_hash", lambda tensors: debug.graph(tensors).key())
    takes_ours(torch._lazy.computation, "get_tensors_ts_device_data_node", refuse)
    waits_for_ours()


def waits_for_ours() -> None:
    original = torch._lazy.wait_device_ops
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def wait_device_ops(devices: Sequence[str] | None = None) -> None:
        original([device for device in devices or () if not ours(device)])
        if core.is_started():
            for device in [device for device in devices or () if ours(device)] or [None]:
                api.wait_device_ops(device)

    torch._lazy.wait_device_ops = wait_device_ops
