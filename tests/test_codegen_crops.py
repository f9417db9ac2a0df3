"""What is read in part only is computed where it is read: shifted sequences, images' neighbours within their padding."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check
from graphs import drawn as data
from torch import Tensor

from ir_nodes import settings


def laplacian(x: Tensor) -> Tensor:
    p = F.pad(x, (1, 1, 1, 1))
    return p[..., :-2, 1:-1] + p[..., 2:, 1:-1] + p[..., 1:-1, :-2] + p[..., 1:-1, 2:] - 4 * x


def sobel(x: Tensor) -> Tensor:
    p = F.pad(x, (1, 1, 1, 1), mode="replicate")
    along = p[..., :-2, 2:] - p[..., :-2, :-2] + 2 * (p[..., 1:-1, 2:] - p[..., 1:-1, :-2]) + p[..., 2:, 2:] - p[..., 2:, :-2]
    down = p[..., 2:, :-2] - p[..., :-2, :-2] + 2 * (p[..., 2:, 1:-1] - p[..., :-2, 1:-1]) + p[..., 2:, 2:] - p[..., :-2, 2:]
    return (along * along + down * down + 1e-6).sqrt()


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda x: F.pad(x, (0, 0, 1, 0))[:, :, :-1] * 0.5 + x,
    "shifted by a concatenation": lambda x: torch.cat([torch.zeros_like(x[:, :, :1]), x], 2)[:, :, :-1] * 0.5 + x,
    "of an activation": lambda x: (x * 2).relu()[:, 1:] + 1,
    "costly, but once": lambda x: F.gelu(x)[..., 2:] * 3,
    "turned": lambda x: (x + 1).transpose(1, 2)[:, :, 1:] * 2,
    "neighbours within zeros": laplacian,
    "neighbours within mirrors": sobel,
    "in 16 bits": lambda x: F.pad(x.bfloat16(), (1, 0))[..., :-1] * x.bfloat16(),
    "masks": lambda x: torch.where(F.pad(x > 0, (1, 0))[..., :-1], x, 0.0),
    "integers": lambda x: F.pad((x * 4).int(), (2, 0), value=7)[..., 1:-1] + 1,
    "shared out": lambda x: (lambda y: y[..., :5] * y[..., 5:10])(x * 2 + 1),
    "costly, and shared out": lambda x: (lambda y: y[:, :1] * y[:, 1:2] + y[:, 2:])(F.gelu(x)),
    "for two each": lambda x: x[:1].square() + x,
    "for nine each, between columns": lambda x: x[:, :, :1].abs() * x,
    "by position": lambda x: x.tril()[..., 1:, :] * 2,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_take_no_memory_of_their_own(name: str) -> None:
    check(PROGRAMS[name], data(2, 3, 9, 11), count=1, rtol=1e-5, atol=1e-5)


STORED: dict[str, Callable[[Tensor], object]] = {
    "read as a whole, too": lambda x: (lambda y: (y[:, 1:] + 1, y * 2))(x.relu() + x),
    "costly, and read twice": lambda x: (lambda y: y[:, 1:] - y[:, :-1])(F.gelu(x)),
    "costly, for two each": lambda x: F.gelu(x[:1]) + x,
    "for many each": lambda x: (x[:, :1, :1, :1] + x[:, 1:2, :1, :1]).square() - x,
    "made of more, for two each": lambda x: (x[:1] * x[1:]) - x,
    "a result": lambda x: (lambda y: (y, y[:, 1:] * 2))(F.pad(x, (1, 1))),
    "summed": lambda x: x.softmax(-1)[:, 1:] * 2,
}


@pytest.mark.parametrize("name", STORED)
def test_what_others_read_or_what_costs_much_is_stored(name: str) -> None:
    check(STORED[name], data(2, 3, 9, 11), count=2, rtol=1e-5, atol=1e-5)


def test_what_was_overwritten_since_is_not_read_again() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.pad(x, (1, 0))
        x.mul_(-3)
        return y[..., :-1] * 2, x

    check(program, data(2, 3, 9, 11))


def test_it_can_be_switched_off() -> None:
    with settings.override(disable="windows"):
        check(PROGRAMS["turned"], data(2, 3, 9, 11), count=2)
