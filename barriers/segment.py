"""The segments that a program names, and the hooks between them. Imports `ir_nodes` and `barriers.wishes` only."""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass

from barriers.wishes import Moves, Wish
from ir_nodes import SegmentCall
from ir_nodes.locks import Lock


class SegmentError(ValueError):
    """A segment, hook or schedule that cannot be; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A name for what is recorded in a part of the program, or for its backward.

    ``part``: which part, for messages ("SDD.forward"). ``nth_call``: only the call with this number, counted from 0 in each
    step; None: every call.
    """

    name: str
    backward: bool = False
    nth_call: int | None = None
    part: str = ""


class Segments:
    """All segments of the process by name, their hooks, and a number for each call that was ever recorded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock(reentrant=True)
        self._named: dict[str, Segment] = {}
        self._hooks: dict[int, Wish] = {}
        self._hook_numbers = itertools.count()
        self._calls: dict[tuple[str, bool, int, int, tuple[int, ...]], int] = {}
        self.calls: list[SegmentCall | None] = [None]

    def add(self, segment: Segment) -> None:
        """Raises SegmentError where the name is taken."""
        if not segment.name or not isinstance(segment.name, str):
            raise SegmentError(f"a segment needs a name, got {segment.name!r}")
        with self._lock:
            known = self._named.get(segment.name)
            if known is not None:
                raise SegmentError(f"there is a segment {segment.name!r} already ({known.part or 'a with block'}); choose "
                                   "another name, or remove that one first with its handle")
            self._named[segment.name] = segment

    def add_block(self, name: str, backward: bool) -> Segment:
        """A `with segment(name)` block; the same block may run again and again. Raises SegmentError for another's name."""
        with self._lock:
            known = self._named.get(name)
            if known is None:
                self.add(Segment(name, backward))
                return self._named[name]
            if known.part or known.backward is not backward:
                part = known.part or "another with block"
                raise SegmentError(f"{name!r} is the segment of {part} already; choose another name")
            return known

    def remove(self, name: str) -> None:
        with self._lock:
            self._named.pop(name, None)
            self._hooks = {number: wish for number, wish in self._hooks.items() if name not in (wish.earlier, wish.later)}

    def get(self, name: str) -> Segment:
        """Raises SegmentError, which names what it may have meant."""
        with self._lock:
            if name in self._named:
                return self._named[name]
            close = difflib.get_close_matches(str(name), self._named, n=1)
            known = ", ".join(map(repr, self._named)) or "none yet"
        hint = f"did you mean {close[0]!r}?" if close else "register_segment(module.method, name=...) makes one."
        raise SegmentError(f"there is no segment {name!r}; {hint} Registered: {known}")

    def has(self, segment: Segment) -> bool:
        return self._named.get(segment.name) is segment

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def names(self) -> list[str]:
        with self._lock:
            return list(self._named)

    def add_hook(self, anchor: str, name: str, backward: bool, before: bool, cause: str) -> int:
        """``name`` right before (or right after) ``anchor``, a segment of the direction ``backward``. Returns its number.

        Raises SegmentError.
        """
        found = self.get(anchor)
        self.get(name)
        if found.backward is not backward:
            right = cause.replace("forward", "backward") if not backward else cause.replace("backward", "forward")
            raise SegmentError(f"{cause}: {anchor!r} is a {'backward' if found.backward else 'forward'} segment, use {right}")
        if anchor == name:
            raise SegmentError(f"{cause}: {name!r} cannot run beside itself")
        wish = Wish(name, anchor, Moves.EARLIER, cause) if before else Wish(anchor, name, Moves.LATER, cause)
        with self._lock:
            number = next(self._hook_numbers)
            self._hooks[number] = wish
        return number

    def remove_hook(self, number: int) -> None:
        with self._lock:
            self._hooks.pop(number, None)

    def hooks(self) -> list[Wish]:
        with self._lock:
            return list(self._hooks.values())

    def call(self, name: str, backward: bool, call: int, parent: int, owners: tuple[int, ...]) -> int:
        """The number of this call of a segment inside call ``parent`` (0: in none), under the schedulers ``owners``."""
        key = (name, backward, call, parent, owners)
        number = self._calls.get(key)  # without the lock: this runs at every call of a segment
        if number is not None:
            return number
        with self._lock:
            if key not in self._calls:
                self.calls.append(SegmentCall(name, backward, call, self.calls[parent], owners))
                self._calls[key] = len(self.calls) - 1
            return self._calls[key]
