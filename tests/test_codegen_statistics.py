"""Variances, log-sum-exp, places of extremes and group norm against eager PyTorch."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check

from codegen.tuning import HOPPER, Tuning

LOOPED = Tuning(persistent=16, looped=16, online=16, tile=64)
TUNINGS = pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["whole", "looped"])


def data(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "var": lambda x: (x.var(-1), x.var(0, correction=0), x.var((0, 1)), x.var(1, keepdim=True)),
    "std": lambda x: (x.std(-1), *torch.std_mean(x, 0), *torch.var_mean(x, (0, 2), correction=2)),
    "logsumexp": lambda x: (x.logsumexp(-1), x.logsumexp(0), x.logsumexp((1, 2), keepdim=True)),
    "argmax": lambda x: (x.argmax(-1), x.argmax(0, keepdim=True), x.argmax(), x.argmin(1)),
    "max": lambda x: (*x.max(-1), *x.min(0), *x.max(1, keepdim=True)),
}


@TUNINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_statistics(name: str, dtype: torch.dtype, tuning: Tuning) -> None:
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    check(PROGRAMS[name], data(5, 9, 33, dtype=dtype), tuning=tuning, **near)
    if dtype is torch.float32 and tuning is HOPPER:
        check(PROGRAMS[name], data(33, 9, 5).transpose(0, 2), **near)


@TUNINGS
def test_the_first_of_equals_and_nan_before_all(tuning: Tuning) -> None:
    x = torch.tensor([[3.0, 7.0, 7.0, 1.0] * 9, [float("-inf")] * 36, [1.0, float("nan"), 9.0, float("nan")] * 9])
    check(lambda x: (x.argmax(1), x.argmin(1), *x.max(1), *x.min(1), x.argmax(), x.logsumexp(1)), x, tuning=tuning)
    check(lambda x: (x.argmax(1), *x.max(1), *x.min(0)), (x > 2).int(), tuning=tuning)
    check(lambda x: (*x.max(1), *x.min(0)), x > 2, tuning=tuning)
    check(lambda x: x.logsumexp(0), torch.tensor([[float("inf"), 1.0], [2.0, float("-inf")], [0.0, 3.0]]), tuning=tuning)


@TUNINGS
def test_group_norm(tuning: Tuning) -> None:
    w, b = data(12), data(12) * 0.5
    near = {"rtol": 1e-4, "atol": 1e-5}
    check(lambda x, w, b: F.group_norm(x, 3, w, b), data(2, 12, 5, 7), w, b, count=1, tuning=tuning, **near)
    check(lambda x: F.group_norm(x, 4).relu(), data(2, 12, 5), count=1, tuning=tuning, **near)
    check(lambda x, w, b: F.group_norm(x, 3, w, b) + x, data(2, 12, 4, 4), w, b, count=1, tuning=tuning, **near)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_one_element_has_no_variance() -> None:
    check(lambda x: (x.var(0), x.std(1)), data(1, 4))
