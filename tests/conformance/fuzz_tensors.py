"""Tensors in pairs for the fuzzer: one on the physical device, which says what is right, and its twin on lazysched. Imports
torch and `lazy_backend` only."""

from __future__ import annotations

import random
from typing import Any, Callable, NamedTuple

import torch
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from lazy_backend import core

DEVICE = "lazysched"
REFERENCE = "cuda" if core.physical_is_cuda() else "cpu"
Tensor = torch.Tensor


class Pair(NamedTuple):
    """The same tensor twice."""

    ref: Tensor
    lazy: Tensor

    def map(self, view: Callable[[Tensor], Tensor]) -> Pair:
        return Pair(view(self.ref), view(self.lazy))

    def shares(self, other: Pair) -> bool:
        return storage(self.ref) == storage(other.ref)


class Different(AssertionError):
    """lazysched gave something else than the physical device."""


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def twin(tensor: Tensor) -> Pair:
    """A pair with the values, layout and whole storage of ``tensor``, sharing nothing with it."""
    plain = tensor.detach()
    if plain.is_conj():
        return twin(plain.conj()).map(torch.conj)
    if plain.is_neg():
        return twin(torch._neg_view(plain)).map(torch._neg_view)
    whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage()).clone()
    base = Pair(whole.to(REFERENCE), whole.to(DEVICE, copy=True))
    return base.map(lambda t: t.as_strided(plain.shape, plain.stride(), plain.storage_offset()))


# ---- layouts: other ways to hold the same values, and overlapping ones that change them -------------------------------------


def relaid(pair: Pair, rng: random.Random, apart: bool = False) -> Pair:
    """``pair`` with another layout in memory of its own. Unless ``apart``, it may repeat elements, which changes the values."""
    return rng.choice(_APART if apart else _LAYOUTS)(pair, rng)


def is_apart(tensor: Tensor) -> bool:
    """Has each element a place of its own?"""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _permuted(pair: Pair, rng: random.Random) -> Pair:
    order = list(range(pair.ref.dim()))
    rng.shuffle(order)
    back = [order.index(d) for d in range(len(order))]
    return pair.map(lambda t: t.permute(order).clone(memory_format=torch.contiguous_format).permute(back))


def _strided(pair: Pair, rng: random.Random) -> Pair:
    if not pair.ref.dim():
        return _offset(pair, rng)
    d = rng.randrange(pair.ref.dim())
    place = (slice(None),) * d + (slice(rng.randrange(2), None, 2),)
    size = list(pair.ref.shape)
    size[d] *= 2

    def make(t: Tensor) -> Tensor:
        base = torch.zeros(size, dtype=t.dtype, device=t.device)
        base[place].copy_(t)
        return base[place]

    return pair.map(make)


def _offset(pair: Pair, rng: random.Random) -> Pair:
    before, n = rng.randrange(1, 8), pair.ref.numel()

    def make(t: Tensor) -> Tensor:
        base = torch.ones(before + n + 3, dtype=t.dtype, device=t.device)
        base[before : before + n].copy_(t.reshape(-1))
        return base[before : before + n].view(t.shape)

    return pair.map(make)


def _expanded(pair: Pair, rng: random.Random) -> Pair:
    wide = [d for d, n in enumerate(pair.ref.shape) if n > 1]
    if not wide or not pair.ref.dtype.is_floating_point:
        return _permuted(pair, rng)
    d = rng.choice(wide)
    return pair.map(lambda t: t.narrow(d, 0, 1).clone().expand(t.shape))


def _overlapping(pair: Pair, rng: random.Random) -> Pair:
    if pair.ref.dim() < 2 or not pair.ref.numel() or not pair.ref.dtype.is_floating_point:
        return _offset(pair, rng)
    size = pair.ref.shape
    return pair.map(lambda t: t.reshape(-1).clone().as_strided(size, [1] * len(size)))


_APART = (_permuted, _permuted, _strided, _strided, _offset)
_LAYOUTS = (*_APART, _expanded, _overlapping)


# ---- views of what there is -------------------------------------------------------------------------------------------------


def a_view(pair: Pair, rng: random.Random) -> Pair:
    """A random view of ``pair``. Raises what torch raises where there is no such view."""
    t = pair.ref
    if not t.dim():
        return pair.map(rng.choice((lambda x: x.reshape(1), lambda x: x.expand(3), lambda x: x.detach())))
    d, e = rng.randrange(t.dim()), rng.randrange(t.dim())
    n = t.shape[d]
    start = rng.randrange(n + 1)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(d, e), lambda x: x.narrow(d, start, n - start), lambda x: x.reshape(-1), lambda x: x.unsqueeze(d),
        lambda x: x[(slice(None),) * d + (slice(None, None, 2),)], lambda x: x.movedim(d, e), lambda x: x.detach(),
        lambda x: x.unsqueeze(0).expand(2, *x.shape), lambda x: x.squeeze(d), lambda x: x.chunk(2, d)[-1], lambda x: x.conj(),
        lambda x: x.view(-1), lambda x: x.flatten(), lambda x: x.unflatten(d, (1, n)), lambda x: x.T if x.dim() == 2 else x.mT,
    ]  # fmt: skip
    if n:
        views += [lambda x: x.select(d, start % n), lambda x: x.unfold(d, min(2, n), 1)]
    if t.dim() > 1 and d != e:
        views += [lambda x: x.diagonal(0, d, e)]
    if t.is_complex():
        views += [torch.view_as_real, lambda x: x.real, lambda x: x.imag]
    elif t.dtype is torch.float32:
        views += [lambda x: x.view(torch.int32).view(torch.float32), lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2)))]
    return pair.map(rng.choice(views))


# ---- comparing ------------------------------------------------------------------------------------------------------------


def flat(value: Any) -> list[Any]:
    return pytree.tree_leaves(value)


def same_outside(pair: Pair, name: str) -> None:
    """Do both look alike without their values being read? Runs nothing."""
    for what in ("dtype", "shape", "requires_grad", "is_leaf", "layout"):
        mine, wanted = getattr(pair.lazy, what), getattr(pair.ref, what)
        if mine != wanted:
            raise Different(f"{name}: {what} is {mine}, not {wanted}")
    mine_at, wanted_at = ((t.stride(), t.storage_offset()) if t.numel() else None for t in (pair.lazy, pair.ref))
    if mine_at != wanted_at:
        raise Different(f"{name}: stride and offset of {list(pair.ref.shape)} are {mine_at}, not {wanted_at}")


def same_values(pair: Pair, name: str, exact: bool = True) -> None:
    """Equal, bit by bit but for NaNs; on a GPU, whose kernels we replace, or if not ``exact``, within the dtype's tolerance."""
    mine = pair.lazy.detach().resolve_conj().resolve_neg().cpu()
    wanted = pair.ref.detach().resolve_conj().resolve_neg().cpu()
    close = {"rtol": 0, "atol": 0} if exact and REFERENCE == "cpu" else {}
    try:
        assert_close(mine, wanted, equal_nan=True, check_stride=False, **close)
    except AssertionError as error:
        raise Different(f"{name}: {error}") from None


def same_sharing(pairs: list[Pair]) -> None:
    """Do the same pairs share a storage on both devices?"""
    ours: dict[int, int] = {}
    for pair in pairs:
        mine = storage(pair.lazy)
        if ours.setdefault(storage(pair.ref), mine) != mine:
            raise Different(f"two tensors share a storage on {REFERENCE} but not here: {list(pair.ref.shape)}")
    if len(set(ours.values())) != len(ours):
        raise Different(f"two tensors share a storage here but not on {REFERENCE}")
