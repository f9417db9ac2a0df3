"""Which groups are worth one kernel, best first: the candidates of a round of fusion. Imports codegen's planning modules.

A pair is scored by its kind (one makes what the other reads, before both read the same), by the bytes that a shared kernel need
not move, and by how far apart the two run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from codegen.group import Group
from ir_nodes.node import Value

NEIGHBOURS = 4
"""A value's user is paired with so many users next to it, so that candidates stay linear in what is read."""

WORTH = 8
"""Groups that only read the same share a kernel where that is at least one part in so many of what either moves. A number that
all parameters of an optimizer are scaled by is no reason: kernels that share nothing else share a launch (`codegen.combo`)."""


@dataclass(slots=True, eq=False)
class Pair:
    """Two groups, the one that comes first in front. ``shared``: bytes that a kernel of both would not move twice."""

    first: Group
    second: Group
    vertical: bool
    shared: int = 0

    @property
    def distance(self) -> int:
        return self.second.units[0].position - self.first.units[0].position

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Sorts the best pair first."""
        return (not self.vertical, -self.shared, self.distance, self.first.units[0].position)


def worth_sharing(shared: int, one: Group, two: Group) -> bool:
    """Whether two that only read the same should share a kernel for that."""
    return shared * WORTH >= min(one.moved, two.moved)


def pairs(groups: Sequence[Group], horizontal: bool) -> list[Pair]:
    """The candidates of a round, best first. ``horizontal``: those that only read the same, too."""
    users: dict[Value, dict[Group, int]] = {}
    makers: dict[Value, dict[Group, None]] = {}
    for group in groups:
        for value in group.stores:
            makers.setdefault(value, {})[group] = None
        for value, nbytes in group.loads.items():
            users.setdefault(value, {})[group] = nbytes
    found: dict[tuple[Group, Group], Pair] = {}
    for value, reading in users.items():
        for maker in makers.get(value, ()):
            for group, nbytes in list(reading.items())[:NEIGHBOURS]:
                _add(found, maker, group, True, nbytes)
        close = list(reading.items())
        for index, (group, nbytes) in enumerate(close if horizontal else ()):
            for other, theirs in close[index + 1 : index + 1 + NEIGHBOURS]:
                _add(found, group, other, False, min(nbytes, theirs))
    worthy = [pair for pair in found.values() if pair.vertical or worth_sharing(pair.shared, pair.first, pair.second)]
    return sorted(worthy, key=lambda pair: pair.rank)


def _add(found: dict[tuple[Group, Group], Pair], one: Group, two: Group, vertical: bool, nbytes: int) -> None:
    if one is two:
        return
    first, second = (one, two) if one.units[0].position < two.units[0].position else (two, one)
    pair = found.get((first, second))
    if pair is None:
        pair = found[first, second] = Pair(first, second, vertical)
    pair.vertical |= vertical
    pair.shared += nbytes
