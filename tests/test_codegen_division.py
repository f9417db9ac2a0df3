"""Indices are divided by what kernels are given without dividing."""

from __future__ import annotations

import pytest
import torch
from graphs import check, kernels, record
from hypothesis import given, settings
from hypothesis import strategies as some

from codegen.division import reciprocal
from codegen.fuse import plan
from codegen.kernel import Kernel

LARGEST = 2**31 - 1


@given(some.integers(2, LARGEST), some.integers(0, LARGEST), some.integers(0, LARGEST))
@settings(max_examples=3000, deadline=None)
def test_a_product_and_a_shift_divide_as_a_division_does(extent: int, index: int, multiple: int) -> None:
    factor, shift = reciprocal(extent)
    near = multiple // extent * extent
    assert factor < 2**32 and 0 <= shift < 32
    for one in (index, near, max(near - 1, 0), min(near + extent - 1, LARGEST), LARGEST):
        assert one * factor >> (32 + shift) == one // extent


def kernel_of(*size: int) -> Kernel:
    """One that divides by the inner dimensions of ``size``."""
    recording, _ = record(lambda x, y: x + y, torch.randn(size), torch.randn(size[0], *(1 for _ in size[1:-1]), size[-1]))
    (step,) = kernels(plan(recording.graph))
    return step.kernel


def picked(*size: int) -> str:
    """Its source."""
    return kernel_of(*size).source.split("@triton.jit\n")[-1]


def test_small_extents_are_numbers_multiples_of_16_are_divided_by_and_others_multiplied_with() -> None:
    assert "% 3" in picked(40, 3, 5) and "// 3" in picked(40, 3, 5) and "_quotient" not in picked(40, 3, 5)
    assert "% d1" in picked(40, 48, 5) and "_quotient" not in picked(40, 48, 5)
    assert "tl.max_contiguous(tl.multiple_of(i1 - q2 * d2, 4), 4)" in picked(40, 3, 12), "neighbours are told to be neighbours"
    assert "_quotient(q2, d1_factor, d1_shift)" in picked(40, 49, 5) and picked(40, 49, 5) == picked(40, 50, 5)


def test_a_factor_that_16_divides_selects_no_kernel() -> None:
    found = next(extent for extent in range(50, 200) if extent % 16 and reciprocal(extent)[0] % 16 == 0)
    assert kernel_of(40, 49, 5) == kernel_of(40, found, 5)


@pytest.mark.parametrize("size", [(40, 9, 5), (7, 12, 10), (30, 49, 3), (3, 1000, 2), (11, 255, 13), (2, 17, 31)], ids=str)
def test_elements_stay_where_they_are(size: tuple[int, int, int]) -> None:
    x, y, z = torch.randn(size), torch.randn(size[0], 1, size[2]), torch.randn(size[::-1])
    check(lambda x, y, z: [x + y, x.permute(1, 0, 2).contiguous() * 2, x - z.permute(2, 1, 0)], x, y, z)
    check(lambda x: [x.sum(0), x.flip(1).sum(2), x.flip(2)], x)


def test_operands_that_run_on_through_several_dimensions_have_one_place_in_these() -> None:
    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x[:, :, :, None].expand(-1, -1, -1, 2) + y[:, :4] + z[:, 1:]

    inputs = torch.randn(8, 4, 9), torch.randn(8, 6, 9, 2), torch.randn(8, 5, 9, 2)
    made = check(program, *inputs, count=1)
    assert "r1 * " not in kernels(made)[0].kernel.source and "+ r1" in kernels(made)[0].kernel.source
