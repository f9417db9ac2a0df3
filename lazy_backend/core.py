"""Loads and sets up the native core at the device's first use. Imports torch, `ir_nodes.settings` and `lazy_backend.native`."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Callable

import torch

from ir_nodes import settings
from ir_nodes.locks import Lock
from lazy_backend import native


class _Compiling(threading.local):
    now = False


class _StepEnds(threading.local):
    put_off = asked = False


_core: ModuleType | None = None
_count = 0  # of the devices, once the core has started
compiling = _Compiling()  # does this thread compile a recording?
step_ends = _StepEnds()  # does this thread put ends of steps off, to the end of a function that it looks at; was one asked for?
_forked = False
_lock = Lock(reentrant=True)
_at_start: list[Callable[[ModuleType], None]] = []
IDLE, ALWAYS = 2, -(1 << 20)  # times in a row that somebody has waited for the device before programs are begun early
PENDING_SHARE = {"cuda": 0.75, "cpu": 0.5}  # of the device's memory, which a recording may hold by default: about what eager mode
# would hold by then, of which fused kernels need less


def at_start(action: Callable[[ModuleType], None]) -> None:
    """Run ``action(core)`` when the core starts, or now if it has."""
    with _lock:
        _at_start.append(action)
        if _core is not None:
            action(_core)


def is_started() -> bool:
    return _core is not None


def is_in_bad_fork() -> bool:
    """True in a forked child of a process that used a GPU through the device: CUDA does not survive fork."""
    return _forked


def physical_is_cuda() -> bool:
    """Does the device run on CUDA? Raises RuntimeError where LAZYSCHED_DEVICE=cuda and there is none."""
    wanted = settings.current().device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("LAZYSCHED_DEVICE=cuda, but torch.cuda.is_available() is False")
    return wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())


def device_count() -> int:
    """As many indices as physical devices; 1 on CPU. Counted once: every barrier asks."""
    return _count or (torch.cuda.device_count() if physical_is_cuda() else 1)


def physical_device(index: int) -> torch.device:
    """What the device's ``index`` runs on."""
    return torch.device("cuda", index) if physical_is_cuda() else torch.device("cpu")


def on_physical(index: int) -> AbstractContextManager[object]:
    """While it lasts, what PyTorch is asked to do on "cuda" runs on what the device's ``index`` runs on."""
    return torch.cuda.device(index) if physical_is_cuda() else nullcontext()


def get() -> ModuleType:
    """The native core, built and started where need be.

    Raises NativeBuildError, SettingsError, or RuntimeError in a forked child that cannot use the device.
    """
    if _forked:
        raise RuntimeError("lazysched can't be used in a forked child after its GPU was used; start processes with 'spawn'")
    if _core is None:
        with _lock:
            if _core is None:
                start()
    assert _core is not None
    return _core


def start() -> None:
    global _core, _count
    core = native.load()
    cuda = physical_is_cuda()
    if cuda:
        torch.cuda.init()
    count = device_count()
    core.init(cuda, count)
    if cuda:
        core.set_device(torch.cuda.current_device())
    configure(core)
    _core, _count = core, count
    for action in _at_start:
        action(core)
    if cuda:
        os.register_at_fork(after_in_child=_mark_forked)


def configure(core: ModuleType) -> None:
    """Hand the settings in force to the core."""
    now = settings.current()
    core.configure(core.Limits(now.max_ops, now.max_pending_bytes or default_pending_bytes(), now.mode == "eager", now.cache_size,
                               now.frames, ALWAYS if now.start_early == "always" else IDLE, settings.enabled("known_values")))


def reconfigure() -> None:
    if _core is not None:
        configure(_core)


def default_pending_bytes() -> int:
    if physical_is_cuda():
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * PENDING_SHARE[physical_device(0).type])


def _mark_forked() -> None:
    global _forked
    _forked = True


settings.changed.append(reconfigure)
