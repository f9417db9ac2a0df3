"""When Python's garbage collector runs. Imports nothing of ours."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector. What is made meanwhile stays young: `gc.collect(0)` finds what of it only circles hold."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
