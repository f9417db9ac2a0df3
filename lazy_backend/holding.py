"""Which segments a value access leaves recorded, because the schedule wants another one first. Imports `barriers.holding`,
`ir_nodes` and `lazy_backend` parts below."""

from __future__ import annotations

from typing import Iterable

from barriers.barrier import STEP_ENDS, Barrier
from barriers.holding import Held, hold_back
from barriers.wishes import Moves, Wish
from ir_nodes import Graph, SegmentCall
from lazy_backend import api, core, orders
from lazy_backend.entered import Steps, segments
from lazy_backend.trace import Recording

_ran: set[str] = set()  # segments that have run in this step


def hold(recorded: list[int]) -> list[int]:
    """Of the segments that a recording holds, by number, those that wait for one that this step has not come to yet.

    The core asks at every value access under a schedule.
    """
    calls = {number: segments.calls[number] for number in dict.fromkeys(recorded)}
    present = _ran | {one.name for call in calls.values() if call is not None for one in call.chain()}
    waiting = {(name, wish.owner) for wish in orders.wanted() for name in waiting_names(wish, present)}
    return sorted(number for number, call in calls.items() if call is not None and is_held(call, waiting))


def waiting_names(wish: Wish, present: set[str]) -> Iterable[str]:
    """The later one waits for the earlier, and one that is to run right before another for that."""
    if wish.earlier not in present:
        yield wish.later
    if wish.moves is Moves.EARLIER and wish.later not in present:
        yield wish.earlier


def is_held(call: SegmentCall, waiting: set[tuple[str, int | None]]) -> bool:
    return any((one.name, owner) in waiting for one in call.chain() for owner in (None, *one.owners))


def split(graph: Graph, recording: Recording) -> Held:
    """Leave in ``graph`` what has to run now."""
    if not recording.held:
        return Held()
    named = (segments.calls[number] for number in recording.held)
    return hold_back(graph, [call for call in named if call is not None], recording.needed)


def note(barrier: Barrier, order: int) -> None:
    """Calls of a segment are counted anew in each recording; what is held back is a part of the next one."""
    report = orders.report(order) if order >= 0 else None
    if report is None or not report.waiting:
        Steps.recordings += 1
    if barrier.kind in STEP_ENDS:
        _ran.clear()
    elif report is not None:
        _ran.update(call.name for call in report.scheduled)


api.listeners.append(note)
core.at_start(lambda native: native.set_holder(hold))
