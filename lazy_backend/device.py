"""Registers the device's light names at import and serves `torch.lazysched`. Imports torch and `lazy_backend` parts below it."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from lazy_backend import accelerator, api, core, modules, steps

NAME = "lazysched"


class _DeviceContext:
    """`with torch.lazysched.device(i)`: device ``i`` is the current one inside."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        self.index = None if device is None else api.device_indices(device)[0]

    def __enter__(self) -> None:
        self.previous = core.get().current_device()
        if self.index is not None:
            core.get().set_device(self.index)

    def __exit__(self, *error: object) -> None:
        core.get().set_device(self.previous)


class DeviceModule(types.ModuleType):
    """`torch.lazysched`: the functions of `torch.cuda` that the device needs. Only what must loads the native core."""

    Event = torch.Event
    Stream = torch.Stream
    device = _DeviceContext

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}", self.__doc__)
        self._seed: int | None = None

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

    def set_device(self, device: torch.device | str | int) -> None:
        core.get().set_device(api.device_indices(device)[0])

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        """Run what is recorded on ``device`` (default: the current one) and wait until it has finished."""
        api.wait_device_ops(self.current_device() if device is None else device)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if core.physical_is_cuda() else True

    # ---- random numbers: one generator a device; seeds given before the first use wait for it --------------------------

    def manual_seed(self, seed: int) -> None:
        self._generator(self.current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        if not core.is_started():
            self._seed = int(seed)
            return
        for index in range(self.device_count()):
            self._generator(index).manual_seed(seed)

    def apply_early_seed(self, _: Any) -> None:
        if self._seed is not None:
            for index in range(self.device_count()):
                self._generator(index).manual_seed(self._seed)

    def get_rng_state(self, device: torch.device | str | int = NAME) -> torch.Tensor:
        return self._generator(api.device_indices(device)[0]).get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | str | int = NAME) -> None:
        self._generator(api.device_indices(device)[0]).set_state(state)

    def initial_seed(self) -> int:
        return self._generator(self.current_device()).initial_seed()

    def seed(self) -> int:
        return self._generator(self.current_device()).seed()

    def _generator(self, index: int) -> torch.Generator:
        return core.get().default_generator(index)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(self._generator(index) for index in range(self.device_count()))


def register() -> None:
    """Give PrivateUse1 its name and module. Cheap: the native core starts at the device's first use.

    Raises AcceleratorError before anything is registered.
    """
    accelerator.keep_cuda()
    torch.utils.rename_privateuse1_backend(NAME)
    if not hasattr(torch, NAME):
        module = DeviceModule()
        torch._register_device_module(NAME, module)
        sys.modules[f"torch.{NAME}"] = module
        core.at_start(module.apply_early_seed)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    modules.keep_parameters()
    steps.install()
