"""Gradients of products without a look at their numbers. Imports torch and `lazy_backend.core`.

ATen divides a product by each factor where no factor is zero, for which it reads whether one is: the recording would end in the
middle of every backward, and no step with a product could be replayed. Here both ways are ops, and each slice takes its own.
Where there is no zero, numbers are ATen's. Gradients of gradients, tangents and `torch.func` are left to ATen.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Callable

import torch

from lazy_backend import core

Tensor = torch.Tensor
Context = Any
Keys = torch._C.DispatchKeySet

_library: list[torch.library.Library] = []  # a registration lasts as long as its library
_OTHER = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)
_ABOVE = (torch._C.DispatchKey.AutocastPrivateUse1, torch._C.DispatchKey.AutogradFunctionality,
          torch._C.DispatchKey.ADInplaceOrView)  # fmt: skip


def _native(keys: Keys) -> Keys:
    """Of an op with these ``keys``, those behind which PyTorch's own kernel for autograd is found."""
    for key in _ABOVE:
        keys = keys.remove(key)
    return keys | _OTHER


def _below(op: Any, *args: Any) -> Tensor:
    """What ``op`` gives, without a gradient of its own."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _again(op: Any, x: Tensor, grad: Tensor, *args: Any) -> Tensor:
    """The gradient, as ATen's formula gives it, which has gradients of its own."""
    return torch.autograd.grad(op.redispatch(_native(torch._C._dispatch_keys(x)), x, *args), x, grad, create_graph=True)[0]


class Product(torch.autograd.Function):
    """``x.prod(dim, keepdim)``; no size is zero."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, dim: int, keepdim: bool) -> Tensor:
        result = _below(torch.ops.aten.prod.dim_int, x, dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x, result), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled():
            return _again(torch.ops.aten.prod.dim_int, x, grad, ctx.dim, ctx.keepdim), None, None
        if not ctx.keepdim:
            grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        zero = x == 0
        zeros = zero.sum(ctx.dim, keepdim=True)
        others = torch.where(zero, 1, x).prod(ctx.dim, keepdim=True)
        alone = torch.where(zero & (zeros == 1), others, 0)
        return grad * torch.where(zeros == 0, result / x, alone), None, None


class RunningProduct(torch.autograd.Function):
    """``x.cumprod(dim)``; no size is zero. In a slice, factors before the first zero have sums of what lies between, divided by
    themselves, the first zero has that of the products without it, and those behind have nothing."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, dim: int) -> Tensor:
        result = _below(torch.ops.aten.cumprod.default, x, dim)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        (x, result), (grad,), dim = ctx.saved_tensors, grads, ctx.dim
        if torch.is_grad_enabled():
            return _again(torch.ops.aten.cumprod.default, x, grad, dim), None
        zero = x == 0
        zeros = zero.cumsum(dim)
        before, first = zeros == 0, zero & (zeros == 1)
        later = torch.where(before, result * grad, 0).flip(dim).cumsum(dim).flip(dim) / x
        without = torch.where(zeros == 1, torch.where(first, 1, x).cumprod(dim) * grad, 0).sum(dim, keepdim=True)
        return torch.where(before, later, torch.where(first, without, 0)), None


def _plain(x: Tensor, dtype: torch.dtype | None) -> bool:
    """Is the first gradient wanted, and nothing else, of numbers that stay what they are?"""
    first = torch.is_grad_enabled() and x.requires_grad and x.is_floating_point() and dtype in (None, x.dtype)
    usual = torch._C._functorch.peek_interpreter_stack() is None and torch.autograd.forward_ad._current_level < 0
    return first and usual and x.dim() > 0 and x.numel() > 0


def prod(keys: Keys, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    if _plain(x, dtype):
        return Product.apply(x.reshape(-1), 0, False)
    return torch.ops.aten.prod.default.redispatch(_native(keys), x, dtype=dtype)


def prod_along(keys: Keys, x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if _plain(x, dtype):
        return Product.apply(x, dim, keepdim)
    return torch.ops.aten.prod.dim_int.redispatch(_native(keys), x, dim, keepdim, dtype=dtype)


def cumprod(keys: Keys, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if _plain(x, dtype):
        return RunningProduct.apply(x, dim)
    return torch.ops.aten.cumprod.default.redispatch(_native(keys), x, dim, dtype=dtype)


KERNELS: dict[str, Callable[..., Tensor]] = {"prod": prod, "prod.dim_int": prod_along, "cumprod": cumprod}


def install(_: ModuleType) -> None:
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "AutogradPrivateUse1", with_keyset=True)
    _library.append(library)


core.at_start(install)
