"""Elementwise parts that walk their elements in the order of what they read: kernel counts and numbers."""

from __future__ import annotations

import pytest
import torch
from graphs import check, kernels

from codegen.tuning import HOPPER, Tuning

SMALL = Tuning(pointwise_block=64, transpose_side=16, tile=64, persistent=16, looped=16)


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("tuning", [HOPPER, SMALL], ids=["hopper", "small"])
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_a_permuted_copy_of_what_was_computed_shares_its_kernel(order: tuple[int, ...], tuning: Tuning) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).permute(order).contiguous() + 1

    check(program, data(6, 20, 35), count=1, tuning=tuning)
    check(lambda x: ((x * 2).permute(order).contiguous(), x * 2), data(6, 20, 35, dtype=torch.bfloat16), tuning=tuning)


def test_heads_come_together_in_the_kernel_that_computed_them() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heads = x.transpose(1, 2) * y  # (batch, heads, tokens, features)
        return heads.transpose(1, 2).clone(memory_format=torch.contiguous_format).view(2, 9, 48).relu()

    check(program, data(2, 9, 3, 16), data(2, 3, 9, 16, seed=1), count=1)


def test_parts_that_read_in_two_orders_keep_theirs() -> None:
    made = check(lambda x: (x * 2) + (x + 1).t(), data(8, 8))
    assert len(kernels(made)) == 2
    check(lambda x, y: (x * 2).t() + (y + 1).t(), data(8, 5), data(8, 5, seed=1), count=1)


def test_a_partial_write_over_another_order_keeps_the_other_bytes() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.zeros(7, 5)
        out[:5] = (x * 2).t()
        twice = x + 1
        twice[1:3] = (x * 3).t()[:2]
        return [out, twice]

    check(program, data(5, 5))


def test_masks_and_triangles_turn_with_their_part() -> None:
    check(lambda x: (x * 2).t().tril().contiguous(), data(8, 8), count=1)
    check(lambda x, y: torch.cat([(x * 2).t(), y], 1).relu(), data(8, 6), data(6, 3))
