"""What the tests of the device share. Imports torch only."""

from __future__ import annotations

import sys

import torch

DEVICE = "lazysched"


def arange(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, ... in ``shape``."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=dtype).reshape(shape).to(device, copy=True)


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for index, (mine, theirs) in enumerate(zip(got, wanted)):
        assert mine.device.type == DEVICE
        assert mine.stride() == theirs.stride() and mine.storage_offset() == theirs.storage_offset(), f"result {index}"
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0, equal_nan=True, msg=lambda m, i=index: f"result {i}: {m}")


def here() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno
