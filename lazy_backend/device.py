"""Registers the device's light names at import and serves `torch.lazysched`. Imports torch and `lazy_backend` parts below it."""

from __future__ import annotations

import functools
import sys
import types

import torch

from lazy_backend import (
    accelerator,
    api,
    checkpoints,
    core,
    generic,
    interchange,
    lazy_tensors,
    memory,
    modules,
    processes,
    profiler,
    properties,
    rng,
    steps,
    streams,
)

NAME = "lazysched"
Device = torch.device | str | int | None


class DeviceContext:
    """`with torch.lazysched.device(i)`: device ``i`` is the current one inside. None and negative indices change nothing."""

    def __init__(self, device: Device) -> None:
        negative = isinstance(device, int) and device < 0
        self.index = None if device is None or negative else api.device_index(device)

    def __enter__(self) -> None:
        self.previous = core.get().current_device()
        if self.index is not None:
            core.get().set_device(self.index)

    def __exit__(self, *error: object) -> None:
        core.get().set_device(self.previous)


class DeviceOf(DeviceContext):
    """`with torch.lazysched.device_of(tensor)`: its device is the current one inside; tensors of others change nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == NAME else None)


class DeviceModule(types.ModuleType):
    """`torch.lazysched`: what `torch.cuda` has that users call. Only what must loads the native core."""

    device = DeviceContext
    device_of = DeviceOf
    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}", self.__doc__)
        for part in (streams, memory, properties, rng):
            for name in part.__all__:
                setattr(self, name, getattr(part, name))
        self.streams, self.memory, self.random, self.amp = streams, memory, rng, amp_module()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return core.is_started()

    @property
    def _initialized(self) -> bool:
        return core.is_started()

    def init(self) -> None:
        core.get()

    _lazy_init = init

    def _is_in_bad_fork(self) -> bool:
        return core.is_in_bad_fork()

    def device_count(self) -> int:
        """As many indices as physical devices; 1 on CPU."""
        return core.device_count()

    def current_device(self) -> int:
        return int(core.get().current_device())

    def set_device(self, device: Device) -> None:
        """Raises RuntimeError where there is no such device. Negative indices change nothing."""
        if not isinstance(device, int) or device >= 0:
            core.get().set_device(api.device_index(device))

    def synchronize(self, device: Device = None) -> None:
        """Run what is recorded on ``device`` (default: the current one) and wait until it has finished."""
        api.wait_device_ops(api.device_index(device))

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(rng.generator(index) for index in range(self.device_count()))


def amp_module() -> types.ModuleType:
    """`torch.lazysched.amp`: `torch.amp` for this device."""
    module = types.ModuleType(f"torch.{NAME}.amp", "`torch.amp` for this device.")
    module.autocast = functools.partial(torch.amp.autocast, NAME)
    module.GradScaler = functools.partial(torch.amp.GradScaler, NAME)
    module.custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=NAME)
    module.custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=NAME)
    return module


def register() -> None:
    """Give PrivateUse1 its name and module. Cheap: the native core starts at the device's first use.

    Raises AcceleratorError before anything is registered.
    """
    accelerator.keep_cuda()
    torch.utils.rename_privateuse1_backend(NAME)
    if not hasattr(torch, NAME):
        module = DeviceModule()
        torch._register_device_module(NAME, module)
        sys.modules.update({f"torch.{NAME}": module, f"torch.{NAME}.amp": module.amp})
        for part in (streams, memory, rng):
            sys.modules[f"torch.{NAME}.{'random' if part is rng else part.__name__.rpartition('.')[2]}"] = part
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        for part in (checkpoints, modules, generic, interchange, lazy_tensors, memory, processes, profiler, steps):
            part.install()
