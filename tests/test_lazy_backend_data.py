"""Batches on their way to the device: workers, pinned memory, copies that do not block."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lazy_backend  # noqa: F401 - registers the device
from lazy_backend import core
from tests.device import DEVICE, ON_GPU


class OnDevice(Dataset):
    """Items that a worker makes on the device."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index), device=DEVICE).mul(2)[1:]


def epoch(**options: object) -> list[float]:
    loader = DataLoader(TensorDataset(torch.arange(8.0), torch.arange(8)), batch_size=4, **options)
    sums = []
    for inputs, targets in loader:
        assert inputs.is_pinned() == (bool(options.get("pin_memory")) and ON_GPU), "a CPU has nothing to pin memory for"
        inputs, targets = inputs.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
        sums.append((inputs + targets).sum().item())
    return sums


OPTIONS = {
    "plain": {},
    "pinned": {"pin_memory": True},
    "pinned for the device": {"pin_memory": True, "pin_memory_device": DEVICE},
    "forked workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "forked workers, pinned": {"num_workers": 1, "pin_memory": True, "persistent_workers": True},
    "spawned worker": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.filterwarnings("ignore:.*pin_memory_device.*")
def test_batches_arrive(name: str) -> None:
    torch.ones(1, device=DEVICE).exp()  # something is recorded when workers fork
    assert epoch(**OPTIONS[name]) == [12.0, 44.0]


needs_cpu = pytest.mark.skipif(ON_GPU, reason="CUDA does not survive fork")


@pytest.mark.parametrize("start", [pytest.param("fork", marks=needs_cpu), "spawn"])
def test_workers_may_use_the_device(start: str) -> None:
    loader = DataLoader(OnDevice(), batch_size=2, num_workers=1, multiprocessing_context=start)
    batches = list(loader)
    assert [batch.device for batch in batches] == [torch.device(DEVICE, 0)] * 2
    assert torch.cat(batches).tolist() == [[0, 0], [2, 2], [4, 4], [6, 6]]


def test_the_source_of_a_copy_may_change_at_once() -> None:
    source = torch.ones(1000)
    x = source.to(DEVICE, non_blocking=not ON_GPU)
    source.zero_()
    assert x.sum().item() == 1000
    target = torch.empty(1000, device=DEVICE)
    target.copy_(torch.ones(1000).pin_memory(), non_blocking=True)
    back = (target + 1).to("cpu", non_blocking=True)
    torch.lazysched.synchronize()
    assert back.sum().item() == 2000


def test_pinned_memory() -> None:
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.tolist() == [0, 1, 2, 3] == pinned.pin_memory(DEVICE).tolist()
    assert pinned.is_pinned() == core.physical_is_cuda() == pinned.pin_memory(DEVICE).is_pinned()
    assert torch.arange(4.0).untyped_storage().pin_memory().nbytes() == 16
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(2, device=DEVICE).pin_memory()
    assert not torch.ones(2, device=DEVICE).is_pinned()
