"""A graph's memory is one range of addresses: PyTorch's allocator is told so while a graph is captured, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lazy_backend
from ir_nodes import settings
from lazy_backend import graphs


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a stand-in for the allocator is told."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(graphs, "change_allocator", lambda: said.append)
    return said


def snapshot(monkeypatch: pytest.MonkeyPatch, text: str, on: bool = False) -> None:
    found: dict[str, Any] = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": text, "expandable_segments": on}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: found)


def test_the_users_settings_are_kept_and_come_back(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(monkeypatch, "roundup_power2_divisions:[256:1,512:2],expandable_segments:False,max_split_size_mb:100")
    with graphs.in_one_range():
        assert told == ["roundup_power2_divisions:[256:1,512:2],max_split_size_mb:100,expandable_segments:True"]
    assert told[1:] == ["roundup_power2_divisions:[256:1,512:2],max_split_size_mb:100,expandable_segments:False"]


def test_they_come_back_where_a_capture_fails(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(monkeypatch, "")
    with pytest.raises(RuntimeError, match="waits"), graphs.in_one_range():
        raise RuntimeError("waits for the GPU")
    assert told == ["expandable_segments:True", "expandable_segments:False"]


def test_nothing_is_told_where_it_is_so_already_or_switched_off(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(monkeypatch, "expandable_segments:True", on=True)
    with graphs.in_one_range():
        pass
    snapshot(monkeypatch, "")
    with settings.override(disable="static_plan"), graphs.in_one_range():
        pass
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with graphs.in_one_range():
        pass
    assert told == []


def test_an_allocator_that_refuses_is_left_alone(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(monkeypatch, "")

    def refuse(text: str) -> None:
        raise RuntimeError("not on this platform")

    monkeypatch.setattr(graphs, "change_allocator", lambda: refuse)
    with pytest.warns(RuntimeWarning, match="not on this platform"), graphs.in_one_range():
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_graphs_memory_is_mapped_and_what_is_taken_later_is_not() -> None:
    x, before = torch.randn(1 << 20, device="lazysched"), lazy_backend.stats()["graphs_replayed"]
    for _ in range(8):
        result = x.sin().sort().values.cos().sort().values.add(1).sort().values.sum()
        lazy_backend.mark_step()
    assert lazy_backend.stats()["graphs_replayed"] > before and torch.isfinite(result)
    pools = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
    assert graphs.can_map(torch.cuda.current_device()) and any(one["is_expandable"] for one in pools)
    assert not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
