"""Ops of the device that are asked for too seldom to be native. Imports torch and `lazy_backend.core` only."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Callable, Sequence

import torch

from lazy_backend import core

Tensor = torch.Tensor


def record_stream(self: Tensor, s: torch.Stream) -> None:
    if core.physical_is_cuda():
        physical = core.get().lend(self, 0)
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


def lazy_clone(self: Tensor) -> Tensor:
    """Memory is shared by layouts here, not by pages."""
    return self.clone()


def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Libraries choose this op for every device but the CPU. CUDA counts integers too, and the CPU does not."""
    integral = not (self.is_floating_point() or self.is_complex() or self.dtype == torch.bool)
    values = self.double() if integral else self
    counts = torch.empty(bins, dtype=values.dtype, device=self.device)
    return torch.histc(values, bins, min, max, out=counts).to(self.dtype)


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """A CPU's dropout draws through bernoulli_, CUDA's through one fused op: each gives the numbers its eager form gives."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)


def group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
               cudnn_enabled: bool = True) -> Tensor:  # fmt: skip
    """PyTorch's form keeps channels last for devices that it does not know, which the kernel for CUDA does not take."""
    composite = torch.ops.aten.group_norm.default.decompose
    return composite(input.contiguous(), num_groups, weight, bias, eps, cudnn_enabled)


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


# Ops with a composite kernel that would fall apart before it reaches the device, or takes its memory for the CPU's.
WHOLE = (
    "native_layer_norm", "native_group_norm", "convolution", "convolution_backward", "binary_cross_entropy_with_logits",
    "silu_backward", "mish_backward", "native_channel_shuffle", "_convolution", "_grouped_mm", "_linalg_svd", "pixel_shuffle",
    "pixel_unshuffle", "addr", "addr_", "addr.out", "narrow_copy", "mode", "mode.values", "conj_physical_", "conj_physical.out",
    "_grid_sampler_2d_cpu_fallback", "_grid_sampler_2d_cpu_fallback_backward", "choose_qparams_optimized",
    "_saturate_weight_to_fp16", "all.dims_out", "any.dims_out",
)  # fmt: skip
WHOLE_FAMILIES = ("aten::_foreach_", "aten::_sobol_engine")
_library: list[torch.library.Library] = []  # a registration lasts as long as its library


def whole_ops() -> list[str]:
    families = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(WHOLE_FAMILIES)]
    return [*WHOLE, *(name.removeprefix("aten::") for name in families)]


def install(native: ModuleType) -> None:
    native.keep_whole(whole_ops())
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (("record_stream", record_stream), ("_efficientzerotensor", efficient_zeros),
                         ("_copy_from_and_resize", copy_from_and_resize), ("set_", set_nothing), ("_stack.out", stack_out),
                         ("range.out_", range_out), ("_lazy_clone", lazy_clone)):  # fmt: skip
        library.impl(name, kernel, "PrivateUse1")
    composite: dict[str, Callable[..., Any]] = {"_reshape_from_tensor": reshape_from_tensor}
    if core.physical_is_cuda():
        composite["group_norm"] = group_norm
    else:
        library.impl("histc", histc, "PrivateUse1")
        composite |= {"dropout": dropout, "_thnn_fused_lstm_cell": lstm_cell, "_thnn_fused_gru_cell": gru_cell}
    for name, kernel in composite.items():
        library.impl(name, kernel, "AutogradPrivateUse1")
        library.impl(name, kernel, "PrivateUse1")  # `torch.inference_mode` passes autograd's kernels by
    _library.append(library)


core.at_start(install)
