"""Windows' places: no more questions than their sizes leave open, one address for a row; and rows off boundaries."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record
from torch import Tensor

from codegen.fuse import plan
from codegen.kernel import KernelStep


def only(program: Callable[..., Any], *inputs: Tensor) -> KernelStep:
    (step,) = kernels(plan(record(program, *inputs)[0].graph))
    return step


def averages(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1)


def test_only_what_may_lie_outside_is_asked_about() -> None:
    source = only(averages, torch.zeros(4, 16, 56, 56)).kernel.source
    loads = [line for line in source.splitlines() if "tl.load" in line]
    assert len(loads) == 9 and sum(line.count(">= 0") for line in loads) == 6
    assert sum(line.split("mask=m1")[1].count(" < ") for line in loads) == 6
    assert sum(" + 1, " in line for line in loads) == sum(" + -1, " in line for line in loads) == 3
    inner = only(lambda x: F.avg_pool2d(x, 3, 2), torch.zeros(4, 16, 57, 57)).kernel.source
    assert inner.count("tl.load") == 9 and ">= 0" not in inner
    ceil = only(lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), torch.zeros(4, 16, 56, 56)).kernel.source
    assert ">= 0" not in ceil and " < s" in ceil


def test_every_size_has_one_source() -> None:
    """Those that the same power of two divides."""
    sources = {only(averages, torch.zeros(8, 64, side, side)).kernel.source for side in (56, 72, 88)}
    assert len(sources) == 1
    wide = {only(around, torch.zeros(8, 64, side, side)).kernel.source for side in (112, 96, 114)}
    assert len(wide) == 1


def test_threads_have_few_elements_whose_neighbours_they_read() -> None:
    def elements(program: Callable[..., Any], dtype: torch.dtype = torch.float32) -> float:
        step = only(program, torch.zeros(32, 64, 56, 56, dtype=dtype))
        return dict(step.kernel.constexprs)["B1"] / (32 * step.kernel.num_warps)

    assert elements(averages) == 2 and elements(averages, torch.bfloat16) == 4
    assert elements(lambda x: F.max_pool2d(x, 3, 2, 1), torch.bfloat16) == 2
    assert elements(lambda x: x.flip(3) + 1) == 8


@pytest.mark.parametrize("kernel, stride, padding, dilation, ceil", [
    (3, 1, 1, 1, False), (3, 2, 1, 1, False), (2, 2, 0, 1, False), (3, 2, 0, 1, True), (5, 1, 2, 1, False), (3, 3, 1, 2, True),
    ((2, 3), (1, 2), (1, 0), (2, 1), False), ((1, 4), (1, 9), (0, 2), 1, True)])  # fmt: skip
def test_windows_of_all_kinds(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> None:
    for shape in ((2, 3, 9, 11), (1, 2, 16, 16)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # some are equal
        check(lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True), x)
        if dilation == 1:
            check(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil), x)
            check(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, count_include_pad=False), x)


def around(x: Tensor) -> Tensor:
    inner = x[..., 1:-1, 1:-1] * 4
    return inner - x[..., :-2, 1:-1] - x[..., 2:, 1:-1] - x[..., 1:-1, :-2] - x[..., 1:-1, 2:]


def joined(*parts: Tensor) -> Tensor:
    """Each part moved by whole vectors, as gradients of merged patches' channels are."""
    places = (F.pad(part, (16 * index, 16 * (4 - index))) for index, part in enumerate(parts))
    return sum(places, start=torch.zeros(80))


def test_rows_off_boundaries_are_loaded_by_neighbouring_threads() -> None:
    x = torch.randn(2, 3, 34, 50)
    assert "i1 = tl.multiple_of(tl.arange(0, B1)[None, :], [1, 1])" in only(around, x).kernel.source
    check(around, x, count=1)
    check(around, torch.randn(3, 40, 1300).bfloat16(), count=1)  # several blocks for each row
    for program in (lambda x: x[..., 16:] * 2, lambda x: x[..., :16] + x[..., 16:32]):
        assert "tl.multiple_of" not in only(program, torch.randn(8, 32, 64)).kernel.source
    assert "tl.multiple_of" not in only(joined, *[torch.randn(40, 16, 16) for _ in range(4)]).kernel.source


def test_a_program_divides_by_no_number_of_blocks() -> None:
    one, several = (only(around, torch.zeros(4, 40, width)).kernel.source for width in (130, 3000))
    assert "across" not in one and "row = pid\n" in one
    assert "q_across = _quotient(pid, across_factor, across_shift)" in several and "pid //" not in several
