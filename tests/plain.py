"""Tensors of any layout as lists and numbers, and how near two of them have to be. Imports torch and pytest only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.device import CLOSE, ON_GPU


def plain(value: Any) -> Any:
    """What a test can compare: lists, numbers, layouts."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.is_nested:
        return [plain(item) for item in value.unbind()]
    kind = (str(value.dtype), str(value.layout))
    if value.is_quantized:
        return [*kind, value.dequantize().cpu().tolist()]
    return [*kind, (value if value.layout is torch.strided else value.to_dense()).resolve_conj().cpu().tolist()]


def agree(mine: Any, theirs: Any) -> bool:
    """To the last bit on a CPU; a GPU's fused kernels round otherwise than eager mode's."""
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(agree, mine, theirs))
    if ON_GPU and isinstance(mine, (float, complex)):
        return bool(mine == pytest.approx(theirs, rel=CLOSE, abs=CLOSE, nan_ok=True))
    return bool(mine == theirs)
