"""What would spread a model or its tensors over threads and processes by itself is refused with a reason."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

import lazy_backend  # noqa: F401 - registers the device
from tests.device import DEVICE, arange


def test_data_parallel_is_refused_with_a_reason() -> None:
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(model)
    assert model.weight.device.type == "cpu" or torch.cuda.is_available(), "a model on the CPU stays there"
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        wrapped.to(DEVICE)(torch.ones(1, 2, device=DEVICE))
    for refused in (lambda: nn.DataParallel(model), lambda: nn.DataParallel(model, device_ids=[0]),
                    lambda: nn.parallel.data_parallel(model, torch.ones(1, 2), [0])):  # fmt: skip
        with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
            refused()


@pytest.mark.skipif(torch.cuda.is_available(), reason="without lazysched it would use CUDA")
def test_data_parallel_on_the_cpu_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    assert nn.DataParallel(model)(torch.ones(1, 2)).device.type == "cpu"


def test_other_processes_get_no_tensors_of_the_device() -> None:
    x = arange(DEVICE, 3)
    assert x.share_memory_() is x, "nothing to be done, as for tensors of CUDA"
    for value in (x, nn.Parameter(x), x.untyped_storage(), x.storage()):
        with pytest.raises(NotImplementedError, match=r"send tensor.cpu\(\)"):
            ForkingPickler.dumps(value)
    assert ForkingPickler.dumps(x.cpu())
