"""Keeps a Parameter's identity when a module moves to or from the device. Imports torch and `lazy_backend.core` only.

`nn.Module.to` gives a parameter new contents in place only between devices on PyTorch's own list. For PrivateUse1 it makes a
new Parameter at each place that holds one, so tied weights come apart without an error, and an optimizer made before keeps
the old ones. Here the function that `_apply` maps over parameters fills the old Parameter itself, as for CUDA.
"""

from __future__ import annotations

import functools
from typing import Callable

import torch
from torch import nn

from lazy_backend import core

Convert = Callable[[torch.Tensor], torch.Tensor]
_KNOWN = ("cpu", "cuda", "lazysched")


class _Keeping:
    """``fn`` for `Module._apply`, which moves a parameter or gradient by changing its contents."""

    def __init__(self, fn: Convert) -> None:
        self.fn = fn
        self.kept: set[int] = set()  # ids of the module's parameters and gradients; buffers are replaced, as for CUDA

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self.fn(tensor)
        if id(tensor) not in self.kept or not crosses(tensor, moved):
            return moved
        core.get().set_data(tensor, moved)
        return tensor.data  # and not detach(), which an UninitializedParameter refuses


def crosses(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Is ``new`` a plain tensor on the other side of the device's border from ``old``?"""
    kinds = (old.device.type, new.device.type)
    plain = type(new) in (torch.Tensor, nn.Parameter) and new.layout is torch.strided is old.layout
    return plain and kinds[0] != kinds[1] and "lazysched" in kinds and set(kinds) <= set(_KNOWN)


def keep_parameters() -> None:
    """Wrap `nn.Module._apply` once. Moves that do not touch the device go through unchanged."""
    original = nn.Module._apply
    if hasattr(original, "_lazysched"):
        return

    @functools.wraps(original)
    def _apply(self: nn.Module, fn: Convert, recurse: bool = True) -> nn.Module:
        if torch.__future__.get_swap_module_params_on_conversion():
            return original(self, fn, recurse)
        keeping = fn if isinstance(fn, _Keeping) else _Keeping(fn)
        for parameter in self._parameters.values():
            if parameter is not None:
                keeping.kept.add(id(parameter))
                if parameter.grad is not None:
                    keeping.kept.add(id(parameter.grad))
        return original(self, keeping, recurse)

    _apply._lazysched = True  # type: ignore[attr-defined]
    nn.Module._apply = _apply  # type: ignore[method-assign]
