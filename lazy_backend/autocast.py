"""What CUDA's autocast does and the lists that C++ offers to other devices (csrc/autocast.cpp) lack. Imports torch and
`lazy_backend.core` only.

A kernel here runs with autocast still on: what it calls is cast as if the user had called it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from lazy_backend import core

Tensor = torch.Tensor
PADDING = 1
"""The ``mask_type`` of a mask of keys for each sequence, (batch, keys); others are of a query and a key."""


def banned_from_autocast(*args: Any, **kwargs: Any) -> Tensor:
    """In CUDA's words."""
    raise RuntimeError("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
                       "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe.")


def square_root_in_float32(self: Tensor) -> Tensor:
    """CUDA's autocast list has it since PyTorch 2.15; the lists that C++ offers to other devices do not."""
    with torch.autocast("lazysched", enabled=False):
        return torch.ops.aten.linalg_matrix_sqrth(self.float() if self.dtype in (torch.float16, torch.bfloat16) else self)


def attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, out_weight: Tensor,
    out_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`aten::_native_multi_head_attention`, the fast path of ``nn.MultiheadAttention`` in evaluation, as its other path. The
    module takes the fast one, which autocast does not know, unless *CUDA's* autocast is on: a model would run in float32."""
    first = query.transpose(0, 1)
    second = first if key is query else key.transpose(0, 1)
    third = second if value is key else value.transpose(0, 1)
    padding = mask if mask_type == PADDING else None
    ahead = None if mask is None or mask_type == PADDING else mask.flatten(0, -3) if mask.dim() > 3 else mask
    out, weights = F.multi_head_attention_forward(
        first, second, third, width, heads, weight, bias, None, None, False, 0.0, out_weight, out_bias, training=False,
        key_padding_mask=padding, need_weights=need_weights, attn_mask=ahead, average_attn_weights=average_attn_weights)
    return out.transpose(0, 1), weights


def encoder_layer(
    src: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, use_gelu: bool,
    norm_first: bool, eps: float, norm_weight: Tensor, norm_bias: Tensor, second_norm_weight: Tensor, second_norm_bias: Tensor,
    inner_weight: Tensor, inner_bias: Tensor, outer_weight: Tensor, outer_bias: Tensor, mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`aten::_transformer_encoder_layer_fwd`, the fast path of ``nn.TransformerEncoderLayer``, likewise."""
    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x, width, heads, weight, bias, out_weight, out_bias, mask, False, True, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        inner = F.linear(x, inner_weight, inner_bias)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), outer_weight, outer_bias)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, eps)

    if norm_first:
        x = src + attend(norm(src, norm_weight, norm_bias))
        return x + feed(norm(x, second_norm_weight, second_norm_bias))
    x = norm(src + attend(src), norm_weight, norm_bias)
    return norm(x + feed(x), second_norm_weight, second_norm_bias)


def plain_where_nested(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, or for nested tensors, which it does not know, the op itself in the types that it is given."""

    def run(first: Tensor, *rest: Any, **named: Any) -> Any:
        if not first.is_nested:
            return kernel(first, *rest, **named)
        with torch.autocast("lazysched", enabled=False):
            return getattr(torch.ops.aten, name)(first, *rest, **named)

    return run


_library: list[torch.library.Library] = []  # a registration lasts as long as its library


def install(native: ModuleType) -> None:
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {"binary_cross_entropy": banned_from_autocast,
                                              "linalg_matrix_sqrth": square_root_in_float32}  # fmt: skip
    fast_paths = {"_native_multi_head_attention": attention, "_transformer_encoder_layer_fwd": encoder_layer}
    kernels |= {name: plain_where_nested(name, kernel) for name, kernel in fast_paths.items()}
    for name, kernel in kernels.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, kernel, "AutocastPrivateUse1")
    _library.append(library)


core.at_start(install)
