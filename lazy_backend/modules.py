"""Lets a tensor take over another's contents across the device's border, as torch does between the devices that it knows.

Imports torch and `lazy_backend` parts below it. `nn.Module.to` fills the old Parameter (`parameter.data = moved`) where torch
says that the two are compatible, which it never does for PrivateUse1: it would make a new Parameter at each place that holds one,
so that tied weights come apart without an error and an optimizer made before keeps the old ones.
"""

from __future__ import annotations

import functools

import torch

from lazy_backend import core
from lazy_backend.interchange import is_wrapper

_DEVICES = ("cpu", "cuda", "lazysched")


def crosses(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Are both tensors of their own, one of them on the device and the other not?"""
    kinds = (old.device.type, new.device.type)
    if kinds[0] == kinds[1] or "lazysched" not in kinds or not set(kinds) <= set(_DEVICES):
        return False
    return new.layout is torch.strided is old.layout and not is_wrapper(old) and not is_wrapper(new)


def install() -> None:
    """Teach torch both halves once: that such contents are compatible, and how to hand them over."""
    compatible = torch._has_compatible_shallow_copy_type
    if hasattr(compatible, "__wrapped__"):
        return

    @functools.wraps(compatible)
    def _has_compatible_shallow_copy_type(old: torch.Tensor, new: torch.Tensor) -> bool:
        return compatible(old, new) or crosses(old, new)

    data = torch.Tensor.data

    def take(self: torch.Tensor, new: torch.Tensor) -> None:
        if isinstance(new, torch.Tensor) and crosses(self, new):
            core.get().set_data(self, new)
        else:
            data.__set__(self, new)

    torch._has_compatible_shallow_copy_type = _has_compatible_shallow_copy_type
    torch.Tensor.data = property(data.__get__, take, doc=data.__doc__)  # type: ignore[method-assign, assignment]
