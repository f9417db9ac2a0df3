"""What reductions and scans combine with, and what leaves a number as it is. Imports torch only."""

from __future__ import annotations

import torch

COMBINE = {
    "add": "{0} + {1}",
    "mul": "{0} * {1}",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "logaddexp": "_logaddexp({0}, {1})",
}


def identity(how: str, dtype: torch.dtype) -> str:
    """What combining with changes nothing."""
    if how == "add":
        return "0.0" if dtype.is_floating_point else "0"
    if how == "mul":
        return "1.0" if dtype.is_floating_point else "1"
    if dtype.is_floating_point:
        return 'float("-inf")' if how in ("max", "logaddexp") else 'float("inf")'
    info = torch.iinfo(dtype)
    return str(info.min if how == "max" else info.max)
