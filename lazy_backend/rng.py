"""Seeds and states of the device's generators, as `torch.cuda.random`. Imports `ir_nodes`, and `core`, `api` and `orders` of
`lazy_backend` only.

Each index has one default generator. A seed given before the device's first use waits for it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ir_nodes import ops, own, settings
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


_KNOWN = frozenset(one.__get__ for one in (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.layout))
"""What is known of a state without its bytes."""


class RecordedState(Tensor):
    """A generator's state at one place of a recording: uint8 bytes on the CPU for whoever looks at them, which ends that. To keep
    it and to put it back, as a checkpointed layer does, is recorded."""

    index: int
    recorded: Tensor
    bytes_seen: Tensor | None

    @staticmethod
    def __new__(cls: type[RecordedState], index: int, recorded: Tensor) -> RecordedState:
        made = Tensor._make_wrapper_subclass(cls, recorded.shape, dtype=recorded.dtype)
        made.index, made.recorded, made.bytes_seen = index, recorded, None
        return made  # type: ignore[no-any-return, unused-ignore]

    def seen(self) -> Tensor:
        """Its bytes, which the caller may change from now on."""
        if self.bytes_seen is None:
            api.run_recorded(self.index, "generator_state", "the generator's state was read")
            self.bytes_seen = self.recorded.cpu()
        return self.bytes_seen

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func not in _KNOWN:
            return cls.__torch_dispatch__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, cls.seen, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


@functools.cache
def sample(index: int) -> Tensor:
    """A tensor of a state's size."""
    size = torch.Generator(core.physical_device(index)).get_state().numel()
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=torch.uint8).to(torch.device("lazysched", index))


def may_record() -> bool:
    """Not where somebody else sees to ops, whose tensors could not wait."""
    usual = torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None
    return usual and settings.current().mode == "lazy"


def get_rng_state(device: Device = None) -> Tensor:
    """The state as uint8 bytes on the CPU, as the physical device's generator gives it."""
    orders.note_state_read()
    index = api.device_index(device)
    if not may_record():
        return generator(index).get_state()
    return RecordedState(index, ops.overload(own.RNG_STATE)(sample(index), generator=generator(index)))


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    index = api.device_index(device)
    recorded = isinstance(new_state, RecordedState) and new_state.bytes_seen is None and new_state.index == index
    if recorded and may_record():
        ops.overload(own.SET_RNG_STATE)(new_state.recorded, sample(index), generator=generator(index))
    else:
        generator(index).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(core.device_count())]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def _seed_at_start(native: ModuleType) -> None:
    for number in _waiting:
        for index in range(core.device_count()):
            native.default_generator(index).manual_seed(number)


core.at_start(_seed_at_start)
