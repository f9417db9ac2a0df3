"""Which segments a thread is in: entering one costs a few microseconds. Imports torch, `barriers.segment` and `core`.

The core tags what it records with a number that is set here; `segments.calls` says what each number means.
"""

from __future__ import annotations

import threading
from types import ModuleType

import torch

from barriers.segment import Segment, Segments
from lazy_backend import core

segments = Segments()
_KEPT_RUNS = 64


class Part:
    """A module's method or a `with` block, and the segments that name it and its backward."""

    def __init__(self, *names: Segment) -> None:
        self.names = list(names)
        self.runs: list[int] = []  # backward calls of the last forward runs: a recomputed forward is that of the latest

    def pick(self, backward: bool, call: int) -> Segment | None:
        """The segment of this direction that call number ``call`` of a step belongs to."""
        found = None
        for one in self.names:
            if one.backward is backward and (one.nth_call == call or (one.nth_call is None and found is None)):
                found = one
        return found


class _Thread(threading.local):
    """What runs in this thread: numbers of `Segments.calls`."""

    def __init__(self) -> None:
        self.forward = self.backward = 0
        self.owners: tuple[int, ...] = ()  # the schedulers in force here, outermost first
        self.step = self.recording = -1
        self.step_calls: dict[Part, int] = {}
        self.calls: dict[str, int] = {}

    def renew(self, step: int, recording: int) -> None:
        """Start counting calls anew where another step, or another recording, has begun."""
        if self.step != step:
            self.step, self.step_calls = step, {}
        if self.recording != recording:
            self.recording, self.calls = recording, {}

    def number(self, segment: Segment, parent: int) -> int:
        """The number of the next call of ``segment`` inside call ``parent``."""
        call = self.calls[segment.name] = self.calls.get(segment.name, -1) + 1
        return segments.call(segment.name, segment.backward, call, parent, self.owners)


thread = _Thread()


class Steps:
    """Counts the steps of the program: what lies between two ends of `optimizer.step()` or `mark_step()`.

    By owner: a thread under a scheduler of its own has steps of its own. 0: of all threads.
    """

    numbers: dict[int, int] = {}
    recordings = 0  # that have run as a whole


Before = tuple[ModuleType, int, int, int, bool]
"""What held when a part was entered: the core, the two segments around it, the first autograd number, is backward noted."""


def enter(part: Part) -> Before | None:
    """From now on what this thread records belongs to the part's segments, and so does its backward."""
    if not part.names or not core.is_started():
        return None
    native = core.get()
    forward, backward = thread.forward, thread.backward
    noted = recompute(part) if native.backward_segment() >= 0 else run(part)
    native.enter_segment(thread.forward)
    return native, forward, backward, torch._C._autograd._get_sequence_nr(), noted


def run(part: Part) -> bool:
    thread.renew(Steps.numbers.get(thread.owners[0] if thread.owners else 0, 0), Steps.recordings)
    call = thread.step_calls.get(part, 0)
    thread.step_calls[part] = call + 1
    forward, backward = part.pick(False, call), part.pick(True, call)
    if forward is not None:
        thread.forward = thread.number(forward, thread.forward)
    if backward is None:
        return False
    thread.backward = thread.number(backward, thread.backward)
    part.runs.append(thread.backward)
    del part.runs[:-_KEPT_RUNS]
    return True


def recompute(part: Part) -> bool:
    """Checkpointing runs the forward again while autograd runs: that is a part of the backward."""
    if not part.runs:
        return False
    thread.forward = thread.backward = part.runs.pop()
    return True


def leave(before: Before | None) -> None:
    """What held when the part was entered holds again."""
    if before is None:
        return
    native, forward, backward, first, noted = before
    if noted:
        native.note_backward(first, thread.backward)
    native.enter_segment(forward)
    thread.forward, thread.backward = forward, backward
