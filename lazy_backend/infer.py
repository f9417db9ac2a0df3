"""Infers what an op gives, once for each (op, layouts, constants). Imports torch, `ir_nodes.ops` and `lazy_backend.schema`.

Meta kernels say shapes and dtypes. Where they are written in Python they may be wrong about strides, and some say nothing of
dtypes that the real kernel refuses: then the physical kernel is asked too, on zeros. The core remembers every answer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable

import torch

from ir_nodes import ops
from lazy_backend import core, schema

Tensor = torch.Tensor
Answer = tuple[str, list[Any], list[tuple[int, Tensor]]]
"""Why the op cannot be recorded ("": it can); its returns, tensors on Meta; written arguments that take another layout."""

# Beside pointwise ops: those that refuse some dtypes only when they run.
_CHECKED_BY_RUNNING = frozenset("mm bmm addmm baddbmm addbmm addmv dot _softmax _log_softmax mean nll_loss_forward".split())
# Their kernels for the CPU give `out` other strides than they found.
_RESTRIDES = ("replication_pad", "reflection_pad")
MOST_BYTES = 1 << 26
"""Ops on more bytes are not tried on zeros: Meta's word has to do, and where it is wrong the result is copied."""


@dataclass(frozen=True, slots=True)
class Doubts:
    """What Meta is not trusted with. ``dtypes``: the real kernel refuses some; ``layouts``: it may give others."""

    dtypes: bool
    layouts: bool


@functools.cache
def doubts(target: str) -> Doubts:
    base = ops.split(target)[1]
    pointwise = torch.Tag.pointwise in schema.tags_of(target)
    if schema.is_random(target):
        return Doubts(False, False)
    makes = any(item.alias_info is None for item in ops.schema(target).returns)
    layouts = not pointwise and (base.startswith(_RESTRIDES) or (makes and not shares_meta(target)))
    return Doubts(pointwise or base in _CHECKED_BY_RUNNING, layouts)


def shares_meta(target: str) -> bool:
    """Has ``target`` a Meta kernel in C++? Then it is the shape function of its other kernels, or made of such."""
    found = [line for line in torch._C._dispatch_dump(target).splitlines() if line.startswith("Meta:")]
    return bool(found) and ".cpp" in found[0]


def infer(target: str, args: tuple[Any, ...], metas: tuple[Any, ...], device: torch.device) -> Answer:
    """``args`` are the op's arguments in schema order, ``metas`` the same with tensors on Meta; ``device`` is the physical one.

    The core calls it below autograd and autocast. What eager mode would refuse is a reason not to record: run at once, the
    physical kernel then says it in its own words.
    """
    given = metas
    try:
        returns = call(target, metas)
    except Exception:
        return "its result's shape cannot be inferred without running it (no Meta kernel, or one that refuses this call)", [], []
    doubt = doubts(target)
    try:
        if doubt.dtypes:
            call(target, map_tensors(args, lambda t: zeros_like(t, device, [min(n, 1) for n in t.shape])))
        if doubt.layouts and bytes_of(args) <= MOST_BYTES:
            given = map_tensors(args, lambda t: zeros_like(t, device, t.shape))
            returns = call(target, given)
    except torch.OutOfMemoryError:  # the device is full now: Meta's word has to do
        given = metas
    except Exception:
        return "it fails for zeros, so that it has to see the values", [], []
    return "", [to_meta(item) for item in returns], relaid(target, args, given)


def call(target: str, args: tuple[Any, ...]) -> list[Any]:
    """The op's returns. ``args`` in schema order."""
    specs = ops.schema(target).arguments
    named = {spec.name: arg for spec, arg in zip(specs, args) if spec.kwarg_only}
    result = ops.overload(target)(*(arg for spec, arg in zip(specs, args) if not spec.kwarg_only), **named)
    count = len(ops.schema(target).returns)
    return [result] if count == 1 else list(result or ())


def map_tensors(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``make(tensor)`` for each of the device's tensors, and its device for theirs."""
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, make) for item in value)
    if isinstance(value, Tensor) and value.device.type == "lazysched":
        return make(value)
    if isinstance(value, torch.Generator):
        return None
    return value


def zeros_like(tensor: Tensor, device: torch.device, size: Any) -> Tensor:
    """Zeros of ``size`` on ``device``, with the strides of ``tensor``."""
    strides = tensor.stride()
    count = 0 if 0 in size else 1 + sum((n - 1) * stride for n, stride in zip(size, strides))
    made = torch.zeros(count, dtype=tensor.dtype, device=device).as_strided(size, strides)
    made = torch._conj(made) if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def bytes_of(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(bytes_of(item) for item in value)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def to_meta(value: Any) -> Any:
    """A result with its layout on Meta."""
    if isinstance(value, (tuple, list)):
        return type(value)(to_meta(item) for item in value)
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    made = torch._conj(made) if value.is_conj() else made
    return torch._neg_view(made) if value.is_neg() else made


def relaid(target: str, args: tuple[Any, ...], given: tuple[Any, ...]) -> list[tuple[int, Tensor]]:
    """Written arguments whose layout the op changed, with the new one."""
    found = []
    for index, (before, after) in enumerate(zip(args, given)):
        if not isinstance(before, Tensor) or ops.written_mode(target, index) == "r":
            continue
        if before.shape != after.shape:
            found.append((index, resized(target, given, after)))
        elif before.stride() != after.stride():  # kernels for the CPU may do that
            found.append((index, to_meta(after)))
    return found


def resized(target: str, given: tuple[Any, ...], out: Tensor) -> Tensor:
    """Meta kernels in Python resize an output to contiguous strides; a pointwise op gives it those of its first operand."""
    if torch.Tag.pointwise in schema.tags_of(target):
        for index, operand in enumerate(given):
            if isinstance(operand, Tensor) and ops.written_mode(target, index) == "r" and operand.shape == out.shape:
                return torch.empty_like(operand, device="meta")
    return to_meta(out)


def install(native: ModuleType) -> None:
    native.set_inferrer(infer)


core.at_start(install)
