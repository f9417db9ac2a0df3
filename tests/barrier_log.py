"""What the tests of barriers share: the log of what fired, settings for a while. Imports torch and the packages under test."""

from __future__ import annotations

from typing import Any, Callable

import torch

import lazy_backend
from barriers import Barrier
from ir_nodes import settings
from lazy_backend import core
from tests.device import DEVICE


def settle() -> None:
    """Nothing is recorded and the log is empty."""
    torch.ones(1, device=DEVICE)
    lazy_backend.mark_step(wait=True)
    lazy_backend.barriers()
    lazy_backend.api.barrier_log.clear()


def pending() -> torch.Tensor:
    """A tensor that is recorded and not computed."""
    return torch.ones(4, device=DEVICE) * 3


def barriers_of(action: Callable[[], Any]) -> list[Barrier]:
    """The barriers that ``action`` caused, those that had something to run."""
    count = _fired()
    action()
    return [barrier for barrier in lazy_backend.barriers()[count:] if barrier.ops]


def _fired() -> int:
    recent = lazy_backend.barriers()
    assert len(recent) < 1000, "the log keeps the last 1000, so a test has to clear it"
    return len(recent)


def configured(action: Callable[[], Any], **values: Any) -> list[Barrier]:
    """The barriers of ``action`` under other settings, which the core is told of."""
    try:
        with settings.override(**values):
            core.configure(core.get())
            return barriers_of(action)
    finally:
        core.configure(core.get())


def only(barriers: list[Barrier]) -> Barrier:
    assert len(barriers) == 1, [str(barrier) for barrier in barriers]
    return barriers[0]
