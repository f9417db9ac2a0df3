"""Ops of the device that are asked for too seldom to be native. Imports torch and `lazy_backend.core` only."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Sequence

import torch

from lazy_backend import core

Tensor = torch.Tensor
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002  (the schema's names)
    """CUDA counts integers too, and libraries choose this op for every device but the CPU."""
    as_it_is = core.physical_is_cuda() or self.dtype not in INTEGERS
    cast = self.dtype if as_it_is else torch.float64
    counts = torch.empty(bins, dtype=cast, device=self.device)
    return torch.histc(self.to(cast), bins, min, max, out=counts).to(self.dtype)


def record_stream(self: Tensor, s: torch.Stream) -> None:
    if core.physical_is_cuda():
        physical = core.get().lend(self, False)
        physical.record_stream(torch.Stream(stream_id=s.stream_id, device_index=s.device_index,
                                            device_type=int(torch._C._autograd.DeviceType.CUDA)))  # fmt: skip


def efficient_zeros(size: Sequence[int], **like: Any) -> Tensor:
    """A ZeroTensor has no storage; the device gives it one that holds zeros."""
    return torch.zeros(size, **like)


def copy_from_and_resize(self: Tensor, dst: Tensor) -> Tensor:
    return dst.resize_(self.shape).copy_(self)


def set_nothing(self: Tensor) -> Tensor:
    return self.set_(torch.empty(0, dtype=self.dtype, device=self.device).untyped_storage(), 0, (0,), (1,))


def stack_out(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> Tensor:
    """PyTorch's form for devices that it does not know joins without stacking."""
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim, out=out)


def range_out(start: float, end: float, *, out: Tensor) -> Tensor:
    """PyTorch's form for devices that it does not know leaves the step to chance."""
    return torch.ops.aten.range.out(start, end, 1, out=out)


def reshape_from_tensor(self: Tensor, shape: Tensor) -> Tensor:
    """PyTorch reads ``shape`` as if it were in host memory."""
    return self.reshape(shape.tolist())


_library: list[torch.library.Library] = []  # a registration lasts as long as its library


def install(_: ModuleType) -> None:
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (("histc", histc), ("record_stream", record_stream), ("_efficientzerotensor", efficient_zeros),
                         ("_copy_from_and_resize", copy_from_and_resize), ("set_", set_nothing), ("_stack.out", stack_out),
                         ("range.out_", range_out), ("_reshape_from_tensor", reshape_from_tensor)):  # fmt: skip
        library.impl(name, kernel, "PrivateUse1")
    library.impl("_reshape_from_tensor", reshape_from_tensor, "AutogradPrivateUse1")
    _library.append(library)


core.at_start(install)
