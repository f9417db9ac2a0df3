"""What is read by index, and by nobody else, is computed where it is read."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels
from graphs import drawn as data
from torch import Tensor

PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "mirrored": lambda x, y: torch.flip(x * 2 + 1, (3,)),
    "mirrored twice": lambda x, y: torch.flip(x.relu(), (1, 3)),
    "costly, but once": lambda x, y: torch.flip(F.gelu(x), (2,)),
    "of two": lambda x, y: torch.flip(x.expand_as(y) * y, (1,)),
    "with one along": lambda x, y: torch.flip(x * y[0, 0, 0], (3,)),
    "with one across": lambda x, y: torch.flip(x * y[0, :, :1, :1], (1, 3)),
    "of a part": lambda x, y: torch.flip((x + 1)[:, :, 2:6], (2,)),
    "of another order": lambda x, y: torch.roll((x + 1).transpose(1, 2), 2, 1),
    "rolled": lambda x, y: torch.roll(x.exp(), (2, 1), (2, 3)),
    "by position": lambda x, y: torch.flip(x.tril(), (3,)),
    "by two positions": lambda x, y: torch.roll(x.triu(1), (1, 2), (2, 3)),
    "reflected": lambda x, y: F.pad(x.relu(), (1, 2, 2, 1), mode="reflect"),
    "averages": lambda x, y: F.avg_pool2d(x.relu(), 2),
    "averages that overlap": lambda x, y: F.avg_pool2d(x.relu() + 1, 3, 1, 1),  # what lies in the padding is 0, not 1
    "largest": lambda x, y: F.max_pool2d(x * 2, 2),
    "enlarged": lambda x, y: F.interpolate(x * 2 + 1, scale_factor=2, mode="bilinear"),
    "repeated": lambda x, y: F.interpolate(x * 2 + 1, scale_factor=2),
    "picked": lambda x, y: (x * 2).index_select(1, torch.tensor([0, 3, 3])),
    "bools": lambda x, y: torch.flip(x > 0, (2,)),
    "integers": lambda x, y: torch.flip((x * 4).int() + 1, (2,)),
    "16 bits": lambda x, y: torch.flip(x.bfloat16() * 2 + 1, (2,)),
    "through narrower ones": lambda x, y: torch.flip((x.bfloat16().float() * 3).bfloat16(), (2,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_stored_to_be_read_by_index(name: str) -> None:
    check(PROGRAMS[name], data(3, 4, 8, 6), data(3, 4, 8, 6, seed=1), count=1)


def test_what_others_read_too_or_costs_much_for_many_reads_is_stored() -> None:
    for program in (lambda x: [torch.flip(kept := x * x.flip(0), (1,)), kept], lambda x: F.avg_pool2d(x.exp()[:, None], 3, 1, 1)):
        check(program, data(3, 8, 6), count=2, rtol=1e-5, atol=1e-6)


def test_what_is_made_of_one_operand_is_computed_again_although_others_read_it() -> None:
    """A step of heat, whose gradient reads a multiple of the tangent where it stands and at four neighbours."""
    check(lambda x: [torch.flip(kept := x * 2, (1,)), kept], data(3, 8, 6), count=1)

    def program(x: Tensor) -> Tensor:
        kept = x * 0.1
        return x - kept * 4 + torch.roll(kept, 1, 1) + torch.roll(kept, -1, 1) + torch.roll(kept, 1, 2) + torch.roll(kept, -1, 2)

    check(program, data(3, 8, 6), count=1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [lambda made: made + 1, lambda made: made[:5].clone()])
def test_what_is_written_in_place_is_not_all_that_is_read(kept: Callable[[Tensor], Tensor]) -> None:
    """Others read what was there before, so that the write is a kernel's for a part, not for the whole."""

    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        made = x * 2
        before = kept(made)
        made[:5].zero_()
        return [torch.roll(made + y, 2, 1), before]

    check(program, data(9, 8), data(9, 8, seed=1))


def test_numbers_that_would_be_stored_instead_are_not() -> None:
    """Two sums are stored, or what is read of them; that is less."""

    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        one, two = x.exp() * y, y.exp() * x
        return [torch.flip(one + two, (1,)), one.sum(1), two.sum(1)]

    made = check(program, data(6, 8), data(6, 8, seed=1), rtol=1e-5, atol=1e-6)
    assert sum(len(step.writes) for step in kernels(made)) == 4


def test_what_is_overwritten_in_between_is_read_before() -> None:
    def program(x: Tensor) -> list[Tensor]:
        twice = x * 2
        x.add_(1)
        return [torch.flip(twice, (1,)), x]

    check(program, data(6, 8))


def test_gradients() -> None:
    def program(x: Tensor, grad: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = torch.roll(torch.flip(leaf * 2, (1,)) + 1, 3, 0)
        return [out.detach(), *torch.autograd.grad(out, leaf, grad)]

    check(program, data(6, 8), data(6, 8, seed=1))


def test_an_index_out_of_range_reads_zero_whatever_is_made_of_it() -> None:
    check(lambda x: F.avg_pool2d(x + 7, 3, 2, 1, count_include_pad=False), data(2, 3, 9, 9), count=1)
    check(lambda x: F.avg_pool2d((x + 7).bfloat16(), 3, 2, 1), data(2, 3, 9, 9), count=1)
