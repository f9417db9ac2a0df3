"""Elementwise work beside the reduction of a few long rows: a kernel of its own where there is much of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from graphs import check, kernels, record

from codegen.fuse import plan
from ir_nodes import settings


def wave(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).sin()


def test_what_takes_long_is_left_to_many_programs() -> None:
    x = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    made = check(lambda x: F.layer_norm(wave(x), (20_000,)), x, count=2)
    assert "a few programs that reduce long rows would compute what many could" in {refusal.reason for refusal in made.refusals}


def test_what_does_not_shares_their_kernel() -> None:
    """Nor where there are many rows, or short ones."""
    check(lambda x: F.layer_norm(x * 2 + 1, (20_000,)), torch.randn(1, 20_000), count=1)
    check(lambda x: F.layer_norm(wave(x), (100,)), torch.randn(1, 100), count=1)
    many = plan(record(lambda x: F.layer_norm(wave(x), (20_000,)), torch.randn(40, 20_000))[0].graph)
    assert len(kernels(many)) == 1


def test_a_reduction_walks_as_most_of_its_operands_lie() -> None:
    """What is stored first lies across the others: its neighbours are the two summands."""
    def program(x: torch.Tensor, across: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.softmax(0)
        return across.permute(2, 1, 0) + y, y * 2, y + 1

    inputs = (torch.randn(2, 300, 64), torch.randn(64, 300, 2))
    made = check(program, *inputs, count=1)
    source = kernels(made)[0].kernel.source
    assert source.count("i0 * n1 + i1, ") == 3
    with settings.override(disable=frozenset({"loop_order"})):
        check(program, *inputs)
