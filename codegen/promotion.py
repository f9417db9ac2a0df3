"""The dtype an elementwise op computes in, by torch's promotion rules. Imports torch and `codegen.eighths`."""

from __future__ import annotations

from typing import Iterable

import torch

from codegen.eighths import FLOAT8

_RANK = {torch.bool: 0, torch.uint8: 1, torch.int8: 1, torch.int16: 1, torch.int32: 1, torch.int64: 1}

COMPUTABLE = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)
"""Dtypes that kernels load and store; anything else is left to ATen."""

TRITON_TYPES = {
    torch.bool: "tl.int1", torch.uint8: "tl.uint8", torch.int8: "tl.int8", torch.int16: "tl.int16",
    torch.int32: "tl.int32", torch.int64: "tl.int64", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32", torch.float64: "tl.float64",
}

HALF = frozenset((torch.float16, torch.bfloat16))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a kernel holds a ``dtype`` element in: floats of 16 and 8 bits are widened."""
    return torch.float32 if dtype in HALF or dtype in FLOAT8 else dtype


def category(dtype: torch.dtype) -> int:
    """0 bool, 1 integer, 2 floating."""
    return _RANK.get(dtype, 2)


def common_dtype(tensors: Iterable[torch.dtype], scalars: Iterable[torch.dtype], numbers: Iterable[str]) -> torch.dtype:
    """The promoted dtype of an op over tensors with dimensions, 0-d tensors (``scalars``) and Python numbers' kinds.

    A lower class of operand widens the result only where its category is above that of every class before it.
    """
    kinds = {"bool": torch.bool, "int": torch.int64, "float": torch.get_default_dtype(), "double": torch.float64}
    classes = (list(tensors), list(scalars), [kinds[kind] for kind in numbers])
    result: torch.dtype | None = None
    for dtypes in classes:
        if not dtypes:
            continue
        joined = dtypes[0]
        for dtype in dtypes[1:]:
            joined = torch.promote_types(joined, dtype)
        if result is None or category(joined) > category(result):
            result = joined
    return torch.get_default_dtype() if result is None else result
