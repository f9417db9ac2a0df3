"""What compiling costs grows with the recording and no faster, counted in calls, from graph to program. Imports benchmarks."""

from __future__ import annotations

from typing import Iterator

import pytest
from counting import calls_of

from benchmarks.compile_cost import phases, record
from lazy_backend import core


@pytest.fixture
def limits() -> Iterator[None]:
    """The benchmark lifts them for its long recordings."""
    yield
    core.configure(core.get())


@pytest.mark.usefixtures("limits")
def test_a_longer_recording_costs_no_more_a_node() -> None:
    phases(record(1))
    costs = []
    for layers in (3, 12):
        recording = record(layers)
        found: list[dict[str, float]] = []
        calls = calls_of(lambda recording=recording, found=found: found.append(phases(recording)))
        costs.append(calls / found[0]["nodes"])
    assert costs[1] < 1.1 * costs[0]
