"""Attention takes the fused kernel that eager mode takes on the physical device: one node each way, the same numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazy_backend
from tests.conformance.eager import DEVICE, EAGER, outcome, same_error
from tests.conformance.features import filled, randn, same

CUDA = EAGER == "cuda"
HALF = torch.bfloat16
FUSED = {
    SDPBackend.FLASH_ATTENTION: "aten::_scaled_dot_product_flash_attention" + ("" if CUDA else "_for_cpu"),
    **({SDPBackend.EFFICIENT_ATTENTION: "aten::_scaled_dot_product_efficient_attention"} if CUDA else {}),
    **({SDPBackend.CUDNN_ATTENTION: "aten::_scaled_dot_product_cudnn_attention"} if CUDA else {}),
}
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "boolean mask": {"attn_mask": torch.arange(64).reshape(8, 8) % 3 > 0},
    "float mask": {"attn_mask": torch.arange(64).reshape(8, 8) / 64},
}


def operands(device: str, dtype: torch.dtype, width: int = 16, heads: int = 4) -> list[Tensor]:
    shapes = [(2, 4, 8, width), (2, heads, 8, width), (2, heads, 8, width)]
    return [randn(device, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def on(device: str, kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``kwargs`` with its mask on ``device``."""
    mask = kwargs.get("attn_mask")
    if mask is None:
        return kwargs
    return {**kwargs, "attn_mask": (mask if mask.dtype is torch.bool else mask.to(dtype)).to(device)}


def nodes(tensors: list[Tensor]) -> list[str]:
    """Targets of what is recorded for ``tensors``."""
    lines = lazy_backend.debug.text(tensors).splitlines()
    return [line.partition(" = ")[2].partition("(")[0] for line in lines if " = aten::" in line]


def attention_nodes(tensors: list[Tensor]) -> list[str]:
    return [node for node in nodes(tensors) if "attention" in node or "bmm" in node or "softmax" in node]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_numbers(name: str, dtype: torch.dtype) -> None:
    def attend(device: str) -> Any:
        qkv = operands(device, dtype)
        out = F.scaled_dot_product_attention(*qkv, **on(device, MASKS[name], dtype))
        out.float().square().sum().backward()
        return [out, *(x.grad for x in qkv)]

    same(attend)


@pytest.mark.parametrize("width", [16, 20], ids=lambda width: f"width {width}")
@pytest.mark.parametrize("backend", FUSED, ids=str)
def test_a_fused_kernel_is_one_node_each_way(backend: SDPBackend, width: int) -> None:
    if backend is SDPBackend.CUDNN_ATTENTION and width % 8:
        pytest.skip("cuDNN takes widths that are multiples of 8")

    def attend(device: str) -> Any:
        qkv = operands(device, HALF, width)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*qkv, is_causal=True)
            out.float().square().sum().backward()
        if device == DEVICE:
            assert attention_nodes([x.grad for x in qkv]) == [FUSED[backend], backward_of(backend)]
        return [out, *(x.grad for x in qkv)]

    refused = outcome(lambda: attend(EAGER))
    if isinstance(refused, RuntimeError):  # a width that the kernel is not made for, on some GPUs
        assert same_error(outcome(lambda: attend(DEVICE)), refused)
    else:
        same(attend)


def backward_of(backend: SDPBackend) -> str:
    name = FUSED[backend]
    return f"{name}_backward"


def test_the_math_path_on_demand_only() -> None:
    qkv = operands(DEVICE, torch.float32)
    assert len(attention_nodes([F.scaled_dot_product_attention(*qkv)])) == 1
    with sdpa_kernel(SDPBackend.MATH):
        assert "aten::bmm.out" in nodes([F.scaled_dot_product_attention(*qkv)])


CALLS: dict[str, Any] = {
    "float32": lambda d: (operands(d, torch.float32), {}),
    "float64": lambda d: (operands(d, torch.float64), {}),
    "half": lambda d: (operands(d, HALF), {}),
    "causal": lambda d: (operands(d, HALF), {"is_causal": True}),
    "dropout": lambda d: (operands(d, HALF), {"dropout_p": 0.5}),
    "grouped": lambda d: (operands(d, HALF, heads=2), {"enable_gqa": True}),
    "a mask": lambda d: (operands(d, HALF), {"attn_mask": torch.ones(8, 8, dtype=HALF, device=d)}),
    "width 20": lambda d: (operands(d, HALF, 20), {}),
    "three dimensions": lambda d: ([x[0] for x in operands(d, HALF)], {}),
    "no gradient": lambda d: ([x.detach() for x in operands(d, HALF)], {}),
    "expanded": lambda d: ([x[:1].expand(2, -1, -1, -1) for x in operands(d, HALF)], {}),
    "transposed": lambda d: ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands(d, HALF)], {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_choice_is_that_of_the_physical_device(name: str) -> None:
    choices = [torch._fused_sdp_choice(*args, **kwargs) for args, kwargs in (CALLS[name](device) for device in (DEVICE, EAGER))]
    assert choices[0] == choices[1]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_gives_eagers_numbers(name: str) -> None:
    def attend(device: str) -> Tensor:
        args, kwargs = CALLS[name](device)
        return F.scaled_dot_product_attention(*args, **kwargs)

    same(attend)


@pytest.mark.skipif(CUDA, reason="a GPU has this kernel")
def test_a_backend_that_is_not_there_is_refused() -> None:
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError, match="No viable"):
        warnings.simplefilter("ignore")
        F.scaled_dot_product_attention(*operands(DEVICE, torch.float32))


@pytest.mark.parametrize("wrong", ["dtypes", "dimensions"])
def test_operands_that_do_not_fit_are_refused_in_eagers_words(wrong: str) -> None:
    words = []
    for device in (DEVICE, EAGER):
        q, k, v = operands(device, torch.float32)
        q, k = (q, k.double()) if wrong == "dtypes" else (q[0, 0, 0], k)
        with pytest.raises(RuntimeError) as error:
            F.scaled_dot_product_attention(q, k, v)
        words.append(str(error.value).splitlines()[0])
    assert words[0] == words[1]


def test_operands_of_two_devices_are_refused() -> None:
    q, k, v = operands(DEVICE, torch.float32)
    with pytest.raises(RuntimeError, match="same device"):
        F.scaled_dot_product_attention(q, k.cpu(), v)


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("given", [{}, {"need_weights": False}, {"key_padding_mask": PADDING},
                                   {"attn_mask": torch.ones(5, 5).triu(1).bool(), "need_weights": False}], ids=str)
def test_multi_head_attention(given: dict[str, Any], training: bool) -> None:
    def attend(device: str) -> Any:
        layer = filled(nn.MultiheadAttention(8, 2, batch_first=True)).to(device).train(training)
        x = randn(device, 2, 5, 8)
        moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
        with torch.inference_mode(not training):
            out = list(layer(x, x, x, **moved))
        if device == DEVICE and not training:
            assert "aten::_native_multi_head_attention" in nodes(out[:1])
        return out

    same(attend)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
def test_encoders(padded: bool, training: bool) -> None:
    """Of a padded batch, evaluation makes a nested tensor, which runs at once."""

    def encode(device: str) -> Tensor:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
        model = filled(nn.TransformerEncoder(layer, 2)).to(device).train(training)
        mask = PADDING.to(device) if padded else None
        with torch.inference_mode(not training):
            out = model(randn(device, 2, 5, 8), src_key_padding_mask=mask)
        layer_has_meta = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_transformer_encoder_layer_fwd", "Meta")
        if device == DEVICE and not training and not padded and layer_has_meta:  # torch 2.11 has none, so it runs at once
            assert nodes([out]).count("aten::_transformer_encoder_layer_fwd") == 2
        return out

    same(encode)


def test_a_whole_transformer() -> None:
    def translate(device: str) -> Tensor:
        model = filled(nn.Transformer(8, 2, 1, 1, 16, batch_first=True, dropout=0)).to(device)
        ahead = nn.Transformer.generate_square_subsequent_mask(3, device=device)
        return model(randn(device, 2, 5, 8), randn(device, 2, 3, 8), tgt_mask=ahead, tgt_is_causal=True)

    same(translate)
