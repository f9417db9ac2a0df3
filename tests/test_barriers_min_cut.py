"""The cut equals the cheapest that trying every set of vertices finds."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from barriers.min_cut import NEVER, min_cut


def parted(cut: set[int], after: dict[int, list[int]], sources: list[int], sinks: list[int]) -> bool:
    waiting, seen = [one for one in sources if one not in cut], set()
    while waiting:
        vertex = waiting.pop()
        if vertex in seen or vertex in cut:
            continue
        seen.add(vertex)
        waiting += after.get(vertex, [])
    return not seen & set(sinks)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_cut_is_cheaper(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 7))
    vertices = list(range(count))
    capacity = {one: data.draw(st.sampled_from([0, 1, 2, 3, 5, 8, NEVER])) for one in vertices}
    after = {one: [two for two in vertices if two > one and data.draw(st.booleans())] for one in vertices}
    sources = data.draw(st.lists(st.sampled_from(vertices), max_size=3, unique=True))
    sinks = data.draw(st.lists(st.sampled_from(vertices), min_size=1, max_size=3, unique=True))
    found = min_cut(capacity, after, sources, sinks)
    sets = (set(some) for size in range(count + 1) for some in itertools.combinations(vertices, size))
    best = min(sum(capacity[one] for one in some) for some in sets if parted(some, after, sources, sinks))
    if found is None:
        assert best >= NEVER
    else:
        assert parted(found, after, sources, sinks) and sum(capacity[one] for one in found) == best


def test_of_two_cheapest_the_one_nearest_to_the_sinks() -> None:
    assert min_cut({"a": 2, "b": 2}, {"a": ["b"]}, ["a"], ["b"]) == {"b"}


def test_what_needs_nothing_costs_nothing() -> None:
    assert min_cut({"fill": 4, "sum": 4}, {"fill": ["sum"]}, [], ["sum"]) == set()
