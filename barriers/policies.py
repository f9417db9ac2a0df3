"""The schedule hooks that come with lazysched. Imports `barriers.recorded` only."""

from __future__ import annotations

from typing import Sequence

from barriers.recorded import Before, Constraint, Early, Late, Overlap, Recorded, RecordedSegment

_MORE_MEMORY = 1.25


def program_order(recorded: Recorded) -> Sequence[Constraint]:
    """The recorded order: nothing moves, but for what the schedule and other hooks ask."""
    return []


def earliest(recorded: Recorded) -> Sequence[Constraint]:
    """Each segment as soon as what it needs can be there."""
    return [Early(segment) for segment in recorded.innermost]


def latest(recorded: Recorded) -> Sequence[Constraint]:
    """Each segment right before whoever needs it first."""
    return [Late(segment) for segment in recorded.innermost]


def min_peak_memory(recorded: Recorded) -> Sequence[Constraint]:
    """The order in which the fewest bytes are held at once, of those that it tries; the recorded one unless another is better."""
    tried: list[Sequence[Constraint]] = [earliest(recorded), latest(recorded), sparing(recorded)]
    best = min(tried, key=recorded.peak_bytes)
    return best if recorded.peak_bytes(best) < recorded.peak_bytes() else []


def overlap_communication(recorded: Recorded) -> Sequence[Constraint]:
    """Collectives as early, and what waits for them as late, as helps; memory may grow by at most a quarter.

    Each rank decides by its own shapes: where these differ, ranks may disagree, which is an error before anything runs.
    """
    if not recorded.communicates:
        return []
    room = _MORE_MEMORY * recorded.peak_bytes()
    tried = [[Overlap()], [Overlap(pull=True)]]
    fitting = [asked for asked in tried if recorded.seconds(asked) < recorded.seconds() and recorded.peak_bytes(asked) <= room]
    return min(fitting, key=recorded.seconds, default=[])


def sparing(recorded: Recorded) -> list[Constraint]:
    """Of the segments that may run next always the one after which the fewest bytes are held."""
    left = dict.fromkeys(recorded.innermost)
    users: dict[int, int] = {}
    for segment in left:
        for buffer in segment.buffers:
            users[buffer] = users.get(buffer, 0) + 1
    there = {number for number, (_, _, given) in enumerate(recorded.buffers) if given}
    behind = {one: [other for other in left if other is not one and not recorded.allows(one, other)] for one in left}

    def grows(segment: RecordedSegment) -> int:
        made = sum(recorded.buffers[buffer][0] for buffer in segment.buffers if buffer not in there)
        return made - sum(recorded.buffers[buffer][0] for buffer in segment.buffers
                          if users[buffer] == 1 and not recorded.buffers[buffer][1])

    order: list[RecordedSegment] = []
    while left:
        ready = [segment for segment in left if not any(other in left for other in behind[segment])] or list(left)[:1]
        chosen = min(ready, key=grows)
        del left[chosen]
        order.append(chosen)
        there.update(chosen.buffers)
        for buffer in chosen.buffers:
            users[buffer] -= 1
    return [Before(a, b) for a, b in zip(order, order[1:]) if recorded.allows(a, b)]


POLICIES = {one.__name__: one for one in (program_order, earliest, latest, min_peak_memory, overlap_communication)}
"""By name, for settings and files."""
