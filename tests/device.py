"""What the tests of the device share. Imports torch and pytest only."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

DEVICE = "lazysched"
ON_GPU = torch.cuda.is_available()
PHYSICAL = "cuda" if ON_GPU else "cpu"  # where the device computes
# How closely float32 results equal the CPU's. On a CPU the device calls the very same kernels; a GPU's round otherwise.
CLOSE = 1e-4 if ON_GPU else 1e-6
needs_host_errors = pytest.mark.skipif(
    ON_GPU, reason="an index out of range ends a process's use of its GPU (device-side assert), in eager mode too"
)


def arange(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, ... in ``shape``."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=dtype).reshape(shape).to(device, copy=True)


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    bound = CLOSE if ON_GPU else 0.0
    for index, (mine, theirs) in enumerate(zip(got, wanted)):
        assert mine.device.type == DEVICE
        assert mine.stride() == theirs.stride() and mine.storage_offset() == theirs.storage_offset(), f"result {index}"
        told = functools.partial("result {}: {}".format, index)
        torch.testing.assert_close(mine.cpu(), theirs, rtol=bound, atol=bound, equal_nan=True, msg=told)


def here() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno
