"""Whole training programs give eager mode's losses, recorded and replayed, and are compiled in their first steps only."""

from __future__ import annotations

import pytest
import torch
from replays import refusals

import lazy_backend
from benchmarks.training_programs import PROGRAMS
from tests.device import DEVICE, ON_GPU

pytestmark = pytest.mark.usefixtures("built")
STEPS, SETTLED = 6, 3


@pytest.mark.parametrize("replays", [False, True], ids=["recorded", "replayed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_learns_as_in_eager_mode(name: str, replays: bool) -> None:
    torch.manual_seed(0)
    step = PROGRAMS[name]("cuda" if ON_GPU else "cpu", False)
    wanted = [float(step()) for _ in range(STEPS)]
    torch.manual_seed(0)
    step = PROGRAMS[name](DEVICE, False)
    step = lazy_backend.replayed(step) if replays else step
    losses, before = [], (0, refusals())
    for number in range(STEPS):
        if number == SETTLED:
            before = lazy_backend.stats()["compiles"], refusals()
        losses.append(float(step()))
        lazy_backend.mark_step()
    assert (lazy_backend.stats()["compiles"], refusals()) == before, "it compiles, or cannot be replayed, in later steps"
    torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-5)
