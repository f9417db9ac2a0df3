"""Teaches other libraries' readers and writers of checkpoints the device. Imports nothing of ours.

The writer of `torch.distributed.checkpoint` copies tensors of one kind of device to the host, CUDA where there is CUDA, and
refuses others; safetensors reads to a fixed list of devices. Each is changed when the program imports it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable

Change = Callable[[ModuleType], None]
WRITER = "torch.distributed.checkpoint.filesystem"
READER = "safetensors.torch"


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the import of a module, and changes it."""

    def __init__(self, name: str, change: Change) -> None:
        self.name, self.change = name, change

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.change(module)

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


def read_to_the_device(reader: ModuleType) -> None:
    """Let `load_file` and `load_model` take the device's name."""
    original = reader.load_file

    @functools.wraps(original)
    def load_file(filename: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        if str(device).partition(":")[0] != "lazysched":
            return original(filename, device, *args, **kwargs)
        return {name: tensor.to(device) for name, tensor in original(filename, "cpu", *args, **kwargs).items()}

    reader.load_file = load_file  # type: ignore[attr-defined]


def install() -> None:
    changes: tuple[tuple[str, Change], ...] = ((WRITER, bring_to_the_host), (READER, read_to_the_device))
    for name, change in changes:
        if name in sys.modules:
            change(sys.modules[name])
        else:
            sys.meta_path.insert(0, _Watch(name, change))
