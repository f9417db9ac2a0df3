"""Columns that are reduced: how wide and tall a program's block is, and how its loads are written."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record
from torch import Tensor

from codegen import columns
from codegen.columns import HELD
from codegen.fuse import plan
from codegen.kernel import KernelStep
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

SMALL = Tuning(column_width=64, narrow_width=16, scanned_width=32, column_tile=128, programs=4, cores=2, split_numel=64,
               split_column=64, split_rows=8, covered=32)
"""Wide and narrow, held, looped and split columns, all of small tensors."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def data(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


def launches(program: Callable[..., Any], *size: int, dtype: torch.dtype = torch.float32) -> list[KernelStep]:
    recording, _ = record(program, torch.zeros(size, dtype=dtype))
    return kernels(plan(recording.graph, tuning=HOPPER))


def blocks(step: KernelStep) -> tuple[int, int]:
    found = dict(step.kernel.constexprs)
    return found["B0"], found["B1"]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "sum": lambda x: (x.float().sum(0),),
    "with its rows": lambda x: (x.float() * 2, (x.float() * 2).sum(0)),
    "extremes": lambda x: (x.amax(0), x.argmax(0), x.argmin(0)),
    "softmax": lambda x: (x.float().softmax(0), x.float().logsumexp(0)),
    "norm": lambda x: (x.float().norm(dim=0), x.float().var(0), (x.float() - x.float().mean(0)) / x.float().std(0)),
    "running sum": lambda x: (x.float().cumsum(0), x.float().flip(0).cumsum(0)),
}


def test_few_columns_are_scanned_by_a_program_each() -> None:
    """Steps of a scan wait for one another, so that 64 columns in four programs leave the machine idle."""
    (step,) = launches(lambda x: x.cumsum(0), 8192, 64, dtype=torch.int64)
    assert blocks(step)[1] == 1 and step.grid[0] == 64
    (step,) = launches(lambda x: x.cumsum(0), 8192, 8192)
    assert blocks(step)[1] >= 16


def test_short_columns_that_are_reduced_in_turn_are_a_warps() -> None:
    def norm(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        mean = leaf.mean(1, keepdim=True)
        y = (leaf - mean) / ((leaf - mean).pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
        return y.detach(), *torch.autograd.grad(y, leaf, grad)

    x, grad = data(64, 96, 3136, dtype=torch.bfloat16), data(64, 96, 3136, dtype=torch.bfloat16)
    found = kernels(plan(record(norm, x, grad)[0].graph, tuning=HOPPER))
    assert [step.kernel.num_warps for step in found] == [1] and blocks(found[0]) == (128, 16)
    check(norm, data(2, 96, 64), data(2, 96, 64), rtol=1e-3, atol=1e-4)


@DTYPES
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", [(8, 320), (40, 131), (150, 96), (300, 17), (37, 1)], ids=str)
def test_columns(size: tuple[int, int], name: str, dtype: torch.dtype) -> None:
    x = data(*size, dtype=dtype)
    x[1] = 2 * x[0].abs() if size[0] > 1 else x[1]
    for tuning in (HOPPER, SMALL):
        check(PROGRAMS[name], x, tuning=tuning, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [(5, 7, 64), (5, 70, 33), (2, 150, 16)], ids=str)
def test_columns_between_other_dimensions(size: tuple[int, ...]) -> None:
    for tuning in (HOPPER, SMALL):
        check(lambda x: (x.sum(1), x.amax(1), x.argmax(1), x.var(1)), data(*size), tuning=tuning, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 8), (torch.float32, 16)], ids=["bfloat16", "float32"])
def test_a_warp_lies_along_a_row_of_many_short_columns(dtype: torch.dtype, rows: int) -> None:
    """Each thread then sums columns of its own: threads exchange nothing."""
    with settings.override(disable="short_rows"):
        (held,), (looped,) = (launches(lambda x: x.sum(0), count, 1 << 20, dtype=dtype) for count in (rows, 2 * rows))
    vector = 16 // dtype.itemsize
    assert HELD == rows * vector and blocks(held) == (rows, 512) and held.kernel.num_warps * 32 * vector == 512
    assert "for r in" not in held.kernel.source
    assert blocks(looped) == (4, 512) and looped.kernel.num_warps * 32 * vector == 512
    assert "num_stages" in looped.kernel.source


def test_few_columns_are_narrow_and_shared() -> None:
    first, second = launches(lambda x: x.sum(0), 1 << 16, 768, dtype=torch.bfloat16)
    assert blocks(first)[1] == HOPPER.narrow_width and first.grid[0] >= HOPPER.programs * 3 // 4
    (alone,) = launches(lambda x: x.sum(0), 64, 4096)
    assert alone.grid[0] >= HOPPER.cores


def test_columns_off_boundaries_load_a_whole_block_without_masks() -> None:
    """Nothing is copied ahead: under Triton 3.6 that would go to shared memory in the wrong order, 8 times as slow."""
    (step,) = launches(lambda x: x.sum(0), 1000, 65025)
    source = step.kernel.source
    assert "num_stages" not in source
    assert re.search(r"if \(r \+ B0 <= n0\) and \(pid \* B1 \+ B1 <= n1\):\n +t1 = tl.load\(p0 \+ i0 \* n1 \+ i1\)\n", source)
    (even,) = launches(lambda x: x.sum(0), 1000, 65024)
    assert "num_stages" in even.kernel.source and "if (r" not in even.kernel.source


def test_16_bit_columns_off_boundaries_are_shared_by_programs_whose_rows_lie_alike() -> None:
    first, second = launches(lambda x: x.sum(0), 300, 100003, dtype=torch.bfloat16)
    assert "base + at" in first.kernel.source
    assert len(launches(lambda x: x.sum(0), 300, 100000, dtype=torch.bfloat16)) == 1
    assert len(launches(lambda x: x.sum(0), 300, 100003)) == 1  # 4 bytes at a time are enough


def test_columns_that_are_walked_twice_are_held_where_they_fit() -> None:
    (short,) = launches(lambda x: x.softmax(-1), 1 << 20, 1)
    assert blocks(short) == (1, 512)
    (step,) = launches(lambda x: x.softmax(1), 512, 21, 4096)
    assert "for r in" not in step.kernel.source
    (long,) = launches(lambda x: x.softmax(0), 64, 1 << 20, dtype=torch.bfloat16)
    assert "for r in" in long.kernel.source and blocks(long)[1] == 512


def test_variances_of_tall_columns_take_one_pass() -> None:
    (once,) = launches(lambda x: x.var(0), 64, 1 << 18)
    with settings.override(disable=frozenset({"long_norms"})):
        (twice,) = launches(lambda x: x.var(0), 64, 1 << 18)
    assert [step.kernel.source.count("for r in") for step in (once, twice)] == [1, 2]
    assert len(launches(lambda x: x.var(0), 1 << 16, 512)) == 2  # and programs can share them


SHORT_RUNS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, w: (x.softmax(-2), x.log_softmax(-2) * w),
    "sums": lambda x, w: ((x * w).sum(-2), x.amax(-2), x.var(-2)),
    "order": lambda x, w: (x.cumsum(-2), x.argmax(-2)),
}


@pytest.mark.parametrize("name", SHORT_RUNS)
@pytest.mark.parametrize("size", [(3, 50, 37), (2, 3, 50, 45)], ids=str)
def test_columns_of_short_runs_are_walked_run_by_run(size: tuple[int, ...], name: str) -> None:
    """The compiler is not told how memory runs on behind a remainder."""
    x, w = data(*size), data(*size[:-2], 1, size[-1])
    for tuning in (HOPPER, SMALL):
        made = check(SHORT_RUNS[name], x, w, tuning=tuning, rtol=1e-3, atol=1e-3)
        assert any("i2 = pid // across" in step.kernel.source for step in kernels(made))


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_long_columns_of_very_short_runs_are_walked_run_by_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program cannot hold them as rows."""
    monkeypatch.setattr(columns, "LONG", 64)
    monkeypatch.setattr(columns, "PIECES", 0)
    for size in ((40, 90, 4), (2, 20, 64, 2)):
        x, w = data(*size), data(*size[:-2], 1, size[-1])
        made = check(SHORT_RUNS[name], x, w, tuning=HOPPER.changed("column_tile=128,programs=8"), rtol=1e-3, atol=1e-3)
        assert any("i2 = pid // across" in step.kernel.source for step in kernels(made))


def test_runs_on_boundaries_and_others_that_are_very_short_are_not() -> None:
    for size in ((4, 90, 64), (40, 90, 3)):
        (step,) = kernels(plan(record(lambda x: x.softmax(1), torch.zeros(size))[0].graph))
        assert "i2" not in step.kernel.source


def test_functions_beside_sums_of_columns_have_twice_the_threads() -> None:
    def warps(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
        def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = function(x)
            return made, made.sum(0)

        return kernels(plan(record(program, torch.zeros(12544, 1280).bfloat16())[0].graph))[0].kernel.num_warps

    assert warps(F.gelu) == warps(F.silu) == 2 * warps(torch.relu)
