"""Numbers that take no memory are computed where they are read: kernel counts, and numbers as eager mode's."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from graphs import check, kernels, record

import lazy_backend
from codegen.fuse import plan
from ir_nodes import settings

X = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))


def mean_of_all(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.ones((), dtype=x.dtype) / 2400.0).expand(40, 60)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "a seed over the number of elements": mean_of_all,
    "positions": lambda x: x * torch.arange(60),
    "positions from the third on": lambda x: x[:, 2:] * torch.arange(60)[2:],
    "positions, turned": lambda x: x.view(40, 2, 30) + torch.arange(60).view(30, 2).t(),
    "a mask of what is behind": lambda x: x.masked_fill(torch.arange(60)[None] > torch.arange(40)[:, None], -1.0),
    "numbers between two ends": lambda x: x + torch.linspace(-1, 1, 60),
    "a sum of what is the same everywhere": lambda x: x.sum(1) + (torch.full((40, 60), 0.25) * 2).sum(1),
    "a gradient of a slice": lambda x: torch.ops.aten.slice_backward(
        torch.linspace(-1, 1, 19) * torch.ones(40, 1), [40, 60], 1, 33, 52, 1) + x,
    "a gradient of a slice of positions": lambda x: torch.ops.aten.slice_backward(torch.arange(25), [60], 0, 8, 33, 1) + x,
    "positions between others": lambda x: torch.nn.functional.pad(torch.arange(50), (7, 3)) + x,
    "columns beside one another": lambda x: torch.cat(
        [torch.arange(11) * torch.ones(40, 1), torch.linspace(0, 4, 49) * torch.ones(40, 1)], 1) + x,
    "a window of what follows from columns": lambda x: torch.cat([x, (torch.arange(60) * torch.ones(9, 1)) * 0.5]) + 1,
    "the transposed of what follows from rows": lambda x: x + (torch.arange(40) * torch.ones(60, 1, dtype=torch.int64)).t(),
    "a part of what follows from columns": lambda x: x[3:, 5:] * (torch.arange(60) * torch.ones(40, 1))[3:, 5:],
    "a causal mask": lambda x: x.masked_fill(~torch.ones(40, 60, dtype=torch.bool).tril(), -1.0),
    "a cast of positions": lambda x: x * torch.arange(60).to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_cost_no_kernel(name: str) -> None:
    check(PROGRAMS[name], X, count=1)


def test_positions_behind_one_another() -> None:
    """Too many instructions for each reader, so they are written once."""
    check(lambda x: torch.cat([torch.arange(11), torch.arange(49) * 2]) + x, X, count=2)


def test_switched_off_they_are_kept() -> None:
    with settings.override(disable=frozenset({"formulas"})):
        check(PROGRAMS["positions"], X)
        apart = plan(record(PROGRAMS["numbers between two ends"], X)[0].graph)
    assert len(kernels(apart)) == 2


def test_what_takes_long_is_computed_once() -> None:
    made = plan(record(lambda x: x * (torch.arange(60) * 0.1).sin(), X)[0].graph)
    assert any("sin" in step.kernel.source and step.grid == (1,) for step in kernels(made)) or len(kernels(made)) == 2


def test_remainders_are_computed_once() -> None:
    check(lambda x: x * (torch.arange(60) % 7), X, count=2)
    check(lambda x: x * (torch.arange(60) // 7), X, count=2)


def test_a_number_that_changes_is_an_argument() -> None:
    """Not a part of the kernel: another one compiles nothing."""
    one, other = (plan(record(lambda x, n=n: x * (torch.ones(()) / n), X)[0].graph) for n in (3.0, 5.0))
    assert [step.kernel.source for step in kernels(one)] == [step.kernel.source for step in kernels(other)]


@pytest.mark.parametrize("count", [1, 2, 5, 64, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_linspace(count: int, dtype: torch.dtype) -> None:
    check(lambda: torch.linspace(-3, 7.5, count, dtype=dtype), count=1, rtol=2e-6, atol=1e-6)


def test_indices_that_depend_on_a_number_are_read() -> None:
    """Kernels are timed with any number, and stop at an index that is out of range; positions alone are in range."""
    table = torch.randn(60, 8).to("lazysched")

    def program(first: int) -> torch.Tensor:
        places = torch.arange(50, device="lazysched")
        return torch.nn.functional.embedding(places + first if first else places, table) * 2

    assert " in 1 kernel and" in str(lazy_backend.explain(program, 0))
    assert " in 2 kernels and" in str(lazy_backend.explain(program, 7))
