"""What the schedules in force ask of a recording, and what became of it. Imports `barriers` and `lazy_backend.segments`."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from types import ModuleType
from typing import Iterable

from barriers.order import Ordered, order_segments
from barriers.wishes import Wish
from ir_nodes import Graph, settings
from lazy_backend import core
from lazy_backend.entered import segments
from lazy_backend.segments import on_hooks

_lock = threading.Lock()
_schedules: dict[int, tuple[Wish, ...]] = {}  # of the schedulers in force, by owner number
_owners: dict[tuple[object, ...], int] = {}
_reports: OrderedDict[int, Ordered] = OrderedDict()  # what became of each compiled recording's segments, the last used last
_numbers = itertools.count()
_key = 0


def owner_of(*what: object) -> int:
    """One number for schedulers that ask for the same, so that a `with` block in a loop compiles once."""
    with _lock:
        return _owners.setdefault(what, len(_owners) + 1)


def enforce(owner: int, wishes: Iterable[Wish]) -> None:
    """From now on recordings are ordered by ``wishes`` too."""
    with _lock:
        _schedules[owner] = tuple(wishes)
        if not _schedules[owner]:
            del _schedules[owner]
    renew_key()


def renew_key() -> None:
    """Programs compiled under other wishes must not serve: the wishes are a part of every key."""
    wishes = wanted()
    text = "\n".join(f"{wish.owner} {wish} {wish.moves.name}" for wish in wishes)
    global _key
    _key = hash(text) & (2**63 - 1) if wishes else 0
    if core.is_started():
        set_key(core.get())


def set_key(native: ModuleType) -> None:
    native.set_schedule_key(_key)


def wanted() -> list[Wish]:
    with _lock:
        return [*segments.hooks(), *(wish for wishes in _schedules.values() for wish in wishes)]


def apply(graph: Graph) -> int:
    """Order ``graph`` by all wishes. Returns the number of its report, -1 where the recording has no segments."""
    if all(node.segment is None for node in graph.nodes):
        return -1
    report = order_segments(graph, wanted())
    with _lock:
        number = next(_numbers)
        _reports[number] = report
    return number


def report(number: int) -> Ordered | None:
    """The report of a program that has just run.

    The core keeps the programs that were used last, so the reports that were used last are those of all programs that it has.
    """
    with _lock:
        found = _reports.get(number)
        if found is not None:
            _reports.move_to_end(number)
        while len(_reports) > settings.current().cache_size * core.device_count():
            _reports.popitem(last=False)
        return found


core.at_start(set_key)
on_hooks.append(renew_key)
