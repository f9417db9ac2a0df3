"""Random programs over next to nothing: dimensions of one or two elements have no loops and no masks, some no place in a form."""

from __future__ import annotations

import pytest
from graphs import compare, record

from benchmarks.compositions import Composition, Sizes
from codegen.combo import combine
from codegen.fuse import plan
from codegen.tuning import HOPPER

SIZES: tuple[Sizes, ...] = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 3, 2), (3, 1, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1))
LARGEST = 64


def check_composition(seed: int) -> None:
    composed = Composition(seed, SIZES[seed % len(SIZES)], LARGEST, exact=True)
    inputs = composed.inputs("cpu")
    recording, outs = record(lambda *given: composed(given), *inputs)
    compare(recording, combine(plan(recording.graph, tuning=HOPPER)), outs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_dimensions_of_one_and_two_elements(first: int) -> None:
    for seed in range(first, first + 40):
        check_composition(seed)
