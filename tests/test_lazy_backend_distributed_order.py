"""In which order ranks start their collectives: schedules move them, and ranks that would not agree raise instead of hanging."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import lazy_backend
from lazy_backend import LazyScheduler, flush, register_segment, register_segment_backward_pre_hook, register_segments
from tests import ranks

Group = Any
orders: list[list[str]] = []


def note_orders() -> None:
    flush.before_first_run.append(lambda graph: orders.append([node.name for node in graph.nodes]))


class Exchange(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out


class Arch(torch.nn.Module):
    def func1(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.func2(self.func1(x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sdd, self.arch = Exchange(), Arch()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.arch(x).sum()
        return loss, self.sdd(table)


def step(model: Model, device: str) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    x, table = torch.randn(4, 4, device="cpu").to(device).requires_grad_(), torch.randn(4, 3).to(device)
    loss, exchanged = model(x, table)
    loss.backward()
    assert x.grad is not None
    result = exchanged * 2 + x.grad.sum()
    return [loss, result, x.grad]


def check_schedule() -> None:
    note_orders()
    model = Model()
    unscheduled = [t.cpu() for t in step(model, "lazysched")]
    register_segment(model.sdd.forward, name="sdd_fwd")
    register_segment(model.arch.func2, name="func2_bwd", is_backward=True)
    with LazyScheduler(schedule=["func2_bwd", "sdd_fwd"]) as late:
        after = [t.cpu() for t in step(model, "lazysched")]
    assert late.recorded_execution_order() == ["func2_bwd", "sdd_fwd"]
    register_segment_backward_pre_hook("func2_bwd", "sdd_fwd")
    with LazyScheduler() as scheduler:
        scheduled = [t.cpu() for t in step(model, "lazysched")]
    assert scheduler.recorded_execution_order() == ["sdd_fwd", "func2_bwd"] and not scheduler.refusals(), scheduler.report()
    for one, other, third in zip(unscheduled, after, scheduled):
        assert torch.equal(one, other) and torch.equal(one, third)
    first, second, third = orders
    starts = [order.index("all_to_all_single") for order in orders]
    waits = [order.index("wait") for order in orders]
    products = [[at for at, name in enumerate(order) if name == "mm"] for order in orders]
    assert starts[0] < products[0][1] < products[0][2] < waits[0], first  # recorded after the forward; waited for by its reader
    assert products[1][2] < starts[1] < waits[1], second
    assert products[2][0] < starts[2] < products[2][1] and third[waits[2] + 1] == "mul" and waits[2] > products[2][2], third


class Split(torch.nn.Module):
    """A collective that `issue` starts and `use` waits for, with `dense` between them."""

    def issue(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out = x * 2
        return out, dist.all_reduce(out, async_op=True)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x).tanh()

    def use(self, out: torch.Tensor, work: Any, dense: torch.Tensor) -> torch.Tensor:
        work.wait()
        return out.sin() + dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = self.dense(x)
        out, work = self.issue(x)
        return self.use(out, work, dense)


def check_issued_here_and_waited_for_there() -> None:
    model = Split()
    x = torch.arange(16.0).view(4, 4) / 16 * (1 + dist.get_rank())
    other = torch.arange(16.0).view(4, 4) / 16 * (2 - dist.get_rank())
    wanted = (2 * x + 2 * other).sin() + (x @ x).tanh()
    register_segments(model, {"issue": "issue", "dense": "dense", "use": "use"})
    seen = len(orders)
    for schedule in (["dense", "issue", "use"], ["issue", "dense", "use"]):
        with LazyScheduler(schedule=schedule, strict=True) as scheduler:
            assert torch.equal(model(x.to("lazysched")).cpu(), wanted)
        assert scheduler.recorded_execution_order() == schedule
    assert orders[seen:] == [["mm", "tanh", "mul", "all_reduce_", "wait", "sin", "add"],
                             ["mul", "all_reduce_", "mm", "tanh", "wait", "sin", "add"]]


def exchange(names: str, group: Group, extra: int = 0) -> torch.Tensor:
    """The collectives that the letters of ``names`` stand for, then ``extra`` ops, so that it is another recording."""
    x = torch.arange(8.0).to("lazysched")
    for name in names:
        if name == "r":
            dist.all_reduce(x, group=group)
        elif name == "b":
            dist.broadcast(x, 1, group=group)
        else:
            dist.all_to_all_single(torch.empty_like(x), x, group=group)
    for _ in range(extra):
        x = x + 1
    return x


def fails(names: str, group: Group, extra: int = 0) -> str:
    start = time.monotonic()
    try:
        exchange(names, group, extra).cpu()
    except RuntimeError as error:
        assert time.monotonic() - start < 20
        return str(error)
    raise AssertionError("no error")


def check_new_plans(group: Group) -> None:
    """Both ranks compile: both raise, before anything has started."""
    rank = dist.get_rank()
    exchange("rbr", group).cpu()
    told = fails("rrb" if rank else "rbb", group)
    assert "different orders" in told and "collective number 4" in told, told
    assert "rank 0:\n    4. broadcast(root 1) float32[8] at " in told and "rank 1:\n    4. all_reduce(SUM) float32[8] at " in told
    assert "test_lazy_backend_distributed_order.py" in told and "one order on every rank" in told


def check_cached(group: Group) -> None:
    """One rank compiles, the other's cache hits."""
    rank = dist.get_rank()
    for _ in range(3):
        exchange("rb", group).cpu()
    compiles = lazy_backend.stats()["compiles"]
    for extra in (1, 2):
        got = exchange("rb", group, extra * rank)
        assert got.tolist() == [2.0 * n + extra * rank for n in range(8)]
    assert lazy_backend.stats()["compiles"] - compiles == 2 * rank
    # ranks that cut their programs into other recordings
    x = exchange("r", group)
    if rank:
        x.cpu()
    dist.all_reduce(x, group=group)
    y = exchange("b", group)
    assert x[1].item() == 4 and y[1].item() == 1
    # another order against a cached one: whoever compiles finds it, and the other is told when the first has ended
    told = fails("ra", group, 7) if rank else fails("rb", group)
    assert "different orders" in told, told
    assert "rank 0:\n    14. broadcast(root 1) float32[8]" in told and "14. all_to_all_single() float32[8] at" in told, told


def check_all() -> None:
    check_schedule()
    check_issued_here_and_waited_for_there()
    groups = [dist.new_group() for _ in range(2)]
    check_new_plans(groups[0])
    check_cached(groups[1])
    sys.stdout.flush()
    os._exit(0)  # groups whose ranks disagree cannot be used any more, not even to say goodbye


def test_schedules_move_collectives_and_ranks_that_disagree_are_told() -> None:
    ranks.run(check_all)
