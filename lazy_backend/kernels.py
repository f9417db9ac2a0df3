"""Ops of the device that are asked for too seldom to be native. Imports torch and `lazy_backend.core` only."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Sequence

import torch

from lazy_backend import core

Tensor = torch.Tensor


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


def banned_from_autocast(*args: Any, **kwargs: Any) -> Tensor:
    """In CUDA's words."""
    raise RuntimeError("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
                       "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe.")


def plus(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(input: Tensor, hidden: Tensor, cx: Tensor, bias: Tensor | None = None, hidden_bias: Tensor | None = None
              ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Fused cells exist on CUDA only; on a CPU this is what eager mode computes there."""
    gates = (plus(input, bias) + plus(hidden, hidden_bias)).chunk(4, 1)
    cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh()
    return gates[3].sigmoid() * cy.tanh(), cy, torch.empty(0, dtype=cx.dtype, device=cx.device)


def gru_cell(input: Tensor, hidden: Tensor, hx: Tensor, bias: Tensor | None = None, hidden_bias: Tensor | None = None
             ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `lstm_cell`."""
    i, h = plus(input, bias).chunk(3, 1), plus(hidden, hidden_bias).chunk(3, 1)
    update, fresh = (h[1] + i[1]).sigmoid(), (i[2] + (h[0] + i[0]).sigmoid() * h[2]).tanh()
    return (hx - fresh) * update + fresh, torch.empty(0, dtype=hx.dtype, device=hx.device)


_library: list[torch.library.Library] = []  # a registration lasts as long as its library


def install(_: ModuleType) -> None:
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (("record_stream", record_stream), ("_efficientzerotensor", efficient_zeros),
                         ("_copy_from_and_resize", copy_from_and_resize), ("set_", set_nothing), ("_stack.out", stack_out),
                         ("range.out_", range_out), ("_reshape_from_tensor", reshape_from_tensor)):  # fmt: skip
        library.impl(name, kernel, "PrivateUse1")
    library.impl("_reshape_from_tensor", reshape_from_tensor, "AutogradPrivateUse1")
    if not core.physical_is_cuda():
        library.impl("_thnn_fused_lstm_cell", lstm_cell, "AutogradPrivateUse1")
        library.impl("_thnn_fused_gru_cell", gru_cell, "AutogradPrivateUse1")
    library.impl("binary_cross_entropy", banned_from_autocast, "AutocastPrivateUse1")
    _library.append(library)


core.at_start(install)
