"""Recording is bounded: by limits, by leaving out what nobody holds, and by giving memory back."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch

import lazy_backend
from tests.barrier_log import configured, settle
from tests.device import DEVICE


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    settle()
    yield
    lazy_backend.mark_step(wait=True)


def test_a_loop_that_never_looks_is_cut_by_the_number_of_ops() -> None:
    x = torch.zeros(2, device=DEVICE)
    lazy_backend.mark_step()

    def loop() -> None:
        for _ in range(1000):
            x.add_(1)

    fired = configured(loop, max_ops=100)
    assert [(barrier.kind.label, barrier.ops) for barrier in fired] == [("limit", 100)] * 10
    assert "LAZYSCHED_MAX_OPS" in fired[0].reason
    assert x.tolist() == [1000.0, 1000.0]


def test_a_loop_that_keeps_its_results_is_cut_by_their_bytes() -> None:
    kept = [torch.zeros(1024, device=DEVICE)]
    lazy_backend.mark_step()

    def loop() -> None:
        for _ in range(64):
            kept.append(kept[-1] + 1)

    fired = configured(loop, max_pending_bytes="64K")
    assert 3 <= len(fired) <= 6 and {barrier.kind.label for barrier in fired} == {"limit"}
    assert "LAZYSCHED_MAX_PENDING_BYTES" in fired[0].reason
    assert kept[-1][0].item() == 64.0


def test_the_same_loop_cut_by_a_limit_compiles_once() -> None:
    x = torch.zeros(2, device=DEVICE)
    lazy_backend.mark_step()
    before = lazy_backend.stats()["compiles"]

    def loop() -> None:
        for _ in range(2000):
            x.add_(1)

    configured(loop, max_ops=100)
    assert lazy_backend.stats()["compiles"] - before <= 2


def test_a_result_that_nobody_holds_is_never_computed() -> None:
    x = torch.ones(8, 8, device=DEVICE)
    lazy_backend.mark_step()
    before = lazy_backend.stats()
    kept = x + 1
    for _ in range(10):
        (x @ x).tanh()
    lazy_backend.mark_step()
    after = lazy_backend.stats()
    assert after["nodes_dead"] - before["nodes_dead"] == 20
    assert after["nodes_run"] - before["nodes_run"] == 1
    assert kept[0, 0].item() == 2.0


def test_what_a_held_result_needs_is_computed_though_nobody_holds_it() -> None:
    x = torch.ones(3, device=DEVICE)
    y = ((x + 1) * 2) ** 2
    del x
    lazy_backend.mark_step()
    assert y.tolist() == [16.0] * 3


def test_a_view_keeps_its_base_alive() -> None:
    view = (torch.ones(4, device=DEVICE) * 5)[1:3]
    lazy_backend.mark_step()
    assert view.tolist() == [5.0, 5.0]


def test_memory_of_dropped_steps_is_given_back() -> None:
    """Allocations on the physical device stay bounded over many steps."""
    x = torch.zeros(1000, 1000, device=DEVICE)
    for step in range(80):
        x = x * 0.5 + 1
        lazy_backend.mark_step(wait=True)
        if step == 20:
            before = _resident_bytes()
    assert _resident_bytes() - before < 60e6, "60 steps of 4 MB each would be 240 MB"


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
