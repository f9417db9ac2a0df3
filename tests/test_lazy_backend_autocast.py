"""Under autocast, attention in evaluation takes the path that CUDA's takes, though PyTorch's modules look for CUDA's alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazy_backend

DEVICE = "lazysched"
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = torch.ones(5, 5).triu(1).bool()
Made = tuple[Tensor | None, ...]


@pytest.fixture(autouse=True)
def fast_path_comes_back() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def evaluated(make: Callable[[], nn.Module], inputs: int, fast: bool, given: dict[str, Any]) -> Made:
    """What the module gives in bfloat16; ``fast``: where PyTorch's fast path is allowed."""
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(fast)
    model, x = make().eval().to(DEVICE), torch.randn(2, 5, 8).to(DEVICE)
    moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in given.items()}
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = model(*[x] * inputs, **moved)
    return out if isinstance(out, tuple) else (out,)


def check(make: Callable[[], nn.Module], inputs: int, given: dict[str, Any]) -> Made:
    ours, other = (evaluated(make, inputs, fast, given) for fast in (True, False))
    for one, two in zip(ours, other, strict=True):
        assert (one is None) is (two is None)
        if one is not None and two is not None:
            assert one.dtype is two.dtype and one.stride() == two.stride()
            torch.testing.assert_close(one.cpu(), two.cpu(), rtol=0, atol=0)
    return ours


@pytest.mark.parametrize("given", [
    {}, {"need_weights": False}, {"average_attn_weights": False}, {"key_padding_mask": PADDING}, {"attn_mask": CAUSAL},
    {"attn_mask": CAUSAL, "key_padding_mask": PADDING, "need_weights": False},
    {"attn_mask": CAUSAL.expand(4, 5, 5), "need_weights": False},
], ids=lambda given: "-".join(given) or "plain")  # fmt: skip
def test_multi_head_attention(given: dict[str, Any]) -> None:
    out, weights = check(lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3, given)
    assert out is not None and out.dtype is torch.bfloat16 and (weights is None) is (given.get("need_weights") is False)


@pytest.mark.parametrize("given", [{}, {"src_mask": CAUSAL}, {"src_key_padding_mask": PADDING}], ids="-".join)
@pytest.mark.parametrize("how", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_an_encoder_layer(how: dict[str, Any], given: dict[str, Any]) -> None:
    (out,) = check(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **how), 1, given)
    assert out is not None and out.dtype is torch.float32, "a norm's result"


def test_products_are_in_the_lower_precision() -> None:
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().to(DEVICE), torch.randn(2, 5, 8).to(DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        text = lazy_backend.debug.text([model(x)])
    products = [line for line in text.splitlines() if "aten::addmm" in line or "aten::mm" in line or "aten::linear" in line]
    assert len(products) >= 4 and all("bf16" in line or "bfloat16" in line for line in products), text
    with torch.no_grad():
        assert "_transformer_encoder_layer_fwd" in lazy_backend.debug.text([model(x)]) or torch.__version__ < "2.12"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_padded_batch_becomes_a_nested_tensor_as_without_autocast() -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    (ours,), (other,) = (evaluated(make, 1, fast, {"src_key_padding_mask": PADDING}) for fast in (True, False))
    assert ours is not None and other is not None
    torch.testing.assert_close(ours.cpu()[~PADDING], other.cpu()[~PADDING], rtol=0.02, atol=0.02)
