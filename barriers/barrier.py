"""Why recordings ended: the kinds of barrier, and the log that counts them. Imports `ir_nodes` only."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from ir_nodes import Frame
from ir_nodes.locks import Lock


class BarrierKind(enum.Enum):
    """What ended a recording; each value is the sentence that explains it to a user."""

    MARK_STEP = "mark_step() was called by the program"
    OPTIMIZER_STEP = "optimizer.step() ended, the usual end of a training step"
    STEP_CLOSURE = "a step closure has to run after everything recorded before it"
    SYNC = "sync() asked for these tensors"
    WAIT = "wait_device_ops() waits for everything recorded"
    VALUE_ACCESS = "Python looked at a number: item(), bool(), print, numpy()"
    DEVICE_COPY = "a tensor was copied to another device"
    DATA_DEPENDENT_SHAPE = "the shape of an op's result depends on data"
    UNRECORDABLE = "the op cannot be recorded, so it runs at once"
    GENERATOR_STATE = "the state of a random generator was read or set"
    COLLECTIVE = "ranks communicate outside of what is recorded, and one may wait for what another holds back"
    SCHEDULE = "a LazyScheduler ended, and what it held back has to run"
    LIMIT = "the recording reached its limit of instructions or pending bytes"
    STORAGE = "Python took the address or the bytes of a storage"
    LENT = "another library sees a tensor's memory, so ops on it run at once"
    EVENT = "an event was recorded, and may be waited for"
    STREAM = "another stream became current, or holds a tensor's memory"
    EAGER = "the settings say that every op runs at once"
    SWITCH = "one of PyTorch's global switches, such as that for TF32, was set to another value"
    FORK = "the process forks a child"
    EXIT = "the Python process ends"

    @property
    def label(self) -> str:
        """The kind as reports show it: "mark_step"."""
        return self.name.lower()


STEP_ENDS = (BarrierKind.MARK_STEP, BarrierKind.OPTIMIZER_STEP, BarrierKind.SCHEDULE)
"""What ends a step of the program."""


class Barrier(NamedTuple):  # made at every barrier: a tuple takes a third of a frozen dataclass' time
    """One end of a recording.

    ``reason``: what exactly, such as "aten::_local_scalar_dense reads the value"; ``frame``: the user's line, None where no
    Python code was running; ``ops``: ops that the recording held; ``milliseconds``: what running it took on the host.
    """

    kind: BarrierKind
    reason: str
    frame: Frame | None
    ops: int
    milliseconds: float

    def __str__(self) -> str:
        place = f" at {self.frame}" if self.frame else ""
        return f"{self.kind.label}: {self.reason}{place} ({self.ops} ops, {self.milliseconds:.2f} ms)"


@dataclass(slots=True)
class _Row:
    """What the barriers of one kind, reason and frame add up to."""

    count: int = 0
    ops: int = 0
    milliseconds: float = 0.0

    def add(self, barrier: Barrier) -> None:
        self.count += 1
        self.ops += barrier.ops
        self.milliseconds += barrier.milliseconds


_Key = tuple[BarrierKind, str, Frame | None]


class BarrierLog:
    """Counts barriers by (kind, reason, frame) and keeps the last ``keep``; safe to use from several threads.

    Memory is bounded: beyond ``rows`` different places, further ones are counted in one row for each kind.
    """

    def __init__(self, keep: int = 1000, rows: int = 1000) -> None:
        self._lock = Lock()
        self._recent: deque[Barrier] = deque(maxlen=keep)
        self._rows: dict[_Key, _Row] = {}
        self._max_rows = rows

    def add(self, barrier: Barrier) -> None:
        key: _Key = (barrier.kind, barrier.reason, barrier.frame)
        with self._lock:
            self._recent.append(barrier)
            row = self._rows.get(key)
            if row is None:
                if len(self._rows) >= self._max_rows:
                    key = (barrier.kind, "(further places)", None)
                row = self._rows.setdefault(key, _Row())
            row.add(barrier)

    def recent(self) -> list[Barrier]:
        """The last barriers, newest last."""
        with self._lock:
            return list(self._recent)

    def counts(self) -> dict[_Key, int]:
        """How often each (kind, reason, frame) ended a recording, in the order in which they were first seen."""
        with self._lock:
            return {key: row.count for key, row in self._rows.items()}

    def total(self) -> int:
        with self._lock:
            return sum(row.count for row in self._rows.values())

    def clear(self) -> None:
        with self._lock:
            self._recent.clear()
            self._rows.clear()

    def table(self, limit: int = 20) -> str:
        """Why each barrier fired: one row for each place, the most frequent first, at most ``limit`` rows."""
        with self._lock:
            ranked = sorted(self._rows.items(), key=lambda item: -item[1].count)
            rows = [(key, row.count, row.ops / row.count, row.milliseconds / row.count) for key, row in ranked]
        if not rows:
            return "no barrier yet"
        cells = [("count", "ops each", "ms each", "kind", "why", "where")]
        for (kind, reason, frame), count, ops, milliseconds in rows[:limit]:
            cells.append((str(count), f"{ops:.0f}", f"{milliseconds:.2f}", kind.label, reason, str(frame or "(no Python frame)")))
        rest = sum(count for _, count, _, _ in rows[limit:])
        more = [f"and {rest} more at {len(rows) - limit} further places"] if rest else []
        return "\n".join(_columns(cells) + more)


def _columns(cells: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        numbers = [cell.rjust(width) for cell, width in zip(row[:3], widths[:3])]
        words = [cell.ljust(width) for cell, width in zip(row[3:], widths[3:])]
        lines.append("  ".join(numbers + words).rstrip())
    return lines
