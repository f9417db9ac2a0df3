"""What a schedule asks for: pairs of segments, and which of the two moves. Imports `ir_nodes` only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Iterable, Sequence

from ir_nodes import SegmentCall


class Moves(enum.Enum):
    """Which of the two segments leaves its recorded place."""

    NEITHER = "only their order counts: whoever is too early waits"
    EARLIER = "the earlier one runs right before the later one"
    LATER = "the later one runs right after the earlier one"


@dataclass(frozen=True, slots=True)
class Wish:
    """``earlier`` is to run before ``later``; both are names of segments. ``cause`` is what the user wrote."""

    earlier: str
    later: str
    moves: Moves = Moves.NEITHER
    cause: str = ""
    owner: int | None = None  # only calls under this scheduler; None: every call

    def __str__(self) -> str:
        return f"{self.earlier} before {self.later}"


class ContradictionError(ValueError):
    """Wishes that no order can fulfil."""


def wishes_of(schedule: Sequence[str], cause: str = "", owner: int | None = None) -> list[Wish]:
    """Each segment of ``schedule`` before the one that follows it. Raises ValueError for a name that stands there twice."""
    twice = sorted({name for name in schedule if list(schedule).count(name) > 1})
    if twice:
        raise ValueError(f"the schedule names {', '.join(map(repr, twice))} twice; a segment runs once: to place one of several "
                         "calls, register it under a name of its own with nth_call=")
    return [Wish(a, b, Moves.NEITHER, cause or f"schedule {list(schedule)}", owner) for a, b in zip(schedule, schedule[1:])]


def check(wishes: Iterable[Wish]) -> None:
    """Raises ContradictionError, which shows the circle, where the wishes contradict each other."""
    after: dict[str, dict[str, Wish]] = {}
    for wish in wishes:
        after.setdefault(wish.earlier, {})[wish.later] = wish
    done: set[str] = set()
    for start in after:
        path: list[Wish] = []
        _walk(start, after, path, [start], done)


def _walk(start: str, after: dict[str, dict[str, Wish]], path: list[Wish], names: list[str], done: set[str]) -> None:
    stack = [iter(after.get(start, {}).items())]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            done.add(names.pop())
            if path:
                path.pop()
            continue
        name, wish = step
        if name in names:
            circle = [*path[names.index(name):], wish]
            told = "; ".join(f"{one} ({one.cause})" if one.cause else str(one) for one in circle)
            raise ContradictionError(f"the schedule contradicts itself: {told}. Remove one of these.")
        if name not in done:
            path.append(wish)
            names.append(name)
            stack.append(iter(after.get(name, {}).items()))


def pairs(wish: Wish, calls: dict[str, list[SegmentCall]]) -> list[tuple[SegmentCall, SegmentCall]]:
    """The calls that ``wish`` is about: the n-th with the n-th; one that ran once is paired with every call of the other."""
    left, right = (
        [call for call in calls.get(name, []) if wish.owner is None or wish.owner in call.owners]
        for name in (wish.earlier, wish.later)
    )
    if len(left) == 1 or len(right) == 1:
        return [(a, b) for a in left for b in right]
    return list(zip(left, right))
