"""Exponentials of long rows in 16 bits as a multiply-add and a power of two: numbers, however large, and which kernels do so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import check, kernels, record
from long_rows import inputs, loss, softmax
from torch import Tensor

from codegen.fuse import plan
from codegen.tuning import HOPPER
from ir_nodes import settings

FEW = replace(HOPPER, few=2, programs=2)
SCALED = "tl.exp2(tl.fma("
LOWEST = torch.finfo(torch.bfloat16).min


def source(program: object, x: Tensor, target: Tensor, disable: str = "long_norms") -> str:
    recording, _ = record(program, x, target)  # type: ignore[arg-type]
    with settings.override(disable=disable):
        return "\n".join(step.kernel.source for step in kernels(plan(recording.graph, tuning=FEW)))


@pytest.mark.parametrize("extent", [36_001, 50_264])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", [loss, softmax])
def test_elements_in_16_bits_take_a_multiply_add(program: object, dtype: torch.dtype, extent: int) -> None:
    x, target = inputs(extent, dtype)
    text = source(program, x, target)
    sums = [line for line in text.splitlines() if "_each = " in line or "_each += " in line]
    assert sums and all(SCALED in line for line in sums) and text.count(SCALED) > len(sums)  # and for results
    assert SCALED not in source(program, x, target, "long_norms,scaled_exponentials")


def test_elements_in_32_bits_do_not() -> None:
    """The next smaller number may be near a large one, and its exponential is not zero."""
    x, target = inputs(50_264, torch.float32)
    assert SCALED not in source(loss, x, target) + source(softmax, x, target)


def extreme(dtype: torch.dtype) -> Tensor:
    """Rows near and beyond where products with log2(e) overflow, or are rounded by more than 1."""
    extent = 36_001
    x = torch.randn(12, extent, generator=torch.Generator().manual_seed(5)) * 3
    x[0] *= 40
    x[1] -= 2e4
    x[2] += 3e4
    x[3] = -6e4
    x[4, : extent // 2] = float("-inf")
    if dtype is torch.bfloat16:
        x[5] = LOWEST
        x[6] = LOWEST
        x[6, extent // 3] = 5.0
        x[7] *= 1e30
        x[8] *= 2.0 ** 20
        x[9] = x[9].abs() * -(2.0 ** 20)
        x[10] = -(2.0 ** 20)
        x[10, : extent // 2] += 2.0 ** 13
        x[11] = 3e38
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", [loss, softmax])
def test_large_numbers(program: object, dtype: torch.dtype) -> None:
    x = extreme(dtype)
    target = x.float().argmax(1)  # where the loss is small, and shows what was lost
    with settings.override(disable="long_norms"):
        tolerance = 1.6e-2 if dtype is torch.bfloat16 else 2e-3
        check(program, x, target, tuning=FEW, rtol=tolerance, atol=1e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [0, 1, 2, 4, 9])
def test_large_numbers_lose_nothing_that_32_bits_show(row: int) -> None:
    """A loss is a number of 32 bits, which a common factor of all powers would shift."""
    x = extreme(torch.bfloat16)[row].expand(3, -1).contiguous()
    program = lambda x, target: loss(x, target)[0]  # noqa: E731
    assert SCALED in source(loss, x, torch.full((3,), 5_000))
    check(program, x, torch.full((3,), 12_345), tuning=FEW, rtol=2e-6, atol=0)
    check(program, x, x[0].float().argmax().expand(3), tuning=FEW, rtol=2e-6, atol=2e-7)
