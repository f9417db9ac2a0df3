"""Learning rates, and other numbers of optimizers, that change from call to call of a replayed function. Imports `returned` of
`lazy_backend` only.

Programs set them between two steps, as schedules do. What an optimizer of PyTorch's hands to ops is one of a few formulas of its
numbers, in the same float64 arithmetic. So where a number of two recordings differs, the formulas that give both values, bit by
bit, tell what it is; a replay is given what they give then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

from lazy_backend.returned import Refused

Numbers = Sequence[Any]
"""Values of an optimizer's groups, one after the other: floats, tuples of them, and others."""

_SINGLE: Mapping[str, Callable[[float], float]] = {"x": lambda x: x, "-x": lambda x: -x, "1 - x": lambda x: 1 - x}
_DECAYED: Mapping[str, Callable[[float, float], float]] = {
    "lr * decay": lambda rate, decay: rate * decay, "-lr * decay": lambda rate, decay: -rate * decay,
    "1 - lr * decay": lambda rate, decay: 1 - rate * decay,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Formula:
    """``name`` of the number at ``place``, or of the ``item``-th one of a tuple there; with weight decay at ``decay``, or -1."""

    name: str
    place: int
    item: int = 0
    decay: int = -1

    def of(self, numbers: Numbers) -> float:
        value = numbers[self.place]
        value = value[self.item] if isinstance(value, tuple) else value
        return _SINGLE[self.name](value) if self.decay < 0 else _DECAYED[self.name](value, numbers[self.decay])


Follows = tuple[tuple[tuple[int, ...], tuple[Formula, ...]], ...]
"""Indices of recorded numbers with the same values, and the formulas that give these."""


def changed(before: Numbers, now: Numbers, names: Sequence[str]) -> frozenset[int]:
    """The places whose numbers are others now. ``names``: of the numbers; "": a replay may not follow it."""
    return frozenset(place for place, (old, new, name) in enumerate(zip(before, now, names))
                     if name and repr(old) != repr(new) and is_floats(old) and is_floats(new))


def same(before: Numbers, now: Numbers, followed: Collection[int]) -> bool:
    """Are the numbers what they were, but for those at the places ``followed``? One that becomes 0, or was, is another formula:
    without momentum nothing is kept."""
    return len(before) == len(now) and all(
        old == new or place in followed and zeros(old) == zeros(new) for place, (old, new) in enumerate(zip(before, now)))


def zeros(value: Any) -> list[bool]:
    return [not one for one in value] if isinstance(value, tuple) else [not value]


def is_floats(value: Any) -> bool:
    return type(value) is float or isinstance(value, tuple) and all(type(one) is float for one in value)


def formulas(before: Numbers, now: Numbers, names: Sequence[str]) -> Iterator[Formula]:
    """All that PyTorch's optimizers compute in Python of the numbers that changed."""
    places, place_of = changed(before, now, names), {name: place for place, name in enumerate(names)}
    for place, name in enumerate(names):
        group, _, key = name.rpartition(" ")
        if place in places:
            pairs = zip(before[place], now[place]) if isinstance(now[place], tuple) else [(before[place], now[place])]
            yield from (Formula(one, place, item) for item, (old, new) in enumerate(pairs) if repr(old) != repr(new)
                        for one in _SINGLE)
        decay = place_of.get(f"{group} weight_decay", -1) if key == "lr" else -1
        if decay >= 0 and {place, decay} & places and type(now[decay]) is float and now[decay]:
            yield from (Formula(one, place, 0, decay) for one in _DECAYED)


def follow(old: Sequence[Any], new: Sequence[Any], before: Numbers, now: Numbers, names: Sequence[str]) -> Follows:
    """What a replay computes again of the recorded numbers ``old`` and ``new``. Raises Refused where a value could be a formula's
    that gave the same twice; numbers that no formula gives are left out."""
    known: dict[tuple[str, str], list[Formula]] = {}
    for one in formulas(before, now, names):
        known.setdefault((repr(one.of(before)), repr(one.of(now))), []).append(one)
    found: dict[tuple[str, str], list[int]] = {}
    for index, pair in enumerate(zip(map(repr, old), map(repr, new))):
        if pair in known:
            found.setdefault(pair, []).append(index)
    if any(first == second for first, second in found):
        raise Refused("an optimizer's number is too small for a replay to follow it")
    return tuple((tuple(indices), tuple(known[pair])) for pair, indices in found.items())


def values(follows: Follows, numbers: Numbers) -> Iterator[tuple[int, float]]:
    """The numbers of a replay, by index. Raises Refused where groups that had the same numbers when it was recorded have not."""
    for indices, right in follows:
        if not all(is_floats(numbers[one.place]) for one in right):
            raise Refused("an optimizer's number is no float any more")
        first, *others = (one.of(numbers) for one in right)
        if any(repr(one) != repr(first) for one in others):
            raise Refused("optimizers' numbers that were equal differ now")
        yield from ((index, first) for index in indices)
