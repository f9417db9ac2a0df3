"""Short rows that are reduced: how many share a program, and with how many warps."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record
from torch import Tensor

from codegen.fuse import plan
from codegen.kernel import KernelStep
from codegen.strips import LEAST

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
LENGTHS = pytest.mark.parametrize("length", [3, 8, 21, 33, 65, 100, 197, 300, 500, 640])
MANY = 1 << 14


def data(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


PROGRAMS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, y: (x.sum(-1), (x.float() * y).sum(-1)),
    "extremes": lambda x, y: (x.amax(-1), x.argmax(-1), x.argmin(-1)),
    "softmax": lambda x, y: (x.softmax(-1), torch.ops.aten._softmax_backward_data(y, x, -1, x.dtype)),
    "norm": lambda x, y: (norm(x), norm(x + y), x + y),
    "running sum": lambda x, y: x.float().cumsum(-1),
}


@DTYPES
@LENGTHS
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows(length: int, name: str, dtype: torch.dtype) -> None:
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    check(PROGRAMS[name], data(37, length, dtype=dtype), data(37, length, dtype=dtype, seed=1), **near)


def launch(program: Callable[[Tensor], Tensor], length: int, dtype: torch.dtype) -> tuple[KernelStep, int]:
    """The program's kernel over many rows, and how many of them a program takes."""
    recording, _ = record(program, torch.zeros(MANY, length, dtype=dtype))
    (step,) = kernels(plan(recording.graph))
    return step, MANY // step.grid[0]


@DTYPES
@pytest.mark.parametrize("length", [33, 49, 65, 100])
def test_short_rows_off_boundaries_belong_to_single_warps(length: int, dtype: torch.dtype) -> None:
    for program in (lambda x: x.sum(-1), lambda x: x.softmax(-1), norm):
        step, rows = launch(program, length, dtype)
        assert step.kernel.num_warps == 1 and rows >= 4


@DTYPES
@pytest.mark.parametrize("length", [77, 100, 129, 200, 255])
def test_warps_share_rows_of_which_one_thing_is_made(length: int, dtype: torch.dtype) -> None:
    """They wait for one another once."""
    once, _ = launch(lambda x: x - x.mean(-1, keepdim=True), length, dtype)
    twice, _ = launch(norm, length, dtype)
    assert once.kernel.num_warps > 1 and (length == 255 or twice.kernel.num_warps == 1)


@DTYPES
def test_a_program_moves_enough_to_be_worth_its_start(dtype: torch.dtype) -> None:
    for length in (300, 384, 450, 500, 640, 768):
        _, rows = launch(lambda x: x.sum(-1), length, dtype)
        assert rows * length * dtype.itemsize >= LEAST * 2 // 3
        _, rows = launch(norm, length, dtype)
        assert rows * length * dtype.itemsize * 2 >= LEAST // 2


@pytest.mark.parametrize("length", [64, 128, 256])
def test_sums_of_short_rows_take_more_of_them_where_there_are_enough(length: int) -> None:
    """Planned only: this is of memory that is never written."""
    def held(rows: int, dtype: torch.dtype) -> int:
        recording, _ = record(lambda x: x[:1].expand(rows, length).relu().sum(-1), torch.zeros(2, length, dtype=dtype))
        (step,) = [one for one in kernels(plan(recording.graph)) if "sum" in one.kernel.name]
        return rows * length // step.grid[0]

    enough = (1 << 23) // length
    assert held(enough, torch.bfloat16) == 4 * held(enough, torch.float32) == 4 * held(enough // 16, torch.bfloat16)
