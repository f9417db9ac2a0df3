"""What all rows of a block share: loaded for each of them where a row's sum is made of it, else once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels

import lazy_backend  # noqa: F401  registers the device
from ir_nodes import settings

EACH = "tl.arange(0, B0)[:, None] * 0"


def data(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def loads(made: Any, kernel: int = 0) -> list[bool]:
    """Of each load of what all rows share, in the kernel's order: is it made for each row?"""
    source = kernels(made)[kernel].kernel.source
    lines = [line for line in source.splitlines() if "tl.load(" in line and "i0" not in line and "base" not in line]
    return [EACH in line for line in lines]


def test_a_bias_before_a_norm_is_loaded_for_each_row_and_the_norms_weight_once() -> None:
    def program(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x + bias, (x.shape[-1],), weight)

    given = data(300, 64), data(64, seed=1), data(64, seed=2)
    assert loads(check(program, *given, count=1, rtol=1e-5, atol=1e-5)) == [True, False]
    with settings.override(disable=frozenset({"shared_rows"})):
        assert loads(check(program, *given, count=1, rtol=1e-5, atol=1e-5)) == [False, False]


@pytest.mark.parametrize("length", [20, 64, 100, 130])
def test_masks_and_scales_that_rows_share(length: int) -> None:
    x, scale, mask = data(200, length), data(length, seed=1), data(length, seed=2) > 0
    made = check(lambda x, s, m: (x * s).masked_fill(m, -1e9).softmax(-1), x, scale, mask, count=1, rtol=1e-5, atol=1e-5)
    assert loads(made) == [length >= 64] * 2
    check(lambda x, s: (x * s[::2].repeat_interleave(2)).sum(-1), x, scale, rtol=1e-4, atol=1e-4)
    check(lambda x, s: (x * s.flip(0)).amax(-1), x, scale, rtol=1e-5, atol=1e-5)


def test_a_norms_gradient_walks_rows_with_its_weight() -> None:
    def program(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        _, mean, scale = torch.ops.aten.native_layer_norm(x, [64], weight, weight, 1e-5)
        return torch.ops.aten.native_layer_norm_backward(g, x, [64], mean, scale, weight, weight, [True, True, True])

    made = check(program, data(2048, 64), data(2048, 64, seed=1), data(64, seed=2), rtol=1e-4, atol=1e-3)
    (walking,) = [number for number, step in enumerate(kernels(made)) if "_acc" in step.kernel.source]
    assert loads(made, walking) == [True]


def test_one_row_at_a_time_loads_it_once() -> None:
    given = data(6, 3000), data(3000, seed=1)
    assert not any(loads(check(lambda x, s: (x * s).softmax(-1), *given, count=1, rtol=1e-5, atol=1e-5)))
