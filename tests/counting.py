"""Counts work, where timing it would measure the machine. Imports nothing of ours."""

from __future__ import annotations

import sys
from typing import Callable


def calls_of(function: Callable[[], object]) -> int:
    """How many calls ``function`` makes, Python's own included."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
