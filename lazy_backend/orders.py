"""What the schedules in force ask of a recording, and what became of it. Imports `barriers` and `lazy_backend.segments`."""

from __future__ import annotations

import threading
from typing import Iterable

from barriers.order import Ordered, order_segments
from barriers.wishes import Wish
from ir_nodes import Graph
from lazy_backend import core
from lazy_backend.segments import on_hooks, segments

_lock = threading.Lock()
_schedules: dict[int, tuple[Wish, ...]] = {}  # of the schedulers in force, by owner number
_owners: dict[tuple[object, ...], int] = {}
reports: list[Ordered] = []
"""What became of each compiled recording's segments; a program names its report by position."""


def owner_of(*what: object) -> int:
    """One number for schedulers that ask for the same, so that a `with` block in a loop compiles once."""
    with _lock:
        return _owners.setdefault(what, len(_owners) + 1)


def enforce(owner: int, wishes: Iterable[Wish]) -> None:
    """From now on recordings are ordered by ``wishes`` too."""
    with _lock:
        _schedules[owner] = tuple(wishes)
    renew_key()


def renew_key() -> None:
    """Programs compiled under other wishes must not serve: the wishes are a part of every key."""
    wishes = wanted()
    text = "\n".join(f"{wish.owner} {wish} {wish.moves.name}" for wish in wishes)
    key = hash(text) & (2**63 - 1) if wishes else 0
    core.at_start(lambda native: native.set_schedule_key(key))


def wanted() -> list[Wish]:
    with _lock:
        return [*segments.hooks(), *(wish for wishes in _schedules.values() for wish in wishes)]


def apply(graph: Graph) -> int:
    """Order ``graph`` by all wishes. Returns the number of its report, -1 where the recording has no segments."""
    if all(node.segment is None for node in graph.nodes):
        return -1
    report = order_segments(graph, wanted())
    with _lock:
        reports.append(report)
        return len(reports) - 1


on_hooks.append(renew_key)
