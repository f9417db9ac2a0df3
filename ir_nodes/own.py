"""Ops that passes put in the place of recorded ones and PyTorch does not have, defined for it, so that any engine can run them.
Imports torch and `ir_nodes.ops` only."""

from __future__ import annotations

import torch
from torch import Tensor

from ir_nodes import ops

_LIBRARY = torch.library.Library(ops.OWN, "FRAGMENT")


def _dropped(input: Tensor, mask: Tensor, p: float) -> Tensor:
    held = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    keep = torch.tensor(1 - p, dtype=held, device=input.device)
    scale = torch.where(keep == 0, torch.zeros_like(keep), 1 / keep)
    return (input.to(held) * mask * scale).to(input.dtype)


def _define(name: str, signature: str, function: object) -> str:
    _LIBRARY.define(name + signature)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return f"{ops.OWN}::{name}"


DROPPED = _define("native_dropout_dropped", "(Tensor input, Tensor mask, float p) -> Tensor", _dropped)
"""What `native_dropout` in training has given, bit for bit, computed again from its mask."""
