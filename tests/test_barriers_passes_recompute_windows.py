"""Copies of cheap ops for what kernels compute for parts of what they make."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_barriers_passes_recompute import check, copies, made, trained


def gated(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, value = (x @ up).chunk(2, -1)
    return ((F.silu(gate) * value) @ down).square().sum()


def test_the_gate_of_a_gated_layer_is_not_kept() -> None:
    """Both halves' gradients are one concatenation, whose kernel computes the gate again from what it reads anyway."""
    before, after = check(trained(gated), *made((32, 48), (48, 128), (64, 48)))
    assert after.kernels <= before.kernels
    assert after.moved <= before.moved - 2 * 32 * 64 * 4
    assert after.peak <= before.peak


def test_what_is_read_elsewhere_or_too_dear_is_kept() -> None:
    def seen(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, value = (x @ up).chunk(2, -1)
        gate = (gate @ torch.eye(64)).softmax(-1)
        return ((gate * value) @ down).square().sum()

    assert "silu" in copies(trained(gated), *made((32, 48), (48, 128), (64, 48)))
    assert "_softmax" not in copies(trained(seen), *made((32, 48), (48, 128), (64, 48)))
    check(trained(seen), *made((32, 48), (48, 128), (64, 48)))


@pytest.mark.parametrize("steps", [(2, 1), (2, 2)])
def test_merged_patches_and_padded_rows(steps: tuple[int, int]) -> None:
    def merged(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.gelu(x)[:: steps[0], :: steps[1]]
        return (F.pad(y * y.sigmoid(), (1, 2)) @ torch.ones(y.shape[-1] + 3, 4) @ w).square().sum()

    check(trained(merged), *made((32, 64), (4, 4)))


def test_what_is_made_of_another_kernels_copies_is_computed_again_too() -> None:
    """Differences of all rows with all others, whose gradient one kernel sums along one dimension, another along the other."""
    def apart(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return (x[:, None] - codes[None]).pow(2).sum(-1).softmax(-1).square().sum()

    _, after = check(trained(apart), *made((64, 16), (24, 16)))
    assert after.largest < 64 * 24 * 16 * 4
