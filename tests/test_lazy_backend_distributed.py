"""Collectives on lazy tensors, over two ranks: numbers as with gloo on plain tensors, and recorded like any other op."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import lazy_backend
from tests import ranks

Group = Any
Case = Callable[[str, Group], list[torch.Tensor]]


def mine(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that differ between ranks."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) * (dist.get_rank() + 1) + dist.get_rank()
    return numbers.to(dtype).to(device)


def parts(device: str, *shape: int) -> list[torch.Tensor]:
    return [mine(device, *shape) + 100 * index for index in range(2)]


def all_reduces(device: str, group: Group) -> list[torch.Tensor]:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            results.append(mine(device, 3, 4, dtype=dtype))
            dist.all_reduce(results[-1], op=op, group=group)
    window = mine(device, 6, 4)
    dist.all_reduce(window[2:4], group=group)
    strided = mine(device, 2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(strided, group=group)
    twice = mine(device, 5)
    dist.all_reduce(twice, group=group)
    dist.all_reduce(twice.mul_(3), group=group)
    return [*results, window, strided, twice]


def broadcasts(device: str, group: Group) -> list[torch.Tensor]:
    results = [mine(device, 4) for _ in range(3)]
    dist.broadcast(results[0], 0, group=group)
    dist.broadcast(results[1], 1, group=group)
    dist.reduce(results[2], 1, group=group)
    if dist.get_rank() != 1:
        results.pop()  # what the other ranks are left with is not defined
    return results


def gathers(device: str, group: Group) -> list[torch.Tensor]:
    many = [torch.empty(2, 3, device=device) for _ in range(2)]
    dist.all_gather(many, mine(device, 2, 3), group=group)
    one = torch.empty(4, 3, device=device)
    dist.all_gather_into_tensor(one, mine(device, 2, 3), group=group)
    there = [torch.empty(3, device=device) for _ in range(2)] if dist.get_rank() == 1 else None
    dist.gather(mine(device, 3), there, dst=1, group=group)
    back = torch.empty(3, device=device)
    dist.scatter(back, parts(device, 3) if dist.get_rank() == 0 else None, src=0, group=group)
    return [*many, one, *(there or []), back]


def reduce_scatters(device: str, group: Group) -> list[torch.Tensor]:
    one, other, half = (torch.empty(3, device=device) for _ in range(3))
    dist.reduce_scatter(one, parts(device, 3), group=group)
    dist.reduce_scatter_tensor(other, mine(device, 6), group=group)
    dist.reduce_scatter_tensor(half, mine(device, 6), op=dist.ReduceOp.MAX, group=group)
    return [one, other, half]


def exchanges(device: str, group: Group) -> list[torch.Tensor]:
    rank = dist.get_rank()
    even, uneven = torch.empty(4, 2, device=device), torch.empty(4, device=device)
    dist.all_to_all_single(even, mine(device, 4, 2), group=group)
    sizes = [[1, 3], [1, 3]] if rank == 0 else [[3, 1], [3, 1]]
    dist.all_to_all_single(uneven, mine(device, 4), *sizes, group=group)
    there = torch.empty(3, device=device)
    if rank == 0:
        dist.send(mine(device, 3), 1, group=group, tag=5)
        dist.recv(there, 1, group=group)
    else:
        dist.recv(there, 0, group=group, tag=5)
        dist.send(there * 2, 0, group=group)
    peer, arrived = 1 - rank, torch.empty(2, device=device)
    both = [dist.P2POp(dist.isend, mine(device, 2), peer, group), dist.P2POp(dist.irecv, arrived, peer, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    halves = torch.empty(8, device=device)
    source = mine(device, 8)
    works = [dist.isend(source[4 * half : 4 * half + 4], peer, group) for half in (0, 1)]
    works += [dist.irecv(halves[4 * half : 4 * half + 4], peer, group) for half in (0, 1)]
    for work in works:
        work.wait()
    return [even, uneven, there, arrived, halves]


def asynchronous(device: str, group: Group) -> list[torch.Tensor]:
    x = mine(device, 4)
    work = dist.all_reduce(x, async_op=True, group=group)
    other = mine(device, 4).sin()
    work.wait()
    assert work.is_completed()
    return [x * other, x]


def coalesced(device: str, group: Group) -> list[torch.Tensor]:
    several = [mine(device, 3), mine(device, 5)]
    dist.all_reduce_coalesced(several, group=group)
    more = [mine(device, 2), mine(device, 7)]
    with dist._coalescing_manager(group=group):
        for one in more:
            dist.all_reduce(one, group=group)
    wide = [torch.empty(4, device=device), torch.empty(6, device=device)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for out, size in zip(wide, (2, 3)):
            dist.all_gather_into_tensor(out, mine(device, size), group=group)
    manager.wait()
    return [*several, *more, *wide]


def functionals(device: str, group: Group) -> list[torch.Tensor]:
    x = mine(device, 4, 2)
    results = [functional.all_reduce(x, "sum", group), functional.all_gather_tensor(x, 0, group),
               functional.reduce_scatter_tensor(x, "sum", 0, group), functional.broadcast(x, 1, group),
               functional.all_to_all_single(x, None, None, group)]
    waited = [functional.wait_tensor(one) for one in results]
    return [x, *waited, functional.all_reduce(x, "max", group) + 1]


CASES = [all_reduces, broadcasts, gathers, reduce_scatters, exchanges, asynchronous, coalesced, functionals]


def check_cases() -> None:
    plain = dist.new_group(backend="gloo")
    for case in CASES:
        wanted = case("cpu", plain)
        before = lazy_backend.stats()
        got = case("lazysched", dist.group.WORLD)
        after = lazy_backend.stats()
        assert after["flushes"] == before["flushes"], case.__name__  # all of it is recorded
        assert len(got) == len(wanted)
        for index, (ours, theirs) in enumerate(zip(got, wanted)):
            assert torch.equal(ours.cpu(), theirs), (case.__name__, index, ours, theirs)
        assert lazy_backend.stats()["fallbacks"] == before["fallbacks"], case.__name__


def check_the_rest() -> None:
    """Objects, groups, errors, gradients."""
    rank = dist.get_rank()
    x = mine("lazysched", 3)
    dist.all_reduce(x)
    # tensors on the CPU go through gloo at once, after what is recorded
    host = torch.full((2,), float(rank))
    dist.all_reduce(host)
    assert host.tolist() == [1.0, 1.0] and lazy_backend.barriers()[-1].kind.label == "collective"
    things: list[object] = [None, None]
    dist.all_gather_object(things, {"rank": rank})
    assert things == [{"rank": 0}, {"rank": 1}]
    said = [f"from {rank}"]
    dist.broadcast_object_list(said, 1)
    assert said == ["from 1"]
    dist.barrier()
    assert dist.barrier(async_op=True).wait()
    # lists
    outs = [torch.empty(2, device="lazysched") for _ in range(2)]
    dist.all_to_all(outs, [torch.full((2,), 10.0 * rank + peer, device="lazysched") for peer in range(2)])
    assert [out[0].item() for out in outs] == [rank, 10.0 + rank]
    # groups: of both ranks, and of each alone
    both, alone = dist.new_group([0, 1]), [dist.new_group([one]) for one in range(2)][rank]
    y, z = mine("lazysched", 3), mine("lazysched", 3)
    dist.all_reduce(y, group=both)
    dist.all_reduce(z, group=alone)
    assert y.tolist() == x.tolist() and z.tolist() == mine("cpu", 3).tolist()
    # errors at the user's line
    for wrong in (lambda: dist.all_reduce(torch.zeros(4, 4, device="lazysched")[:, 1]),
                  lambda: dist.all_reduce(torch.zeros(4, device="lazysched"), op=dist._make_nccl_premul_sum(2.0))):
        try:
            wrong()
        except (ValueError, NotImplementedError) as error:
            assert "contiguous" in str(error) or "multiply" in str(error)
        else:
            raise AssertionError("no error")
    # who sent it is known at once
    if rank == 0:
        dist.send(torch.full((2,), 7.0, device="lazysched"), 1)
        lazy_backend.mark_step()
    else:
        got = torch.zeros(2, device="lazysched")
        assert dist.recv(got) == 0 and got.tolist() == [7.0, 7.0]
    # gradients flow through the functional ones
    w = mine("lazysched", 4).requires_grad_()
    functional.all_gather_tensor_autograd(w, 0, dist.group.WORLD).mul(2).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [4.0] * 4
    # a recording that ends between start and wait: what is in flight goes on
    first, second = mine("lazysched", 4), mine("lazysched", 4)
    sent, works = mine("lazysched", 4), []
    works.append(dist.all_reduce(first, async_op=True))
    works.append(dist.isend(sent, 1 - rank))
    lazy_backend.mark_step()
    works.append(dist.irecv(second, 1 - rank))
    while not works[0].is_completed():
        pass
    for work in works:
        work.wait()
    assert first.tolist() == [3.0 * n + 1 for n in range(4)]
    assert second.tolist() == [n * (2.0 - rank) + 1 - rank for n in range(4)]
    # nobody reads it, and still it happens: the other rank waits
    before = lazy_backend.stats()["nodes_run"]
    dist.all_reduce(mine("lazysched", 2))
    lazy_backend.mark_step()
    assert lazy_backend.stats()["nodes_run"] > before


def check_all() -> None:
    check_cases()
    check_the_rest()


def test_every_collective_gives_gloos_numbers_and_is_recorded() -> None:
    ranks.run(check_all, backend="cpu:gloo,lazysched:lazysched")
