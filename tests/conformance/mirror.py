"""Copies what a test hands to the device onto its physical device, for the same call in eager mode. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Mirror:
    """Copies tensors to ``to``: with strides, offset and bits as they are, and sharing storages where the originals do.

    Tensors that are not on ``only`` stay where they are, copied too. Copies are leaves of autograd.
    """

    def __init__(self, only: torch.device | str, to: torch.device | str) -> None:
        self.only = torch.device(only)
        self.to = torch.device(to)
        self.storages: dict[int, torch.Tensor] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []  # so that no address is used twice

    def device(self, device: torch.device) -> torch.device:
        return self.to if device.type == self.only.type else device

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.tensors:
            self.kept.append(tensor)
            self.tensors[id(tensor)] = self.copy(tensor).requires_grad_(tensor.requires_grad)
        return self.tensors[id(tensor)]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        detached, to = tensor.detach(), self.device(tensor.device)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return detached.to(to) if to != tensor.device else detached.clone()
        key = tensor.untyped_storage()._cdata
        if key not in self.storages:
            self.storages[key] = storage_bytes(detached).to(to, copy=True)
        place = (self.storages[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        copied = torch.empty(0, dtype=tensor.dtype, device=to).set_(*place)
        copied = copied.conj() if tensor.is_conj() else copied
        return torch._neg_view(copied) if tensor.is_neg() else copied

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, torch.device):
            return self.device(value)
        if isinstance(value, str) and value.partition(":")[0] == self.only.type:
            return str(self.to)
        if isinstance(value, torch.Generator) and value.device.type == self.only.type:
            return torch.Generator(self.to).manual_seed(value.initial_seed())
        return value

    def all(self, tree: Any) -> Any:
        return map_leaves(self.value, tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    return pytree.tree_map(function, tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
