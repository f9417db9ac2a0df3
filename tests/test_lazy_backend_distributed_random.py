"""Random programs of collectives, mutations and segments under random schedules, on two ranks: numbers as on plain tensors."""

from __future__ import annotations

import contextlib
import random

import torch
import torch.distributed as dist

import lazy_backend
from lazy_backend import LazyScheduler, flush, segment
from tests import ranks
from tests.test_lazy_backend_distributed import Group, mine
from tests.test_lazy_backend_distributed_own_part import nothing_arrives

PROGRAMS = 40


def cut(rng: random.Random, x: torch.Tensor) -> None:
    """Sometimes end the recording of a lazy program, between the start of a collective and its wait."""
    if rng.random() < 0.3 and x.device.type == "lazysched":
        lazy_backend.mark_step()


def exchange(rng: random.Random, pool: list[torch.Tensor], group: Group) -> None:
    """One random collective on tensors of the pool."""
    x, peer = rng.choice(pool), 1 - dist.get_rank()
    kind = rng.randrange(9)
    if kind == 0:
        dist.all_reduce(x, group=group)
    elif kind == 1:
        work = dist.all_reduce(x[1:3], dist.ReduceOp.MAX, group=group, async_op=True)
        cut(rng, x)
        work.wait()
    elif kind == 2:
        dist.broadcast(x, rng.randrange(2), group=group)
    elif kind == 3:
        out = torch.empty(8, device=x.device)
        dist.all_gather(list(out.chunk(2)), x, group=group)
        pool.append(out[2:6].clone())
    elif kind == 4:
        pool.append(torch.empty_like(x))
        dist.all_to_all_single(pool[-1], x, group=group)
    elif kind == 5:
        pool.append(x[:2].repeat(2))
        dist.reduce_scatter(pool[-1][:2], list(x.chunk(2)), group=group)
    elif kind == 6:
        pool.append(torch.empty_like(x))
        works = [dist.isend(x, peer, group)]
        cut(rng, x)
        works.append(dist.irecv(pool[-1], peer, group))
        for work in works:
            work.wait()
    elif kind == 7:  # nobody holds what arrives, so a rank's own part may be read where it was sent from
        arrived = torch.empty_like(x)
        work = dist.all_to_all_single(arrived, x, group=group, async_op=True)
        pool.append(rng.choice(pool).cos())
        cut(rng, x)
        work.wait()
        parts = torch.cat([arrived[2:], arrived[:2] * 2])
        pool.append(parts if rng.random() < 0.5 else arrived.view(2, 2).t().reshape(4))
    else:
        several = list(dict.fromkeys([x, rng.choice(pool)]))
        dist.all_reduce_coalesced(several, group=group)


def compute(rng: random.Random, pool: list[torch.Tensor]) -> None:
    x, y = rng.choice(pool), rng.choice(pool)
    kind = rng.randrange(5)
    if kind == 0:
        pool.append(x * 0.5 + y)
    elif kind == 1:
        x.mul_(0.25)
    elif kind == 2:
        x[1:3] = y[:2].clone()
    elif kind == 3:
        x.copy_(y.sin())
    else:
        pool.append(x.cos())


def run(seed: int, device: str, group: Group, scheduled: bool) -> list[torch.Tensor]:
    rng = random.Random(seed)
    pool = [mine(device, 4) + index for index in range(3)]
    names = [f"part{index}" for index in range(rng.randint(2, 5))]
    order = rng.sample(names, rng.randint(0, len(names)))
    lazy = device == "lazysched"
    with LazyScheduler(schedule=order) if lazy and scheduled else contextlib.nullcontext():
        for name in names:
            with segment(name) if lazy and scheduled else contextlib.nullcontext():
                for _ in range(rng.randint(1, 6)):
                    exchange(rng, pool, group) if rng.random() < 0.5 else compute(rng, pool)
            reader = rng.randrange(8)
            if reader < 2 and (scheduled or reader == dist.get_rank()):  # without a schedule one rank alone may cut its program
                rng.choice(pool).sum().item()
            elif reader < 2:
                rng.choice(pool)
    return pool


def check() -> None:
    plain = dist.new_group(backend="gloo")
    nothing_arrives()
    seen: list[str] = []
    flush.watchers.append(lambda graph, remarks: seen.extend(node.name for node in graph.nodes))
    for index in range(5):
        segment(f"part{index}")  # the names of schedules
    for seed in range(PROGRAMS):
        scheduled = seed % 4 != 3
        wanted = run(seed, "cpu", plain, scheduled)
        got = run(seed, "lazysched", None, scheduled)
        for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(ours.cpu(), theirs), (seed, index, ours.cpu(), theirs)
    assert seen.count("all_to_all_others") > 5


def test_random_programs_equal_gloo_under_any_schedule() -> None:
    ranks.run(check)
