"""What a user calls: barriers by hand, statistics. Imports torch, `barriers` and `lazy_backend` parts below it."""

from __future__ import annotations

import sys
import types
from typing import Any, Callable, Iterable, Sequence

import torch
import torch._lazy

from barriers.barrier import Barrier, BarrierKind, BarrierLog
from ir_nodes import settings
from lazy_backend import core
from lazy_backend.trace import parse_frame

# `Stat` in csrc/core.h.
STATS = ("recorded", "compiles", "cache_hits", "nodes_run", "nodes_dead", "kernels_run", "fallbacks", "shape_inferences",
         "evicted", "flushes", "held_bytes", "peak_bytes", "graphs_replayed", "early_starts", "early_in_vain",
         "generators_settled", "values_known", "values_looked_at")
_UNRAISABLE = ("exc_type", "exc_value", "exc_traceback", "err_msg", "object")
_KINDS = {kind.label: kind for kind in BarrierKind}
barrier_log = BarrierLog()
listeners: list[Callable[[Barrier, int], None]] = []  # called at every barrier with the number of its `orders` report, or -1


def device_indices(device: torch.device | str | int | None) -> Sequence[int]:
    """The device's index, or every index for None. Raises ValueError where it is not a lazysched device."""
    if device is None:
        return range(core.device_count())
    if isinstance(device, int):
        return [device]
    parsed = torch.device(device)
    if parsed.type != "lazysched":
        raise ValueError(f"expected a lazysched device, got {parsed}")
    return [core.get().current_device() if parsed.index is None else parsed.index]


def device_index(device: torch.device | str | int | None) -> int:
    """The device's index, or the current one for None.

    Raises ValueError where it is not a lazysched device, RuntimeError where there is no such device.
    """
    if device is None:
        return int(core.get().current_device())
    index = device_indices(device)[0]
    if not 0 <= index < core.device_count():
        raise RuntimeError(f"lazysched: invalid device ordinal {index}, where the number of devices is {core.device_count()}")
    return index


def run_recorded(index: int, kind: str, reason: str) -> None:
    """Run what is recorded on one device. Raises RuntimeError while this thread compiles it, instead of waiting for itself."""
    if core.compiling.now:
        raise RuntimeError(f"{reason} in a schedule hook: it is asked while the recording is compiled that this would run")
    core.get().barrier(index, kind, reason)


def mark_step(device: torch.device | str | int | None = None, wait: bool = False) -> None:
    """Run what is recorded on ``device`` (None: on every index), then the step closures.

    Returns when the kernels are launched, or with ``wait`` when they have finished. While `replayed` looks at a function, a step
    that ends in it ends with it.
    """
    native = core.get()
    if core.step_ends.put_off and not wait:
        core.step_ends.asked = True
        return
    for index in device_indices(device):
        run_recorded(index, "mark_step", "lazy_backend.mark_step()")
    native.count("MarkStep")
    if wait:
        wait_device_ops(device)
    torch._lazy.run_step_closures()


def sync(tensors: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Compute ``tensors``. What else is recorded on their devices runs with them."""
    every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for index in sorted({t.device.index for t in every if t.device.type == "lazysched"}):
        run_recorded(index, "sync", "lazy_backend.sync(tensors)")


def wait_device_ops(device: torch.device | str | int | None = None) -> None:
    """Run what is recorded and wait until the physical device has finished."""
    for index in device_indices(device):
        run_recorded(index, "wait", "wait_device_ops()")
        if core.physical_is_cuda():
            torch.cuda.synchronize(index)


def note_barrier(kind: str, reason: str, place: str, ops: int, milliseconds: float, hit: bool, order: int) -> None:
    """The core calls this at every barrier; LAZYSCHED_DEBUG=barriers prints it."""
    barrier = Barrier(_KINDS[kind], reason, parse_frame(place), ops, milliseconds)
    barrier_log.add(barrier)
    for listener in listeners:
        listener(barrier, order)
    if "barriers" in settings.current().debug:
        print(f"lazysched: barrier {barrier}{' [cached]' if hit else ''}", flush=True)


def log(*fields: Any) -> None:
    """What fails in the log is told where nobody can catch it: barriers fire in destructors and in autograd's threads too."""
    try:
        note_barrier(*fields)
    except BaseException as error:  # noqa: BLE001
        told = (type(error), error, error.__traceback__, "lazysched's barrier log", note_barrier)
        sys.unraisablehook(types.SimpleNamespace(**dict(zip(_UNRAISABLE, told))))  # type: ignore[arg-type]


def barriers() -> list[Barrier]:
    """The last barriers, newest last: kind, reason, the user's line, ops run, milliseconds."""
    return barrier_log.recent()


def stats() -> dict[str, Any]:
    """Counters since the start: compiles, cache_hits, nodes_run, nodes_dead, kernels_run, fallbacks, recorded, flushes, ..."""
    return dict(zip(STATS, core.get().stats(), strict=True))


core.at_start(lambda native: native.set_logger(log))
