"""PyTorch's global switches, such as that for TF32, which ops read when they run. Imports torch and `lazy_backend` parts below.

An op here runs later than it is called, so a change of a switch ends the recording: what was recorded runs as the switches stood.
They are a part of every recording's key, because plans and CUDA graphs hold what followed from them.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Callable

import torch

from ir_nodes.locks import Lock
from lazy_backend import core

# How attention is computed is chosen when it is called, so its own switches may change at any time.
_NAMES = (
    "blas_preferred_backend", "cpu_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_tf32", "cudnn_allow_tf32",
    "cudnn_benchmark", "cudnn_depthwise_kernel", "cudnn_deterministic", "cudnn_enabled", "deterministic_algorithms",
    "deterministic_fill_uninitialized_memory", "float32_matmul_precision", "linalg_preferred_backend",
    "math_sdp_allow_fp16_bf16_reduction", "mkldnn_deterministic", "mkldnn_enabled", "onednn_allow_tf32",
    "sm_carveout_experimental",
)  # fmt: skip
_SETTERS = (*(f"_set_{name}" for name in _NAMES), "_set_default_dtype", "_set_default_tensor_type", "_set_fp32_precision_setter")
_PRECISIONS = [(backend, op) for backend in ("generic", "cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]

changed: list[Callable[[], None]] = []
"""Called after a switch has changed."""
_at_start: tuple[object, ...] = ()
_set: dict[tuple[object, ...], object] = {}  # what each was set to last
_lock = Lock()


def read() -> tuple[object, ...]:
    """How the switches stand; a name for those that this PyTorch does not have or will not tell."""
    found: list[object] = [torch.get_default_dtype(), torch.is_deterministic_algorithms_warn_only_enabled()]
    asked = [(getattr(torch._C, f"_get_{name}", None), ()) for name in _NAMES]
    asked += [(getattr(torch._C, "_get_fp32_precision_getter", None), which) for which in _PRECISIONS]
    for getter, which in asked:
        try:
            found.append(getter(*which) if getter is not None else "")
        except (RuntimeError, TypeError) as error:  # PyTorch refuses to tell the old name of what was set by its new one
            found.append(type(error).__name__)
    return tuple(found)


def key() -> str:
    """"" while the switches stand as they did when the device started."""
    now = read() if _at_start else ()
    return "" if now == _at_start else str(now)


def settle() -> None:
    """Run what is recorded. Nothing is while a recording runs, or while it is compiled."""
    native = core.get()
    for index in range(core.device_count() if not core.compiling.now else 0):
        if native.trace_for([], index).buffers():
            native.barrier(index, "switch", "one of PyTorch's global switches changed")


def ending(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, which sets a switch, after what was recorded."""

    @functools.wraps(original)
    def setter(*args: Any, **kwargs: Any) -> Any:
        which = (original.__name__, *args[:-1])
        value = (args[-1:], tuple(sorted(kwargs.items())))
        if _set.get(which) != value:
            settle()
        try:
            return original(*args, **kwargs)
        finally:
            if _set.get(which) != value:
                with _lock:
                    _set[which] = value
                for told in changed:
                    told()

    return setter


def install(native: ModuleType) -> None:
    """Wrap the functions behind `torch.backends` and their like, once."""
    global _at_start
    if _at_start:
        return
    _at_start = read()
    for name in _SETTERS:
        original = getattr(torch._C, name, None)
        if original is not None:
            setattr(torch._C, name, ending(original))
    for module in (torch.backends.cudnn, torch.backends.mkldnn):  # these keep the functions that they found
        for field in vars(type(module)).values():
            name = getattr(getattr(field, "setter", None), "__name__", "")
            if name in _SETTERS and not hasattr(field.setter, "__wrapped__"):
                field.setter = getattr(torch._C, name)


core.at_start(install)
