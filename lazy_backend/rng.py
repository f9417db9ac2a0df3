"""Seeds and states of the device's generators, as `torch.cuda.random`. Imports `core`, `api` and `orders` of
`lazy_backend` only.

Each index has one default generator. A seed given before the device's first use waits for it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Iterable

import torch

from lazy_backend import api, core, orders

__all__ = ["get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed", "seed_all",
           "set_rng_state", "set_rng_state_all"]

Device = torch.device | str | int | None
_waiting: list[int] = []  # the last seed for all, given before the device's first use


def generator(index: int) -> torch.Generator:
    return core.get().default_generator(index)


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    generator(api.device_index(None)).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every index. Does not start the device."""
    if not core.is_started():
        _waiting[:] = [int(seed)]
        return
    for index in range(core.device_count()):
        generator(index).manual_seed(seed)


def seed() -> int:
    """Seed the current device with a number from the system, which is returned."""
    return generator(api.device_index(None)).seed()


def seed_all() -> None:
    """Seed every index with one number from the system."""
    number = seed()
    for index in range(core.device_count()):
        generator(index).manual_seed(number)


def initial_seed() -> int:
    return generator(api.device_index(None)).initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """The state as uint8 bytes on the CPU, as the physical device's generator gives it."""
    orders.note_state_read()
    return generator(api.device_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    generator(api.device_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(core.device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def _seed_at_start(native: ModuleType) -> None:
    for number in _waiting:
        for index in range(core.device_count()):
            native.default_generator(index).manual_seed(number)


core.at_start(_seed_at_start)
