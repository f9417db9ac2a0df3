"""Figures of the memory that the device holds: they follow tensors, and nothing leaks."""

from __future__ import annotations

import gc

import pytest
import torch

import lazy_backend
from lazy_backend import core
from tests.device import DEVICE

needs_cpu = pytest.mark.skipif(core.physical_is_cuda(), reason="CUDA's allocator rounds and keeps; it counts for itself")
MIB = 2**20


@pytest.fixture
def held() -> int:
    """Bytes held before the test; the peak starts there."""
    lazy_backend.mark_step()
    gc.collect()
    torch.lazysched.reset_peak_memory_stats()
    return torch.lazysched.memory_allocated()


@needs_cpu
def test_tensors_count_once_they_are_computed(held: int) -> None:
    x = torch.ones(MIB, dtype=torch.uint8, device=DEVICE)
    assert torch.lazysched.memory_allocated() == held, "recorded, not run"
    torch.lazysched.synchronize()
    assert torch.lazysched.memory_allocated() == held + MIB
    view = x[: MIB // 2]
    del x
    assert torch.lazysched.memory_allocated() == held + MIB, "the view holds it"
    del view
    assert torch.lazysched.memory_allocated() == held


@needs_cpu
def test_copies_in_and_results_of_ops_count(held: int) -> None:
    x = torch.ones(MIB, dtype=torch.uint8).to(DEVICE)
    assert torch.lazysched.memory_allocated() == held + MIB
    y, picked = x + 1, x[x > 0]
    z = torch.linalg.inv(torch.eye(256, dtype=torch.float64, device=DEVICE))
    torch.lazysched.synchronize()
    assert torch.lazysched.memory_allocated() >= held + 3 * MIB + 256 * 256 * 8
    del x, y, z, picked
    assert torch.lazysched.memory_allocated() == held


@needs_cpu
def test_the_peak_counts_what_a_recording_needs(held: int) -> None:
    x = torch.ones(MIB, dtype=torch.uint8, device=DEVICE)
    total = (x + 1).sum(dtype=torch.float64)
    del x
    assert total.item() == 2 * MIB
    assert torch.lazysched.memory_allocated() == held + 8
    assert torch.lazysched.max_memory_allocated() >= held + 2 * MIB
    torch.lazysched.reset_peak_memory_stats()
    assert torch.lazysched.max_memory_allocated() == torch.lazysched.memory_allocated()


@needs_cpu
def test_resized_storages(held: int) -> None:
    x = torch.ones(1000, dtype=torch.uint8).to(DEVICE)
    x.untyped_storage().resize_(0)
    assert torch.lazysched.memory_allocated() == held
    x.untyped_storage().resize_(4000)
    assert x.fill_(1).sum().item() == 1000
    assert held < torch.lazysched.memory_allocated() <= held + 4000 + 8


def test_every_name_says_the_same() -> None:
    x = torch.ones(MIB, device=DEVICE)
    torch.lazysched.synchronize()
    stats = torch.lazysched.memory_stats(DEVICE)
    assert stats["allocated_bytes.all.current"] == torch.lazysched.memory_allocated(0) >= 4 * MIB
    assert stats == torch.accelerator.memory_stats() and list(stats) == sorted(stats)
    assert torch.accelerator.memory_allocated() == torch.lazysched.memory_allocated()
    assert torch.accelerator.max_memory_allocated() == torch.lazysched.max_memory_allocated()
    assert torch.accelerator.memory_reserved() == torch.lazysched.memory_reserved() >= torch.lazysched.memory_allocated()
    assert torch.accelerator.max_memory_reserved() == torch.lazysched.max_memory_reserved()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.lazysched.memory_allocated()
    free, total = torch.lazysched.mem_get_info()
    assert 0 < free < total
    torch.lazysched.empty_cache()
    torch.accelerator.empty_cache()
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    if hasattr(torch.accelerator, "get_memory_info"):
        assert torch.accelerator.get_memory_info()[1] == total
    assert "bytes" in torch.lazysched.memory_summary().lower() or core.physical_is_cuda()
    assert x.sum().item() == MIB


@needs_cpu
def test_what_a_cpu_cannot_do_is_an_error() -> None:
    assert torch.lazysched.memory_snapshot() == []
    with pytest.raises(NotImplementedError, match="runs on the CPU here"):
        torch.lazysched.set_per_process_memory_fraction(0.5)


def test_nothing_leaks(held: int) -> None:
    for _ in range(30):
        x = torch.randn(500, device=DEVICE, requires_grad=True)
        y = x.cpu().to(DEVICE).clone()
        loss = ((x + y).view(10, 50)[2:5] * 2).sum()
        loss.backward()
        y.add_(1).mul_(2)
        x.detach().numpy() if not core.physical_is_cuda() else None
        lazy_backend.mark_step()
    del x, y, loss
    gc.collect()
    assert torch.lazysched.memory_allocated() == held


def test_a_dead_result_takes_no_memory(held: int) -> None:
    for _ in range(20):
        torch.empty(16 * MIB, device=DEVICE)
        torch.ones(16 * MIB, device=DEVICE).exp()
        lazy_backend.mark_step()
    assert torch.lazysched.max_memory_allocated() < held + MIB
