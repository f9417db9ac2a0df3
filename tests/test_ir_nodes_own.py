"""Ops that PyTorch does not have: what they give, and that any engine can call them."""

from __future__ import annotations

import pytest
import torch

from ir_nodes import ops
from ir_nodes.own import DROPPED, PACKED, UNPACKED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_what_dropout_has_given_follows_from_its_mask(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(300).to(dtype)
    out, mask = torch.native_dropout(x, p, True)
    again = ops.overload(DROPPED)(x, mask, p)
    assert again.dtype is dtype and torch.equal(again == 0, out == 0)
    torch.testing.assert_close(again, out)  # a CPU's dropout rounds otherwise than a GPU's


def test_it_counts_as_pointwise_and_draws_nothing() -> None:
    assert ops.info(DROPPED).kind == "pointwise" and not ops.info(DROPPED).random
    with torch.device("meta"):
        assert ops.overload(DROPPED)(torch.empty(3, 4), torch.empty(3, 4, dtype=torch.bool), 0.1).shape == (3, 4)


@pytest.mark.parametrize("size, order", [((3, 16), (0, 1)), ((4, 2, 3), (2, 0, 1))])
def test_a_mask_is_what_its_bits_say(size: tuple[int, ...], order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mask = (torch.rand(size) < 0.5).permute(order)
    bits = ops.overload(PACKED)(mask)
    assert bits.dtype is torch.uint8 and bits.numel() * 8 == mask.numel()
    again = ops.overload(UNPACKED)(bits, list(mask.shape), list(mask.stride()))
    assert again.dtype is torch.bool and again.stride() == mask.stride() and torch.equal(again, mask)
    assert not ops.info(PACKED).random and not ops.info(UNPACKED).random
