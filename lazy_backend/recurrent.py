"""Recurrent layers on a GPU: cuDNN's kernels over whole layers, as eager mode has them. Imports torch and `lazy_backend.core`.

For devices that it does not know PyTorch computes cell by cell, several ops for each step in time. Between layers eager mode lets
cuDNN drop elements by a state of its own; here it computes a layer at a time, and what drops between them is drawn from the
device's generator, like all dropout.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Sequence

import torch
import torch.nn.functional as F

from lazy_backend import core

Tensor = torch.Tensor

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""Of cudnnRNNMode_t, by the names of PyTorch's ops."""
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_library: list[torch.library.Library] = []  # a registration lasts as long as its library


def by_cudnn(x: Tensor) -> bool:
    """Would eager mode on CUDA leave this input to cuDNN?"""
    return torch.backends.cudnn.enabled and torch.backends.cudnn.is_available() and x.dtype in _DTYPES and x.numel() > 0


def layers(mode: str, x: Tensor, batch_sizes: Sequence[int], hx: Tensor, cx: Tensor | None, params: Sequence[Tensor],
           biases: bool, number: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool
           ) -> tuple[Tensor, ...]:  # fmt: skip
    """The last layer's outputs and all layers' last states. ``batch_sizes``: of packed sequences, else empty."""
    hidden = hx if cx is None else cx
    projected = hx.size(2) if hidden.size(2) != hx.size(2) else 0
    of_layer = (4 if biases else 2) + (projected > 0)
    directions = 2 if bidirectional else 1

    def run(x: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
        many, start = count * directions, first * directions
        states = [None if state is None else state.narrow(0, start, many) for state in (hx, cx)] if count < number else [hx, cx]
        weights = params[start * of_layer : (start + many) * of_layer]
        out, *last, _, _ = torch.ops.aten._cudnn_rnn(x, weights, of_layer, None, *states, MODES[mode], hidden.size(2), projected,
                                                     count, batch_first, 0.0, train, bidirectional, batch_sizes, None)
        return out, *last

    if not (train and dropout > 0 and number > 1):
        out, hy, cy = run(x, 0, number)
        return (out, hy) if cx is None else (out, hy, cy)
    found = []
    for layer in range(number):
        out, *last = run(x, layer, 1)
        found.append(last[: 1 if cx is None else 2])
        x = F.dropout(out, dropout) if layer < number - 1 else out
    return x, *(torch.cat(states) for states in zip(*found))


class Layer:
    """One of PyTorch's four ops of recurrent layers, over padded or over packed sequences."""

    def __init__(self, mode: str) -> None:
        self.mode, self.op = mode, getattr(torch.ops.aten, mode)

    def states(self, hx: Any) -> tuple[Tensor, Tensor | None]:
        if self.mode != "lstm":
            return hx, None
        if len(hx) != 2:
            raise RuntimeError("lstm expects two hidden states")
        return hx[0], hx[1]

    def padded(self, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
               train: bool, bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:  # fmt: skip
        rest = (params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        if not by_cudnn(input):
            return self.op.input.decompose(input, hx, *rest)  # type: ignore[no-any-return]
        return layers(self.mode, input, (), *self.states(hx), *rest)

    def packed(self, data: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int,
               dropout: float, train: bool, bidirectional: bool) -> tuple[Tensor, ...]:  # fmt: skip
        rest = (params, has_biases, num_layers, dropout, train, bidirectional)
        if not by_cudnn(data):
            return self.op.data.decompose(data, batch_sizes, hx, *rest)  # type: ignore[no-any-return]
        return layers(self.mode, data, batch_sizes.tolist(), *self.states(hx), *rest, batch_first=False)


def cast(input: Tensor, weight: Sequence[Tensor], weight_stride0: int, weight_buf: Tensor | None, hx: Tensor, cx: Tensor | None,
         *rest: Any) -> tuple[Tensor, ...]:  # fmt: skip
    """As CUDA's autocast does it: in float16, whichever type autocast is for."""

    def half(x: Tensor | None) -> Tensor | None:
        return x.half() if x is not None and x.is_floating_point() and x.dtype is not torch.float64 else x

    with torch.autocast("lazysched", enabled=False):
        return torch.ops.aten._cudnn_rnn(  # type: ignore[no-any-return]
            half(input), list(map(half, weight)), weight_stride0, half(weight_buf), half(hx), half(cx), *rest)  # fmt: skip


def register(library: torch.library.Library) -> None:
    """Layers of our device, as `lstm`, `gru` and the like find them, by cuDNN."""
    for mode in MODES:
        for name, kernel in (("input", Layer(mode).padded), ("data", Layer(mode).packed)):
            library.impl(f"{mode}.{name}", kernel, "AutogradPrivateUse1")
            library.impl(f"{mode}.{name}", kernel, "PrivateUse1")  # `torch.inference_mode` passes autograd's kernels by


def install(native: ModuleType) -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn", cast, "AutocastPrivateUse1")
    if core.physical_is_cuda():
        register(library)
    _library.append(library)


core.at_start(install)
