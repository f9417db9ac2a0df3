"""Shows a tensor's memory to other libraries: NumPy, DLPack, CUDA's array interface. Imports torch and `lazy_backend.core` only.

The tensor is computed and its bytes on the physical device are handed out as they are. While somebody else holds them, ops on
the tensor run at once, so that both sides see each other's writes in the order of the program.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.dlpack

from lazy_backend import core


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Has it no bytes of its own? Fake tensors, those of `torch.func`, subclasses that hold others."""
    python = torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)
    return python or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_ours(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "lazysched" and tensor.layout is torch.strided and not is_wrapper(tensor)


def lent(tensor: torch.Tensor, for_ever: bool = False) -> torch.Tensor:
    """``tensor`` as one of the physical device, on the same memory.

    Whether it requires grad comes along, so that torch refuses what it refuses. ``for_ever``: for those who keep an address
    without holding a reference.
    """
    return core.get().lend(tensor.detach(), 2 if for_ever else 1).requires_grad_(tensor.requires_grad)


def _numpy(original: Any) -> Any:
    @functools.wraps(original)
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if not force and is_ours(self) and not core.physical_is_cuda():
            self = lent(self)
        return original(self, force=force)

    return numpy


def _array_wrap(original: Any) -> Any:
    """NumPy's functions of a tensor give a tensor; it comes back to the device."""

    @functools.wraps(original)
    def __array_wrap__(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.to(self.device) if is_ours(self) else result

    return __array_wrap__


def _dlpack(original: Any) -> Any:
    @functools.wraps(original)
    def export(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(lent(self) if is_ours(self) else self, *args, **kwargs)

    return export


def _dlpack_device(original: Any) -> Any:
    @functools.wraps(original)
    def __dlpack_device__(self: torch.Tensor) -> Any:
        return original(torch.empty(0, device=core.physical_device(self.device.index)) if is_ours(self) else self)

    return __dlpack_device__


def _array_interface(original: Any) -> property:
    def interface(self: torch.Tensor) -> dict[str, Any]:
        if is_ours(self) and core.physical_is_cuda():
            self = lent(self, for_ever=True)
        return original.fget(self)

    return property(interface, doc=original.__doc__)


def _storage_item(original: Any) -> Any:
    @functools.wraps(original)
    def __getitem__(self: torch.UntypedStorage, index: Any) -> Any:
        if isinstance(index, slice) and self.device.type == "lazysched":
            raise NotImplementedError("a storage of lazysched has no addresses inside it; slice a tensor of it instead")
        return original(self, index)

    return __getitem__


def _byteswap(original: Any) -> Any:
    @functools.wraps(original)
    def byteswap(self: torch.UntypedStorage, *args: Any) -> Any:
        if self.device.type == "lazysched":
            raise NotImplementedError("bytes of a storage are swapped in host memory only; call .cpu() first")
        return original(self, *args)

    return byteswap


def install() -> None:
    """Wrap torch's own functions once; tensors of other devices go through unchanged."""
    tensor, storage = torch.Tensor, torch.UntypedStorage
    if hasattr(tensor.numpy, "__wrapped__"):
        return
    tensor.numpy = _numpy(tensor.numpy)  # type: ignore[method-assign]
    tensor.__array_wrap__ = _array_wrap(tensor.__array_wrap__)  # type: ignore[method-assign]
    tensor.__dlpack__ = _dlpack(tensor.__dlpack__)  # type: ignore[method-assign]
    tensor.__dlpack_device__ = _dlpack_device(tensor.__dlpack_device__)  # type: ignore[method-assign]
    tensor.__cuda_array_interface__ = _array_interface(tensor.__cuda_array_interface__)  # type: ignore[assignment]
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = _dlpack(torch.utils.dlpack.to_dlpack)  # type: ignore[assignment]
    storage.__getitem__ = _storage_item(storage.__getitem__)  # type: ignore[method-assign]
    storage.byteswap = _byteswap(storage.byteswap)  # type: ignore[method-assign]
    storage._byteswap = _byteswap(storage._byteswap)  # type: ignore[method-assign]
