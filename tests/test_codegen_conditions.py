"""What is loaded under conditions, such as parts of a gradient: under none where it lies in memory anyway and several want it."""

from __future__ import annotations

import re
from typing import Callable

import pytest
import torch
from graphs import check, kernels
from graphs import drawn as data
from torch import Tensor


def loads(program: Callable[..., object], *inputs: Tensor) -> list[str]:
    """What the last kernel loads."""
    last = kernels(check(program, *inputs, rtol=1e-5, atol=1e-6))[-1]
    return re.findall(r"tl\.load\((.*?)\)(?:\.to\(tl\.float32\))?\n", last.kernel.source)


def roughness(x: Tensor) -> Tensor:
    return (x[:, 1:] - x[:, :-1]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def gradient(x: Tensor, weight: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(roughness(x), x, weight)[0].detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_differences_of_neighbours_load_each_once(dtype: torch.dtype) -> None:
    """The loss's gradient is one number, and in the middle of four differences lies the same element."""
    found = loads(gradient, data(3, 8, 16, dtype=dtype), data(1, dtype=dtype)[0])
    assert [place for place in found if "mask" not in place] == ["p0"] and len(found) == 6
    assert len(set(found)) == 6 and sum(" & t" in place for place in found) == 4


def test_a_number_is_loaded_under_no_condition() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x * y, x], 1)

    assert "p0" in loads(program, data(5, 9), data(1)[0])


def test_parts_of_halves_are_loaded_for_both() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([(x * y)[:, :8], (x - y)[:, 8:]], 1)

    found = loads(program, data(5, 16), data(5, 16, seed=1))
    assert len(found) == 2 and not any(" & t" in place for place in found)


def test_what_would_lie_outside_memory_keeps_its_condition() -> None:
    def program(x: Tensor) -> Tensor:
        ahead = x[:, 1:]
        return torch.cat([(ahead * 2)[:, :3], (ahead + 1)[:, 3:], x[:, :1]], 1)

    found = loads(program, data(5, 8))
    assert sum(" & t" in place for place in found) == len(found)


def test_what_is_written_meanwhile_is_loaded_before() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.cat([(x * 2)[:, :3], (x + 1)[:, 3:]], 1)
        return x.copy_(y)

    check(program, data(5, 8))
