"""Norms of long rows: their sums in one pass, shared by programs, apart from what is done to each element."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, plan, record
from torch import Tensor

from codegen import moments
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

SPLIT = Tuning(split_numel=64, split_row=64, looped=64)
"""Programs share so short rows, too."""
TUNINGS = pytest.mark.parametrize("tuning", [HOPPER, SPLIT], ids=["whole", "split"])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are long from 64 elements on."""
    monkeypatch.setattr(moments, "LONG_ROW", 64)


def data(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradient(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    _, mean, scale = torch.native_layer_norm(x, x.shape[1:], None, None, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(x.flip(0), x, x.shape[1:], mean, scale, x[0], x[1], [True, False, False])[0]


def group_gradient(x: Tensor, w: Tensor | None) -> Any:
    _, mean, scale = torch.native_group_norm(x, None, None, len(x), 12, x[0, 0].numel(), 3, 1e-5)
    backward = torch.ops.aten.native_group_norm_backward
    return backward(F.silu(x.flip(0)), x, mean, scale, w, len(x), 12, x[0, 0].numel(), 3, [True, w is not None, w is not None])


def group(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return torch.native_group_norm(x, w, b, len(x), 12, x[0, 0].numel(), 3, 1e-5)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "group norm": group,
    "without weights": lambda x, w, b: F.group_norm(x, 4).relu(),
    "of what is joined": lambda x, w, b: F.silu(F.group_norm(torch.cat([x * 2, x], 1)[:, 6:18], 3, w, b)),
    "group norm's gradient": lambda x, w, b: group_gradient(x, w),
    "and without weights": lambda x, w, b: group_gradient(x, None)[0],
    "channels last": lambda x, w, b: F.group_norm(x.contiguous(memory_format=torch.channels_last) + 1, 3, w, b),
    "layer norm": lambda x, w, b: torch.native_layer_norm(x, x.shape[1:], None, None, 1e-5),
    "layer norm with weights": lambda x, w, b: F.layer_norm(x, x.shape[1:], x[0] + 1, x[1]) + x,
    "gradient": gradient,
    "variance": lambda x, w, b: (x.var(), x.std((1, 2, 3)), *torch.var_mean(x, (1, 2), correction=2), (x - x.mean()) / x.std()),
    "layer norm of all": lambda x, w, b: F.layer_norm(x, x.shape),
}  # fmt: skip


@TUNINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("short")
def test_long_rows(name: str, dtype: torch.dtype, tuning: Tuning) -> None:
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    x, w, b = data(3, 12, 7, 9, dtype=dtype), data(12, dtype=dtype), data(12, dtype=dtype) * 0.5
    made = check(PROGRAMS[name], x, w, b, tuning=tuning, combos=True, **near)
    if "norm" in name and tuning is SPLIT:
        assert any(step.kernel.name.startswith("pointwise") for step in kernels(made))


@pytest.mark.usefixtures("short")
def test_numbers_far_from_zero_equal_ones_and_ones_that_are_none() -> None:
    far, equal = data(2, 3, 100) + 1e4, torch.full((2, 3, 100), 0.1)
    check(lambda x: F.layer_norm(x.double(), (3, 100)), far, rtol=1e-6, atol=1e-6)
    check(lambda x: F.layer_norm(x, (3, 100)), far, rtol=1e-2, atol=1e-2)
    check(lambda x: F.group_norm(x, 1), equal, rtol=0, atol=0)
    none = far.clone()
    none[0, 1, 5], none[1, 2, 7] = float("nan"), float("inf")
    check(lambda x: F.group_norm(x, 3), none, rtol=1e-2, atol=1e-2)


def test_a_few_rows_are_shared_by_programs_and_many_are_not_walked_thrice() -> None:
    x = torch.empty(2, 16, 256, 256)
    recorded, _ = record(lambda x: F.silu(F.group_norm(x, 2)), x)
    sums, rest, results = kernels(plan(recorded.graph))
    assert sums.grid[0] > HOPPER.cores and rest.grid[0] < 8 and results.kernel.name.startswith("pointwise")
    with settings.override(disable=frozenset({"long_norms"})):
        recorded, _ = record(lambda x: F.silu(F.group_norm(x, 2)), x)
        assert "pointwise_native_group_norm" not in str(kernels(plan(recorded.graph)))
    recorded, _ = record(lambda x: F.silu(F.group_norm(x, 2)), torch.empty(2, 16, 64, 64))
    assert len(kernels(plan(recorded.graph))) == 1
