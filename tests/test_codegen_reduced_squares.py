"""Reductions whose operands run along what is kept and along what is reduced go over squares."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import torch
from graphs import check, kernels, plan, record
from torch import Tensor, nn

from codegen import layout, reduced_squares
from codegen.tile import Tile
from ir_nodes import settings

LAST = torch.channels_last


def images(*size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Pixels in rows, and channels side by side."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    return one, other.to(memory_format=LAST)


def sources(program: Callable[..., Any], *inputs: Tensor) -> list[str]:
    return [step.kernel.source for step in kernels(plan(record(program, *inputs)[0].graph)) if step.kernel.name[0] == "r"]


def norm_gradient(rows: Tensor, last: Tensor) -> Any:
    """The sums of a batch norm's gradient, over an input and a gradient that lie otherwise."""
    count = rows.shape[1]
    return torch.ops.aten.native_batch_norm_backward(last, rows, torch.ones(count), None, None, torch.full((count,), 0.1),
                                                     torch.ones(count), True, 1e-5, [False, True, True])[1:]


@pytest.mark.parametrize("program, size", [
    (norm_gradient, (4, 32, 14, 14)), (norm_gradient, (3, 72, 7, 7)), (norm_gradient, (2, 24, 33, 1)),
    (lambda rows, last: (rows * last).sum((2, 3)), (3, 40, 9, 7)),
    (lambda rows, last: (last * rows).sum((2, 3)), (2, 33, 90, 64)),  # shared by programs
    (lambda rows, last: (last[:2, None] * rows.view(2, 2, 33, 45, 64)).sum((0, 3, 4)), (4, 33, 45, 64)),
    (lambda rows, last: (rows * last).sum((0, 2, 3)), (5, 17, 16, 16)),
    (lambda rows, last: (rows - last).amax((0, 2, 3)), (2, 50, 5, 20)),
    (lambda rows, last: ((rows + last).relu(), (rows + last).relu().sum((2, 3))), (2, 33, 8, 8)),
    (lambda rows, last: ((rows + last).relu().sum((2, 3)), rows.amax((2, 3))), (2, 33, 8, 8)),
    (lambda rows, last: (rows * last).pow(2).mean((2, 3)), (2, 48, 8, 16)),
    (lambda rows, last: (rows[:, :16] * last[:, 16:]).sum((0, 2, 3)), (4, 32, 12, 12)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers(program: Callable[..., Any], size: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = []

    def square_tile(*given: Any) -> Tile | None:
        tiles.append(reduced_squares.square_tile(*given))
        return tiles[-1]

    monkeypatch.setattr(layout, "square_tile", square_tile)
    bound = 1e-4 if dtype is torch.float32 else 3e-2
    check(program, *images(*size, dtype=dtype), rtol=bound, atol=bound * 4)
    assert any(tile is not None for tile in tiles)


def test_neighbours_of_either_operand_are_told_of() -> None:
    """196 pixels: four neighbours from any multiple of four on lie side by side, and channels so far apart. A kernel knows no
    more of sizes."""
    *_, first, _ = sources(norm_gradient, *images(16, 64, 14, 14, dtype=torch.bfloat16))
    assert "[4, 1]" in first and re.search(r"i1 \* \(s\d+ // 4 \* 4\)", first), first
    assert first in sources(norm_gradient, *images(16, 64, 18, 18, dtype=torch.bfloat16))
    assert first not in sources(norm_gradient, *images(16, 64, 14, 13, dtype=torch.bfloat16))


def test_neighbours_in_rows_in_pieces_are_told_of() -> None:
    (source,) = sources(lambda rows: rows.sum((0, 2, 3)), images(4, 640, 14, 14)[0])
    assert "[1, 4]" in source and re.search(r"i0 \* \(s\d+ // 4 \* 4\)", source), source


def test_a_square_serves_both_and_can_be_switched_off() -> None:
    rows, last = images(16, 64, 16, 16)
    assert any("[16, 1]" in source for source in sources(norm_gradient, rows, last))
    with settings.override(disable=frozenset(("tiling",))):
        assert not any("[16, 1]" in source for source in sources(norm_gradient, rows, last))
    assert not any("[16, 1]" in source for source in sources(norm_gradient, rows, rows))


def test_programs_are_narrower_where_there_would_be_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def widths(results: int) -> tuple[int, ...]:
        made = plan(record(lambda rows, last: (rows * last).sum((2, 3)), *images(results // 64, 64, 32, 32))[0].graph)
        (step,) = kernels(made)
        return step.grid

    assert widths(64 * 64) == (64 * 4, 1, 1), "sixteen channels each"
    monkeypatch.setattr(reduced_squares, "NARROWEST", 32)
    assert widths(64 * 64) == (64 * 2, 1, 1)


def test_an_autograd_norm_between_formats() -> None:
    """Forward, backward: the same as eager mode in either format."""
    norm = nn.BatchNorm2d(32)

    def program(x: Tensor, gradient: Tensor) -> Any:
        held = x.detach().requires_grad_()
        result = torch.nn.functional.batch_norm(held, None, None, norm.weight.detach(), norm.bias.detach(), training=True)
        return result.detach(), torch.autograd.grad(result, held, gradient)[0]

    check(program, *images(4, 32, 10, 10), rtol=1e-4, atol=1e-4)


def test_what_is_walked_again_keeps_its_rows() -> None:
    rows, last = images(16, 64, 16, 16)
    found = sources(lambda a, b: (a * b) / (a * b).sum((2, 3), keepdim=True), rows, last)
    assert not any("[16, 1]" in source for source in found)
