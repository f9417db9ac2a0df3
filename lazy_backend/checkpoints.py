"""Lets `torch.distributed.checkpoint` write tensors of the device beside CUDA's. Imports nothing of ours.

Its writer copies tensors of one kind of device to the host, CUDA where there is CUDA, and refuses others. It is heavy to import,
so it is changed when the program imports it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WRITER = "torch.distributed.checkpoint.filesystem"


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the import of the writer."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != WRITER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                bring_to_the_host(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def bring_to_the_host(writer: ModuleType) -> None:
    """Let the writer's loader see tensors of the device as tensors on the CPU."""
    loader = getattr(writer, "_OverlappingCpuLoader", None)
    if loader is None:
        return
    original = loader.__init__

    @functools.wraps(original)
    def __init__(self: Any, resolve_fun: Any, *args: Any, **kwargs: Any) -> None:
        def resolve(item: Any) -> Any:
            tensor = resolve_fun(item)
            return tensor.cpu() if tensor.device.type == "lazysched" else tensor

        original(self, resolve, *args, **kwargs)

    loader.__init__ = __init__


def install() -> None:
    if WRITER in sys.modules:
        bring_to_the_host(sys.modules[WRITER])
    else:
        sys.meta_path.insert(0, _Watch())
