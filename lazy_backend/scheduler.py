"""`LazyScheduler`: the user's order for the segments of a region or a run. Imports `barriers` and `lazy_backend` parts below."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
import types
import warnings
from collections import deque
from pathlib import Path
from typing import Sequence

from torch import nn

from barriers.barrier import STEP_ENDS, Barrier, BarrierKind
from barriers.order import Ordered
from barriers.recorded import Ask
from barriers.refusals import Refusal
from barriers.wishes import check, wishes_of
from ir_nodes import SegmentCall
from ir_nodes.locks import Lock
from lazy_backend import api, core, orders
from lazy_backend.entered import Steps, segments, thread
from lazy_backend.schedule_page import page
from lazy_backend.schedule_report import StepReport, text

_KEPT = 64
_active: list[LazyScheduler] = []
_lock = Lock()
_told: set[str] = set()  # problems of hooks


class ScheduleError(RuntimeError):
    """With ``strict=True``: an order that data flow does not allow; with ``debug_mode=True``: one that changed a number.

    Everything was computed all the same.
    """


class Step(deque[tuple[Ordered, Barrier]]):
    """The last recordings of a step that had segments, and what ran each. Some runs never end a step, so some are kept."""

    def __init__(self) -> None:
        super().__init__(maxlen=_KEPT)


class LazyScheduler:
    """Runs segments in the order of ``schedule``: each of them as a whole before the next. Hooks count as well.

        with LazyScheduler(schedule=["sdd_fwd", "overarch_func2_bwd"]) as s:
            train_step()
        print(s.report())

    ``hooks``: schedule hooks such as `min_peak_memory`, asked about what this scheduler's segments record; see
    `register_schedule_hook`. Data flow always wins: where it forbids an order, the numbers are right and `report` says which
    tensor forbade it; with ``strict`` the region ends with ScheduleError. ``start`` and ``stop`` serve a whole run. It holds
    for what its own thread calls, and begins anew with every step; one inside another adds to it. ``debug_mode`` also runs each
    recording in both orders on copies of its inputs, and compares every result to the last bit: ScheduleError, and a warning at
    once, name the first that differs. That takes three times as long, and memory for every result. ``measure`` times each
    segment on the device for `report`; then segments share no kernels, and each costs some microseconds more. Raises
    SegmentError for an unknown name, ContradictionError for a circle.
    """

    def __init__(self, schedule: Sequence[str] | None = None, *, hooks: Sequence[Ask] = (), strict: bool = False,
                 debug_mode: bool = False, measure: bool = False) -> None:
        if isinstance(schedule, str):
            raise ValueError(f"schedule is a list of names, got the text {schedule!r}: write [{schedule!r}]")
        self.schedule = list(schedule or [])
        self.strict = strict
        self._wishes = wishes_of(self.schedule)
        self._demands = orders.Demands(tuple(self._wishes), tuple(map(orders.hook_of, hooks)), debug_mode, measure)
        self._steps = [Step()]  # what the last finished step ran, then what this one did so far
        self._ran: set[str] = set()  # segments, in this step
        self._warned: set[str] = set()
        self._foreign: set[int] = set()  # owners of the schedulers of other threads
        self._thread = self.owner = 0

    def start(self) -> LazyScheduler:
        """From now on this thread's segments follow the schedule."""
        for name in self.schedule:
            if name not in segments and not is_written_in_code(name):
                segments.get(name)  # raises, and says what may have been meant
        outer = [wish for one in _active if one._thread == threading.get_ident() for wish in one._wishes]
        check([*self._wishes, *outer, *segments.hooks()])
        self._thread = threading.get_ident()
        with _lock:
            asked = self._demands.key()
            alike = {one.owner for one in _active if one._thread != self._thread}
            owners = (orders.owner_of(asked, turn) for turn in itertools.count())
            self.owner = next(owner for owner in owners if owner not in alike)
            _active.append(self)
        self._demands = self._demands.of(self.owner)
        self._wishes = list(self._demands.wishes)
        orders.enforce(self.owner, self._demands)
        if self.owner not in thread.owners:
            thread.owners = (*thread.owners, self.owner)
        return self

    def stop(self) -> None:
        """Run what is recorded, and let the program's own order hold again. Raises ScheduleError."""
        if self not in _active:
            return
        if core.is_started():
            for index in range(core.device_count()):
                core.get().barrier(index, BarrierKind.SCHEDULE.label, "LazyScheduler ended")
        _active.remove(self)
        if not any(one.owner == self.owner for one in _active):
            thread.owners = tuple(owner for owner in thread.owners if owner != self.owner)
            orders.enforce(self.owner, None)
        step = self._last_step()
        if step.differences and self._demands.debug:
            raise ScheduleError(step.differences[0])
        failed = [*(refusal for refusal in step.refusals if not refusal.partly), *step.problems]
        if self.strict and failed:
            raise ScheduleError("the schedule could not be honoured: " + "; ".join(map(str, failed)))

    def __enter__(self) -> LazyScheduler:
        return self.start()

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.stop()
        else:  # the region's own error matters more than an order
            strict, self.strict = self.strict, False
            try:
                self.stop()
            finally:
                self.strict = strict

    # ---- what happened ------------------------------------------------------------------------------------------------

    def note(self, barrier: Barrier, report: Ordered | None) -> None:
        self._foreign |= {one.owner for one in _active if one._thread != self._thread}
        if report is not None and not (report.recorded and all(map(self._is_foreign, report.recorded))):
            self._steps[-1].append((report, barrier))
            self._ran.update(call.name for call in report.recorded)
        if barrier.kind in STEP_ENDS and self._steps[-1] and self._foreign.isdisjoint(thread.owners):
            self._miss()
            self._steps = [self._steps[-1], Step()]
            self._ran.clear()

    def _is_foreign(self, call: SegmentCall) -> bool:
        return not self._foreign.isdisjoint(call.owners)

    def _miss(self) -> None:
        for name in self.schedule:
            if name not in self._ran and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"the schedule names {name!r}, which did not run in this step; the others go on",
                              stacklevel=users_level())

    def _last_step(self) -> StepReport:
        ran = next((step for step in reversed(self._steps) if step), Step())
        return StepReport([*self._wishes, *segments.hooks()], list(ran), frozenset(self._foreign))

    def recorded_execution_order(self) -> list[str]:
        """The segments of the last step in the order in which they ran on the device; later calls as "name#1"."""
        return list(map(str, self._last_step().scheduled))

    def refusals(self) -> list[Refusal]:
        """Orders that the last step could not honour, or only in part."""
        return self._last_step().refusals

    def report(self, html: str | os.PathLike[str] | None = None) -> str:
        """The last step in words: what was wanted, recorded and run, what data flow forbade, time and memory.

        ``html``: a file to write the same to as a page with pictures, which needs no network. Times are estimates unless the
        scheduler was made with ``measure=True``.
        """
        step = self._last_step()
        if html is not None:
            Path(html).write_text(page(step), encoding="utf-8")
        return text(step)


def is_written_in_code(name: str) -> bool:
    """Does some function name both `segment` and this text? Then it has a block of that name.

    Looked at are the methods of modules, and what stands in files that import `segment`.
    """
    classes = [nn.Module]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
    own = {cls for cls in classes if not cls.__module__.startswith("torch")}
    homes = {cls.__module__ for cls in own} | {"__main__"}
    homes |= {home for home, module in list(sys.modules.items()) if "segment" in getattr(module, "__dict__", ())}
    spaces = [*map(vars, own), *(vars(sys.modules[home]) for home in homes if home in sys.modules)]
    return any(
        holds(inspect.unwrap(value).__code__, name) for space in spaces for value in list(space.values())
        if isinstance(value, types.FunctionType)
    )


def holds(code: types.CodeType, text: str) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return ("segment" in code.co_names and text in code.co_consts) or any(holds(one, text) for one in inner)


def note(barrier: Barrier, order: int) -> None:
    if barrier.kind in STEP_ENDS:
        for owner in {0, *thread.owners}:
            Steps.numbers[owner] = Steps.numbers.get(owner, 0) + 1
    report = orders.report(order)
    for problem in [*report.problems, report.difference] if report else ():
        if problem and problem not in _told:
            _told.add(problem)
            warnings.warn(problem, RuntimeWarning, stacklevel=users_level())
    for scheduler in list(_active):
        scheduler.note(barrier, report)


def users_level() -> int:
    """The stack level of the user's line, for `warnings.warn` in the function that calls this."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("lazy_backend", "torch"):
        level, frame = level + 1, frame.f_back
    return level


api.listeners.append(note)
