"""Layouts as chains of functional views, each with its inverse, so that a compiler can look through them. Imports torch and
`ir_nodes.layout` only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ir_nodes.layout import Layout

_aten = torch.ops.aten


class NotAView(ValueError):
    """A layout that no chain of views reaches. The text says why."""


@dataclass(frozen=True, slots=True)
class Permute:
    dims: tuple[int, ...]

    def read(self, x: Tensor) -> Tensor:
        return _aten.permute.default(x, self.dims)

    def write(self, old: Tensor, new: Tensor) -> Tensor:
        return _aten.permute.default(new, sorted(range(len(self.dims)), key=self.dims.__getitem__))


@dataclass(frozen=True, slots=True)
class Reshape:
    """A row-major tensor with other dimensions."""

    size: tuple[int, ...]

    def read(self, x: Tensor) -> Tensor:
        return _aten.reshape.default(x, self.size)

    def write(self, old: Tensor, new: Tensor) -> Tensor:
        return _aten.reshape.default(new, old.shape)


@dataclass(frozen=True, slots=True)
class Narrow:
    dim: int
    start: int
    end: int

    def read(self, x: Tensor) -> Tensor:
        return _aten.slice.Tensor(x, self.dim, self.start, self.end)

    def write(self, old: Tensor, new: Tensor) -> Tensor:
        return _aten.slice_scatter.default(old, new, self.dim, self.start, self.end)


@dataclass(frozen=True, slots=True)
class Expand:
    """Dimensions of extent 1 made longer: read only."""

    size: tuple[int, ...]

    def read(self, x: Tensor) -> Tensor:
        return _aten.expand.default(x, self.size)

    def write(self, old: Tensor, new: Tensor) -> Tensor:
        raise NotAView("a write to elements that share memory")


@dataclass(frozen=True, slots=True)
class Bits:
    """The same bytes as another dtype of that width."""

    dtype: torch.dtype

    def read(self, x: Tensor) -> Tensor:
        return _aten.view.dtype(x, self.dtype)

    def write(self, old: Tensor, new: Tensor) -> Tensor:
        return _aten.view.dtype(new, old.dtype)


View = Permute | Reshape | Narrow | Expand | Bits


def whole(layout: Layout, nbytes: int) -> Layout:
    """The layout in which a buffer of ``nbytes`` is held, of which ``layout`` was seen: itself where it covers the buffer."""
    if layout.covers(nbytes) and not layout.flipped:
        return layout
    if nbytes % layout.itemsize:
        raise NotAView("a buffer that its dtype does not divide")
    return Layout.contiguous(layout.dtype, (nbytes // layout.itemsize,))


def chain(held: Layout, wanted: Layout) -> list[View]:
    """How a tensor held as ``held``, which covers its buffer, is seen as ``wanted``. Raises NotAView."""
    if wanted.flipped:
        raise NotAView("a conjugate or negative view")
    if wanted.dtype.itemsize != held.dtype.itemsize:
        raise NotAView(f"bytes of {held.dtype} seen as {wanted.dtype}")
    bits: list[View] = [] if wanted.dtype is held.dtype else [Bits(wanted.dtype)]
    if (held.size, held.stride, held.offset) == (wanted.size, wanted.stride, wanted.offset):
        return bits
    if wanted.numel == 0:
        flat = [*_row_major(held), Reshape((held.numel,)), Narrow(0, 0, 0), Reshape(wanted.size)]
        return bits + flat
    return bits + _tidy(held, [*_row_major(held), *_from_row_major(held.numel, wanted)])


def _row_major(held: Layout) -> list[View]:
    """To dimensions in the order of memory."""
    order = tuple(sorted(range(len(held.size)), key=lambda dim: -held.stride[dim]))
    return [Permute(order)] if order != tuple(range(len(order))) else []


def _from_row_major(numel: int, wanted: Layout) -> list[View]:
    """``wanted`` out of ``numel`` elements in a row: split at its strides, cut out, put in order, repeat."""
    dims = [dim for dim in range(len(wanted.size)) if wanted.size[dim] != 1 and wanted.stride[dim] != 0]
    dims.sort(key=lambda dim: (-wanted.stride[dim], wanted.size[dim]))
    strides = [wanted.stride[dim] for dim in dims]
    outer = [numel, *strides]
    if any(big % small for big, small in zip(outer, outer[1:])):
        raise NotAView(f"strides {list(wanted.stride)} that do not divide one another")
    factors = [big // small for big, small in zip(outer, [*strides, 1])]  # the last: what lies below the smallest stride
    starts, rest = [], wanted.offset
    for stride in [*strides, 1]:
        starts.append(rest // stride)
        rest %= stride
    extents = [*(wanted.size[dim] for dim in dims), 1]
    if any(start + extent > factor for start, extent, factor in zip(starts, extents, factors)):
        raise NotAView("a window that wraps around a row")
    views: list[View] = [Reshape(tuple(factors))]
    for position, (start, extent, factor) in enumerate(zip(starts, extents, factors)):
        if extent != factor:
            views.append(Narrow(position, start, start + extent))
    views.append(Reshape(tuple(extents[:-1])))
    kept = sorted(dims)
    views.append(Permute(tuple(dims.index(dim) for dim in kept)))
    ones = tuple(wanted.size[dim] if dim in dims else 1 for dim in range(len(wanted.size)))
    views.append(Reshape(ones))
    if ones != wanted.size:
        views.append(Expand(wanted.size))
    return views


def _tidy(held: Layout, views: list[View]) -> list[View]:
    """Without steps that change nothing."""
    size = held.size
    kept: list[View] = []
    for view in views:
        after = shape_after(view, size)
        in_order = isinstance(view, Permute) and view.dims == tuple(sorted(view.dims))
        if after != size or not (in_order or isinstance(view, (Reshape, Expand))):
            if kept and isinstance(view, Reshape) and isinstance(kept[-1], Reshape):
                kept.pop()
            kept.append(view)
        size = after
    return kept


def shape_after(view: View, size: tuple[int, ...]) -> tuple[int, ...]:
    match view:
        case Permute(dims):
            return tuple(size[dim] for dim in dims)
        case Reshape(new) | Expand(new):
            return new
        case Narrow(dim, start, end):
            return (*size[:dim], end - start, *size[dim + 1 :])
        case Bits():
            return size


def read(views: list[View], x: Tensor) -> Tensor:
    for view in views:
        x = view.read(x)
    return x


def write(views: list[View], old: Tensor, new: Tensor) -> Tensor:
    """``old`` with what ``views`` see of it replaced by ``new``. Raises NotAView."""
    if not views:
        return new
    return views[0].write(old, write(views[1:], views[0].read(old), new))
