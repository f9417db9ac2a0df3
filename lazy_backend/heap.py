"""Keeps the memory of one step for the next, where the device runs on a CPU. Imports ctypes, `ir_nodes.settings` and `core`.

ATen takes the memory of every result from the C library. glibc gives the end of its heap back to the system as soon as little of
it is in use, and a step's intermediate results are all free when it ends: the next step then waits for the system to clear
thousands of pages, a quarter of a small GPT's step.
"""

from __future__ import annotations

import ctypes
from types import ModuleType

from ir_nodes import settings
from lazy_backend import core

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers that mallopt(3) knows them by
MOST_KEPT = 1 << 30
"""Bytes at the heap's end beyond which the rest goes back to the system."""
LARGEST = 1 << 25
"""Bytes of the largest block that lies in the heap, where glibc's own rule for it ends too."""


def keep(native: ModuleType) -> None:
    """Have glibc keep the heap. It holds for the whole process, so that there is a switch: `LAZYSCHED_DISABLE=keep_heap`."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None and settings.enabled("keep_heap") and not core.physical_is_cuda():
        change(_TRIM_THRESHOLD, MOST_KEPT)
        change(_MMAP_THRESHOLD, LARGEST)


def give_back() -> None:
    """What is free goes back to the system, where the C library knows how."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


core.at_start(keep)
