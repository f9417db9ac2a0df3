"""Ops that stand in the place of recorded ones and PyTorch does not have, defined for it, so that any engine can run them.
Imports torch and `ir_nodes.ops` only."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ir_nodes import ops

_LIBRARY = torch.library.Library(ops.OWN, "DEF")

BITS = 8
"""Elements of a mask whose bits share a byte."""


def define(name: str, signature: str, function: Callable[..., Any]) -> str:
    """An op of our own that takes and gives what ``signature`` says, "(Tensor x) -> Tensor", as ``function`` computes it. Returns
    its name with its namespace."""
    _LIBRARY.define(name + signature)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return f"{ops.OWN}::{name}"


def of_the_core(name: str, signature: str) -> str:
    """An op that the native core has the kernels of, and records as it records PyTorch's. What it returns is like its first
    argument. Returns its name with its namespace."""
    _LIBRARY.define(name + signature)
    returns = not signature.endswith("()")
    _LIBRARY.impl(name, lambda first, *rest, generator=None: torch.empty_like(first) if returns else None, "Meta")
    return f"{ops.OWN}::{name}"


def _dropped(input: Tensor, mask: Tensor, p: float) -> Tensor:
    held = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    keep = torch.tensor(1 - p, dtype=held, device=input.device)
    scale = torch.where(keep == 0, torch.zeros_like(keep), 1 / keep)
    return (input.to(held) * mask * scale).to(input.dtype)


def _pack_bits(mask: Tensor) -> Tensor:
    weights = 1 << torch.arange(BITS, dtype=torch.uint8, device=mask.device)
    flat = mask.as_strided((mask.numel(),), (1,))
    return (flat.view(-1, BITS).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)


def _unpack_bits(bits: Tensor, size: list[int], stride: list[int]) -> Tensor:
    places = torch.arange(BITS, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> places) & 1).bool().view(-1).as_strided(size, stride)


DROPPED = define("native_dropout_dropped", "(Tensor input, Tensor mask, float p) -> Tensor", _dropped)
"""What `native_dropout` in training has given, bit for bit, computed again from its mask."""

PACKED = define("pack_bits", "(Tensor mask) -> Tensor", _pack_bits)
"""A dense mask as bits, in the order in which it lies in memory: element 8 i + j as the j-th bit of the i-th uint8."""

UNPACKED = define("unpack_bits", "(Tensor bits, int[] size, int[] stride) -> Tensor", _unpack_bits)
"""The mask that `PACKED` made ``bits`` of."""

RNG_STATE = of_the_core("rng_state", "(Tensor like, *, Generator? generator=None) -> Tensor")
"""A generator's state as it lies in host memory, with the layout of ``like``; without a generator the default one's of the device
of ``like``."""

SET_RNG_STATE = of_the_core("set_rng_state", "(Tensor state, Tensor like, *, Generator? generator=None) -> ()")
"""The generator goes on from ``state``."""
