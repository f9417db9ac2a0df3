"""The clock and the power of a GPU while it works. Imports torch."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Iterator

import torch

PAUSE = 0.02
"""Seconds between two looks."""


class Clocks:
    """What was seen: megahertz of the multiprocessors and watts."""

    def __init__(self) -> None:
        self.megahertz: list[float] = []
        self.watts: list[float] = []

    def look(self) -> None:
        self.megahertz.append(torch.cuda.clock_rate())
        self.watts.append(torch.cuda.power_draw() / 1e3)

    def told(self) -> list[str]:
        """Their medians; empty words where nothing was seen."""
        return [f"{statistics.median(many):.0f}" if many else "" for many in (self.megahertz, self.watts)]


@contextlib.contextmanager
def seen(clocks: Clocks) -> Iterator[None]:
    """``clocks`` looks again and again. Without a GPU, or without NVML's Python package, it sees nothing."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(PAUSE):
            clocks.look()

    thread = threading.Thread(target=look)
    if can_see():
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


def can_see() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        return torch.cuda.clock_rate() > 0
    except (ImportError, RuntimeError, AttributeError):  # what PyTorch raises without the package, or without its answer
        return False
