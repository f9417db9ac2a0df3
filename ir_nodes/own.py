"""Ops that stand in the place of recorded ones and PyTorch does not have, defined for it, so that any engine can run them.
Imports torch and `ir_nodes.ops` only."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ir_nodes import ops

_LIBRARY = torch.library.Library(ops.OWN, "DEF")


def define(name: str, signature: str, function: Callable[..., Any]) -> str:
    """An op of our own that takes and gives what ``signature`` says, "(Tensor x) -> Tensor", as ``function`` computes it. Returns
    its name with its namespace."""
    _LIBRARY.define(name + signature)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return f"{ops.OWN}::{name}"


def _dropped(input: Tensor, mask: Tensor, p: float) -> Tensor:
    held = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    keep = torch.tensor(1 - p, dtype=held, device=input.device)
    scale = torch.where(keep == 0, torch.zeros_like(keep), 1 / keep)
    return (input.to(held) * mask * scale).to(input.dtype)


DROPPED = define("native_dropout_dropped", "(Tensor input, Tensor mask, float p) -> Tensor", _dropped)
"""What `native_dropout` in training has given, bit for bit, computed again from its mask."""
