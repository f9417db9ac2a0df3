"""Settings that change for a `with` block: what is compiled under the ones is not run under the others, and limits follow."""

from __future__ import annotations

import pytest
import torch

import lazy_backend
from ir_nodes import settings
from lazy_backend import flush, orders
from tests.barrier_log import barriers_of, settle
from tests.device import DEVICE


def compiles_of(times: int) -> int:
    """How many of so many equal steps compiled something."""
    x = torch.ones(5, 7, device=DEVICE)
    lazy_backend.mark_step()
    before = lazy_backend.stats()["compiles"]
    for _ in range(times):
        held = (x.exp() * 3).sum(1)
        lazy_backend.mark_step()
        del held
    return int(lazy_backend.stats()["compiles"] - before)


def test_settings_that_change_code_are_part_of_the_key() -> None:
    compiles_of(1)
    assert compiles_of(2) == 0
    other = "aten" if settings.current().engine != "aten" else "triton"
    with settings.override(engine=other):
        assert compiles_of(3) == 1, "the program of another engine is not found"
    assert compiles_of(2) == 0, "and is not in the way of the first afterwards"
    with settings.override(engine=other):
        assert compiles_of(2) == 0, "it is found under the same settings again"
    with settings.override(debug=set(), frames=False):
        assert compiles_of(2) == 0, "these change no code"


def test_limits_follow_at_once() -> None:
    settle()
    x = torch.ones(3, device=DEVICE)
    lazy_backend.mark_step()

    def chain() -> None:
        y = x
        for _ in range(8):
            y = y + 1
        y.cpu()

    with settings.override(max_ops=4):
        inside = barriers_of(chain)
    assert [one.kind.label for one in inside][:2] == ["limit", "limit"]
    assert "limit" not in [one.kind.label for one in barriers_of(chain)]


def test_reading_a_generators_state_changes_the_key_where_attention_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_state_read", False)
    orders.renew_key()
    compiles_of(1)
    with settings.override(attention="triton"):
        compiles_of(1)
        assert compiles_of(1) == 0
        torch.lazysched.get_rng_state()
        assert compiles_of(2) == 1 and orders.state_was_read()
        assert flush.context_of(0).redraws, "what an engine is told, and a report is made from"
    assert compiles_of(1) == 0, "elsewhere a state may be read without anything being compiled again"
    monkeypatch.undo()
    orders.renew_key()
