"""Norms over groups of channels that lie side by side: sums for each channel, and one multiplication and addition an element."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record
from torch import Tensor

from codegen import grouped_channels
from codegen.fuse import plan


def images(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(len(size))) + 0.5
    return made.to(dtype).to(memory_format=torch.channels_last)


def norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    samples, channels = x.shape[:2]
    return torch.ops.aten.native_group_norm(x, weight, bias, samples, channels, x[0, 0].numel(), groups, 1e-5)


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_channels, "MANY", 1)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("size, groups", [((2, 8, 6, 5), 4), ((3, 24, 9, 7), 2), ((1, 64, 40, 40), 4), ((2, 6, 4, 4), 6)])
@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight and bias"])
def test_numbers_equal_eager(size: tuple[int, ...], groups: int, affine: str) -> None:
    x, weight, bias = images(*size), torch.randn(size[1]), torch.randn(size[1])
    given = [one if name in affine else None for name, one in (("weight", weight), ("bias", bias))]
    check(lambda x: norm(x, groups, *given), x, rtol=1e-4, atol=1e-4)
    _, mean, scale = norm(x, groups, *given)

    def backward(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> list[Tensor]:
        known, places = given[0] is not None, x[0, 0].numel()
        found = torch.ops.aten.native_group_norm_backward(grad, x, mean, scale, weight if known else None, size[0], size[1],
                                                          places, groups, [True, known, known])  # fmt: skip
        return [one for one in found if one is not None and one.numel()]

    check(backward, images(*size), x, mean, scale, weight, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("few_are_many")
def test_in_16_bits_with_what_lies_around() -> None:
    x, weight, bias = images(2, 64, 12, 12, dtype=torch.bfloat16), torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    made = check(lambda x, w, b: F.silu(norm(x, 8, w, b)[0]) + x, x, weight, bias, rtol=3e-2, atol=3e-2, count=3)
    assert [step.kernel.name for step in kernels(made)][-1] == "pointwise_native_group_norm_silu_add"


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("channels, groups", [(128, 32), (256, 32), (96, 8)])
def test_elements_load_numbers_of_their_channel_in_vectors(channels: int, groups: int) -> None:
    """Of each group's they would load one for each element."""
    x, weight, bias = images(2, channels, 96, 96), torch.randn(channels), torch.randn(channels)

    def program(x: Tensor, w: Tensor, b: Tensor) -> Any:
        held = [one.detach().requires_grad_() for one in (x, w, b)]
        return torch.autograd.grad(norm(held[0], groups, held[1], held[2])[0].square().sum(), held)

    made = plan(record(program, x, weight, bias)[0].graph)
    (last,) = [step for step in kernels(made) if step.kernel.name == "pointwise_native_group_norm_backward"]
    body = last.kernel.source.split("@triton.jit\n")[-1]
    loads = re.findall(r"tl\.load\((.*)", body)
    assert len(loads) == 5 and not any("//" in load or "q" in load.split(",")[0] for load in loads), body


def test_few_elements_have_one_kernel() -> None:
    x = images(2, 16, 8, 8)
    assert len(kernels(plan(record(lambda x: norm(x, 4, None, None), x)[0].graph))) == 1
    many = images(2, 64, 130, 130)
    assert len(kernels(plan(record(lambda x: norm(x, 4, None, None), many)[0].graph))) > 2


def test_sums_for_each_channel_stay_apart_from_tables() -> None:
    """Numbers of each group of each image differ between results, channels, and along what is summed, images and pixels."""
    def program(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = ((x.view(4, 8, 16, 64, 64) - shift) * scale).view_as(x)
        return y, y.sum((0, 2, 3))

    tables = [torch.randn(4, 8, 1, 1, 1) for _ in range(2)]
    made = plan(record(program, images(4, 128, 64, 64), *tables)[0].graph)
    assert any("each element would load them anew" in refusal.reason for refusal in made.refusals)


@pytest.mark.usefixtures("few_are_many")
def test_what_is_summed_may_be_made_by_the_kernel_that_sums_it() -> None:
    x, bias, more = images(2, 16, 12, 10), torch.randn(16, 1, 1), torch.randn(2, 16, 1, 1)
    made = check(lambda x, b, m: norm(x + b + m, 4, None, None)[0].relu(), x, bias, more, rtol=1e-4, atol=1e-4)
    assert "add" in kernels(made)[0].kernel.name and "native_group_norm" in kernels(made)[0].kernel.name
    half = torch.randn(2, 8, 10, 12).transpose(2, 3)
    for program in (lambda x, y: norm(torch.cat([x, y], 1), 4, None, None),  # parts' places do not nest with groups'
                    lambda x, y: norm(torch.cat([y, x, y], 1), 2, None, None),
                    lambda x, y: norm((x.view(2, 2, 8, 12, 10) * y[:, None]).flatten(1, 2), 4, None, None),
                    lambda x, y: norm(x + y[:, :1], 16, None, None)):  # fmt: skip
        check(program, x, half, rtol=1e-4, atol=1e-4)
