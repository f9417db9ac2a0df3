"""Elementwise work on what lies across the rows of a reduction is a kernel of its own."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, plan, record
from torch import Tensor

from codegen import across

LAST = torch.channels_last


def names(program: Callable[..., Any], *inputs: Tensor) -> list[str]:
    return [step.kernel.name for step in kernels(plan(record(program, *inputs)[0].graph))]


def images(*size: int) -> tuple[Tensor, Tensor]:
    """Pixels in rows, and channels side by side."""
    return torch.rand(size), torch.rand(size).to(memory_format=LAST)


def weighted(rows: Tensor, last: Tensor) -> Any:
    part = F.silu(last)
    return part.contiguous(), (part * rows).sum((2, 3)), rows.sum((2, 3))


def test_channels_side_by_side_are_not_read_by_rows_of_pixels() -> None:
    found = names(weighted, *images(4, 64, 64, 64))
    assert any(name.startswith("pointwise") for name in found), found
    refusals = [str(r) for r in plan(record(weighted, *images(4, 64, 64, 64))[0].graph).refusals]
    assert any("lies across the rows" in text for text in refusals)


@pytest.mark.parametrize("program", [
    lambda rows, last: (F.silu(rows), (F.silu(rows) * rows).sum((2, 3))),
    lambda rows, last: (F.silu(last), (F.silu(last) * last).sum((2, 3))),
    lambda rows, last: (F.silu(last) * last).sum(1),
    lambda rows, last: (rows.sum(), (rows * last).sum()),
    lambda rows, last: ((rows * last[:, :, :1, :1]).sum((2, 3)), rows.sum((2, 3))),
])  # fmt: skip
def test_what_lies_alike_is_one_kernel(program: Callable[..., Any]) -> None:
    assert not any(name.startswith("pointwise") for name in names(program, *images(4, 64, 64, 64)))


def test_small_ones_and_short_rows_share_kernels() -> None:
    for size in ((2, 8, 32, 32), (4096, 64, 2, 2)):
        assert not any(name.startswith("pointwise") for name in names(weighted, *images(*size))), size


def largest_beside_turned(x: Tensor) -> Any:
    """The largest of every four queries beside keys that a product wants turned."""
    queries, keys = x.unbind(1)
    return queries.amax(1), keys.mT.contiguous()


def largest_beside_copied(x: Tensor) -> Any:
    queries, keys = x.unbind(1)
    return queries.amax(1), keys * 2


def test_what_is_stored_turned_is_not_beside_short_reductions() -> None:
    x = torch.rand(64, 2, 4, 64, 96)
    assert any(name.startswith("pointwise") for name in names(largest_beside_turned, x))
    refusals = [str(r) for r in plan(record(largest_beside_turned, x)[0].graph).refusals]
    assert any("lies across neighbouring results" in text for text in refusals)
    assert len(names(largest_beside_copied, x)) == 1


def test_sums_of_many_results_go_over_squares_of_both() -> None:
    rows, last = images(64, 64, 32, 32)
    assert names(lambda a, b: (a * b).sum((2, 3)), rows, last) == ["reduce_mul_sum"]
    halves = rows.view(32, 2, 64, 32, 32)
    assert names(lambda a, b: (a * b[:, None]).sum((3, 4)), halves, last[:32]) == ["reduce_mul_sum"]


def test_what_is_read_with_an_operand_across_is_stored_across_by_another_kernel() -> None:
    """A batch norm of rows of pixels whose result has channels side by side: the sums read rows, the rest squares."""
    def program(x: Tensor) -> Any:
        mean = x.mean((0, 2, 3), keepdim=True)
        return (x - mean).contiguous(memory_format=LAST), mean

    found = names(program, torch.rand(16, 256, 32, 32))
    assert len(found) == 2 and found[0].startswith("reduce") and found[1].startswith("pointwise"), found


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "LARGE", 0)
    monkeypatch.setattr(across, "SHORT", 0)
    check(weighted, *images(2, 9, 7, 5), rtol=1e-5, atol=1e-5)


def averaged(x: Tensor) -> Any:
    """Over all but the middle dimension: rows in pieces of four elements."""
    return x * x.cos().mean((0, 2), keepdim=True)


def test_rows_in_small_pieces_are_walked_once() -> None:
    found = names(averaged, torch.rand(4096, 64, 4))
    assert any(name.startswith("pointwise") for name in found), found
    refusals = [str(r) for r in plan(record(averaged, torch.rand(4096, 64, 4))[0].graph).refusals]
    assert any("in pieces smaller than" in text for text in refusals)


@pytest.mark.parametrize("size", [(1024, 256, 16), (1024, 512, 4)])
def test_pieces_of_a_sector_and_rows_that_are_held_are_one_kernel(size: tuple[int, ...]) -> None:
    assert not any(name.startswith("pointwise") for name in names(averaged, torch.rand(size)))


def test_numbers_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("LARGE", "SHORT", "HELD"):
        monkeypatch.setattr(across, limit, 0)
    check(averaged, torch.rand(9, 7, 3), rtol=1e-5, atol=1e-5)


def turned(x: Tensor, y: Tensor) -> Any:
    """The sum of one, and what is made of the same and another that lies across."""
    return x.mean(), x * 2 + y.t()


def test_sums_of_everything_do_not_walk_what_lies_otherwise() -> None:
    made = plan(record(turned, torch.rand(1200, 1000), torch.rand(1000, 1200))[0].graph)
    assert any(step.kernel.name.startswith("pointwise") for step in kernels(made))
    assert any("lie in another order" in str(refusal) for refusal in made.refusals)
    alike = names(lambda x, y: (x.mean(), x * 2 + y), torch.rand(1200, 1000), torch.rand(1200, 1000))
    assert not any(name.startswith("pointwise") for name in alike)
    check(turned, torch.rand(37, 50), torch.rand(50, 37), rtol=1e-5, atol=1e-5)


def repeated(x: Tensor, y: Tensor) -> Any:
    """Of every 20 neighbours the sum; what is made of them and the sums of whole rows."""
    return ((x + y[..., None]) * 2).sum((0, 2, 3))


def test_sums_of_long_rows_do_not_look_up_what_repeats() -> None:
    x, y = torch.rand(8, 16, 1000, 20), torch.rand(8, 16, 1000)
    made = plan(record(repeated, x, y)[0].graph)
    assert kernels(made)[0].kernel.name.startswith("pointwise")
    assert any("one number for every few elements" in str(refusal) for refusal in made.refusals)
    assert not any(name.startswith("pointwise") for name in names(repeated, x.view(8, 16, 200, 100), y[..., :200]))
    check(repeated, torch.rand(2, 3, 5, 20), torch.rand(2, 3, 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("summed", [0, 1])
def test_what_is_made_of_tables_that_run_on_is_made_where_it_is_summed(summed: int) -> None:
    def distances(x: Tensor, codes: Tensor, given: Tensor) -> Any:
        return ((x[:, None] - codes) * given[:, :, None]).sum(summed)

    found = names(distances, *map(torch.rand, ((512, 64), (256, 64), (512, 256))))
    assert {name.partition("_")[0] for name in found} == {"reduce"}, found


def test_tables_in_short_pieces_are_not_looked_up_for_each_element_of_a_sum() -> None:
    def scaled(x: Tensor, one: Tensor, two: Tensor) -> Any:
        return (x * one + two).sum((0, 1))

    inputs = torch.rand(16, 4096, 32, 4), torch.rand(16, 1, 32, 1), torch.rand(16, 1, 32, 1)
    assert any("differ between results" in str(one) for one in plan(record(scaled, *inputs)[0].graph).refusals)
