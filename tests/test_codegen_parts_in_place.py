"""Writes in place into a part of what a kernel makes: one kernel that stores the whole, wherever others allow it."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, compare, kernels, record
from graphs import drawn as data
from torch import Tensor

from codegen.fuse import plan

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)


def gradient(change: Callable[[Tensor], Any]) -> Callable[..., list[Tensor]]:
    """Of a tensor that ``change`` writes into, as an op in a model does, between two other ops."""

    def program(x: Tensor, grad: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        hidden = leaf * 2
        change(hidden)
        out = torch.tanh(hidden)
        return [out.detach(), *torch.autograd.grad(out, leaf, grad)]

    return program


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first rows": lambda x: x[:2],
    "a row": lambda x: x[3],
    "last columns": lambda x: x[..., 5:],
    "a column": lambda x: x[..., 0],
    "between": lambda x: x[:, 1:3],
    "one of between": lambda x: x[:, 2],
}
parts = pytest.mark.parametrize("name", PARTS)


@DTYPES
@parts
def test_what_is_made_changed_and_read_is_one_kernel(name: str, dtype: torch.dtype) -> None:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        made = x ^ y if dtype is torch.bool else x + y
        PARTS[name](made).zero_()
        return [made, made.float() * 2]

    made = check(program, data(6, 4, 8, dtype=dtype), data(6, 4, 8, dtype=dtype, seed=1), count=1)
    assert len(kernels(made)[0].writes) == 2  # nothing but the results


@parts
@pytest.mark.parametrize("change", [
    lambda part: part.mul_(3), lambda part: part.sigmoid_(), lambda part: part.copy_(part.clone() * 2), lambda part: part.zero_(),
    lambda part: part.add_(torch.arange(part.numel()).view_as(part)), lambda part: part.copy_(part.flip(0)),
], ids=["mul", "sigmoid", "itself", "zero", "positions", "mirrored"])  # fmt: skip
def test_changes_and_their_gradients(change: Callable[[Tensor], Tensor], name: str) -> None:
    inputs = data(6, 4, 8), data(6, 4, 8, seed=1)
    recording, outs = record(gradient(lambda x: change(PARTS[name](x))), *inputs)
    compare(recording, plan(recording.graph), outs, rtol=1e-5, atol=1e-6)


def test_a_gradient_through_a_change_is_one_kernel() -> None:
    """Autograd copies the gradient, takes a copy of the part and writes what it makes of that into the first copy."""
    for change in (lambda x: x[:, 1:3].mul_(3), lambda x: x[..., 5:].sigmoid_(), lambda x: x[:2].zero_()):
        check(gradient(change), data(6, 4, 8), data(6, 4, 8, seed=1), count=1, rtol=1e-5, atol=1e-6)


def test_a_change_beside_the_row_sums_that_it_is_read_for() -> None:
    def program(x: Tensor, start: Tensor) -> Tensor:
        tokens = x + 1
        tokens[:, 0] = start
        return F.layer_norm(tokens, (24,))

    check(program, data(3, 5, 24), data(24, seed=1), count=1, rtol=1e-4, atol=1e-5)


def test_several_parts_one_after_the_other() -> None:
    def thirds(x: Tensor) -> Tensor:
        made = x * 2
        for number in range(3):
            made[:, number::1][:, :2].add_(number)
        return made + 1

    check(thirds, data(5, 6), count=1)

    def columns(x: Tensor, y: Tensor) -> Tensor:
        made = x * 2
        for number in range(12):
            made[:, number] = y[number]
        return made

    made = check(columns, data(40, 12), data(12, 40, seed=1))  # each element asks of a few parts whether it belongs to them
    assert sum("tl.where" in step.kernel.source for step in kernels(made)) == 1
    assert sum(step.kernel.source.count("tl.where") for step in kernels(made)) == 4


def test_what_others_still_read_is_left_in_memory() -> None:
    def read_before(x: Tensor) -> list[Tensor]:
        made = x * 2
        total = made[:, 1:].sum()
        made[:, :3].mul_(total)
        return [made, total]

    def copied_before(x: Tensor) -> list[Tensor]:
        made = x * 2
        before = made[:, :3].clone()
        made[:, :3] = before + 1
        return [made, before]

    def moved(x: Tensor) -> Tensor:
        made = x * 2
        made[:, :3] = made[:, 3:].exp()
        return made + 1

    def overlapping(x: Tensor) -> Tensor:
        made = x * 2
        made[1:].add_(made[:-1].clone())
        return made + 1

    for program in (read_before, copied_before, moved, overlapping):
        check(program, data(5, 6), rtol=1e-5, atol=1e-6)


def test_another_layout_or_dtype_than_the_part_is_seen_in() -> None:
    def turned(x: Tensor) -> Tensor:
        made = (x * 2).t()
        made[:, :2] = 0
        return made + 1

    def stepped(x: Tensor) -> Tensor:
        made = x * 2
        made[:, ::2] = 0
        return made + 1

    def bits(x: Tensor) -> Tensor:
        made = x * 2
        made.view(torch.int32)[:, :2] = 7
        return made + 1

    def own_bits(x: Tensor) -> Tensor:
        made = x * 2
        made[:, :2] = made.view(torch.int32)[:, :2] & 7
        return made + 1

    def bits_of_a_fill(x: Tensor) -> Tensor:
        made = torch.full((5, 6), 1.5)
        made[:, :2] = made.view(torch.int32)[:, :2] & 0xFF0000
        return made + x

    for program in (turned, stepped, bits, own_bits, bits_of_a_fill):
        check(program, data(5, 6))


def test_what_an_extern_or_an_input_holds_is_changed_where_it_is() -> None:
    def product(x: Tensor) -> Tensor:
        made = x @ x.t()
        made[:, :2] = 0
        return made

    (step,) = kernels(check(product, data(64, 5), count=1, extern=1, rtol=1e-4, atol=1e-4))
    assert "tl.where" not in step.kernel.source

    def given(x: Tensor) -> Tensor:
        x[:, :2] = 0
        return x

    (step,) = kernels(check(given, data(64, 5), count=1))
    assert "tl.where" not in step.kernel.source


def test_what_waits_for_something_else_than_the_maker_is_not_written_twice() -> None:
    def program(x: Tensor) -> list[Tensor]:
        made = x * 2
        made[:, 0] = (x * 3).sum(1)
        return [made, x * 3]

    made = check(program, data(40, 5))
    assert not any("tl.where" in step.kernel.source and "sum" not in step.kernel.name for step in kernels(made))
