"""What a function returned, and how a replay of it gives that, for `replaying`. Imports torch only."""

from __future__ import annotations

import gc
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device, torch.layout)


class Refused(Exception):
    """Why a function's calls cannot be recorded again."""


def home(tensor: Tensor) -> int:
    """Where the tensor's memory is known to the core."""
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class Returned:
    """A tensor that the function returned: in memory that it made (``buffer`` of ``nbytes`` bytes), or in that of tensor argument
    ``place``."""

    buffer: int
    nbytes: int
    place: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, memory: Tensor) -> Tensor:
        if memory.dtype is self.dtype:
            return memory.as_strided(self.size, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor that was there before, or with a ``layout`` a view of it. Not kept alive: who replaces it is to be noticed."""

    tensor: weakref.ref[Tensor]
    address: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None

    @staticmethod
    def of(one: Tensor) -> Found:
        base = one._base
        if base is None:
            return Found(weakref.ref(one), home(one), None)
        if base.dtype is not one.dtype:
            raise Refused("it returns a view of other dtype; return tensor.clone()")
        return Found(weakref.ref(base), home(one), (tuple(one.shape), one.stride(), one.storage_offset()))

    def again(self) -> Tensor:
        tensor = self.tensor()
        if tensor is None:
            raise Refused("a tensor that it returned is gone")
        return tensor if self.layout is None else tensor.as_strided(*self.layout)


@dataclass(frozen=True, slots=True)
class Constant:
    """An object that every call returns."""

    value: Any


Leaf = Returned | Found | Constant | int  # the number of a tensor argument that came back


def same_leaf(old: Leaf, new: Leaf) -> bool:
    if isinstance(old, Found) and isinstance(new, Found):
        return (old.address, old.layout) == (new.address, new.layout)
    if not (isinstance(old, Constant) and isinstance(new, Constant)):
        return old == new
    a, b = old.value, new.value
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and repr(a) == repr(b))


def kept_elsewhere(out: Any) -> set[int]:
    """Homes of tensors in ``out``, what a function returned, that something else holds, too. Asked by who holds only ``out``,
    behind a call `uncollected`: looking through all objects would take half a second."""
    gc.collect(0)  # what only circles hold is nobody's
    nodes: list[Any] = []
    leaves = pytree.tree_leaves(out, is_leaf=lambda node: nodes.append(node) is not None)
    groups: dict[int, list[Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type == "lazysched":
            groups.setdefault(home(leaf), []).append(leaf)
    ends = {id(leaf) for leaf in leaves}
    allowed = {id(leaves), id(nodes)}
    for node in nodes:  # the tuples, dicts and so on on the way to the leaves
        if id(node) not in ends:
            allowed |= {id(node), id(getattr(node, "__dict__", None))}
    return {address for address, group in groups.items() if held_by_others(group, allowed)}


def held_by_others(group: list[Tensor], allowed: set[int]) -> bool:
    """Does anything but what is ``allowed`` hold the memory that these tensors share?"""
    bases = {id(one._base): one._base for one in group if one._base is not None}
    storage = group[0].untyped_storage()
    if torch._C._storage_Use_Count(storage._cdata) > len({*map(id, group), *bases}) + 1:  # one for what Python shows of it
        return True
    allowed = allowed | {id(group), id(bases)}
    holders = gc.get_referrers(*group, *bases.values())
    return any(id(holder) not in allowed for holder in holders if not isinstance(holder, types.FrameType))
