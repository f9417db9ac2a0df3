"""Random programs of products and sums, in place and out of place, leave after the pass what they left before it."""

from __future__ import annotations

import random

import torch
from graphs import record
from product_sums import Program
from torch import Tensor

from barriers.passes.dead import eliminate_dead
from barriers.passes.product_sums import ONTO, sum_products
from ir_nodes.reference import run
from ir_nodes.verify import verify

SIZE, PROGRAMS = 16, 300


def product(draws: random.Random, factors: list[Tensor]) -> Tensor:
    left, right = draws.choice(factors), draws.choice(factors)
    return left @ right if draws.random() < 0.8 else torch.mm(left, right, out=torch.empty_like(left))


def added(draws: random.Random, x: Tensor, y: Tensor) -> Tensor:
    if draws.random() < 0.3:
        x, y = x.view(4, 4, SIZE), y.view(4, 4, SIZE)
    number, how = draws.choice((1, 1, 1, 0.5, -1, 2)), draws.random()
    if how < 0.8:
        return torch.add(x, y, alpha=number, out=None if how < 0.4 else x if how < 0.7 else y).view(SIZE, SIZE)
    return (x.add_(y, alpha=number) if how < 0.9 else x.mul_(0.5)).view(SIZE, SIZE)


def program_of(seed: int) -> Program:
    """Sums mostly end what they add; now and then it is read once more, or held."""
    def program(rest: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        draws, pool = random.Random(seed), [rest.neg()]
        for _ in range(draws.randint(4, 12)):
            made = product(draws, [*factors, *(pool[-1:] if draws.random() < 0.2 else [])])
            x = draws.choice(pool[-4:])
            if draws.random() < 0.45:
                pool.append(made)
                continue
            total = added(draws, x, draws.choice([made, made, *pool[-2:]]))
            pool = [one for one in pool if one is not x or draws.random() < 0.1] + [total]
        held = [one for one in pool if draws.random() < 0.4] or pool[-1:]
        return tuple({one.untyped_storage().data_ptr(): one for one in held}.values())

    return program


def test_random_programs() -> None:
    joined = 0
    for seed in range(PROGRAMS):
        numbers = torch.Generator().manual_seed(seed)
        recording, _ = record(program_of(seed), *((torch.randn(4, SIZE, SIZE, generator=numbers) / 4).to(torch.bfloat16)))
        eliminate_dead(recording.graph)
        verify(sum_products(recording.graph))
        joined += sum(node.target == ONTO for node in recording.graph.nodes)
        for index, data in run(recording.graph, recording.inputs, recording.scalars).items():
            made, wanted = (one.view(torch.bfloat16).float() for one in (data, recording.expected[index]))
            largest = max(1.0, float(wanted.abs().max()))
            assert torch.allclose(made, wanted, rtol=5e-2, atol=3e-2 * largest), f"the program of seed {seed}"
    assert joined > PROGRAMS / 5, joined
