"""Exchanges without what a rank sends to itself, over two ranks: gloo's numbers, though that part never arrives."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import lazy_backend
from ir_nodes import Graph
from ir_nodes.remarks import Remarks
from lazy_backend import LazyScheduler, explain, flush, register_segment, register_segment_backward_hook
from lazy_backend.distributed import starts
from tests import ranks
from tests.test_lazy_backend_distributed import Group, mine

seen: list[tuple[Graph, Remarks]] = []


def nothing_arrives() -> None:
    """From now on a rank's own part of an exchange without it is NaN. For as long as the process lives."""
    whole = starts.all_to_all_single

    def without(pg: Any, outs: starts.Tensors, ins: starts.Tensors, numbers: list[int], reduce: str) -> starts.Landing:
        sizes = starts.splits(numbers)[0] or [outs[0].size(0) // numbers[1]] * numbers[1]
        return starts.Landing(whole(pg, outs, ins, numbers, reduce), lambda: outs[0].split(sizes)[numbers[0]].fill_(float("nan")))

    starts.all_to_all_single = without  # type: ignore[assignment]  # which only the exchange of others' parts looks up


def exchanged(x: torch.Tensor, group: Group, *sizes: list[int]) -> torch.Tensor:
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x, *sizes, group=group)
    return arrived


def side_by_side(device: str, group: Group) -> list[torch.Tensor]:
    """As a recommendation model arranges embeddings."""
    return [torch.cat(exchanged(mine(device, 4, 3).cos(), group).chunk(2), dim=1).to(torch.bfloat16)]


def uneven(device: str, group: Group) -> list[torch.Tensor]:
    """On rank 1 the own part lies elsewhere in what is sent than in what arrives."""
    outs, ins = ([1, 2], [1, 3]) if dist.get_rank() == 0 else ([3, 2], [2, 2])
    arrived = torch.empty(sum(outs), device=device)
    dist.all_to_all_single(arrived, mine(device, 4).sin(), outs, ins, group=group)
    first, second = arrived.split(outs)
    return [first * 2, second + 1, torch.cat([second, first]).cumsum(0)]


def one_part_only(device: str, group: Group) -> list[torch.Tensor]:
    rank = dist.get_rank()
    return [exchanged(mine(device, 4), group)[2 * part : 2 * part + 2] * 3 for part in (rank, 1 - rank)]


def permuted(device: str, group: Group) -> list[torch.Tensor]:
    """As tokens go to experts, and heads to ranks: a copy of all that arrives, in another order or type."""
    arrived = exchanged(mine(device, 4, 3).cos(), group)
    ordered = arrived.view(2, 2, 3).transpose(0, 1)
    return [ordered.reshape(2, 6), ordered.to(torch.bfloat16).sin(), arrived[1:].clone()]


def one_after_the_other(device: str, group: Group) -> list[torch.Tensor]:
    halves = exchanged(mine(device, 6, 2).sin(), group).chunk(2)
    back = exchanged(torch.cat([half.exp() for half in halves]), group).chunk(2)
    return [back[0] - back[1]]


def gradients(device: str, group: Group) -> list[torch.Tensor]:
    x = mine(device, 4, 2).requires_grad_()
    first, second = functional.all_to_all_single_autograd(x * 0.5, None, None, group).chunk(2)
    (first.sin() * second).sum().backward()
    assert x.grad is not None
    return [x.grad]


def asynchronous(device: str, group: Group) -> list[torch.Tensor]:
    x, arrived = mine(device, 4).sin(), torch.empty(4, device=device)
    work = dist.all_to_all_single(arrived, x, group=group, async_op=True)
    meanwhile = x.exp()
    work.wait()
    return [arrived[:2] * meanwhile[:2], arrived[2:] + 1]


WITHOUT: list[Callable[[str, Group], list[torch.Tensor]]] = [
    side_by_side, uneven, one_part_only, one_after_the_other, gradients, asynchronous]


def held(device: str, group: Group) -> list[torch.Tensor]:
    arrived = exchanged(mine(device, 4).sin(), group)
    return [arrived, arrived[:2] * 2]


def whole(device: str, group: Group) -> list[torch.Tensor]:
    return [exchanged(mine(device, 4, 2).sin(), group).view(2, 2, 2).transpose(0, 1).exp()]


def overwritten(device: str, group: Group) -> list[torch.Tensor]:
    x = mine(device, 4).sin()
    arrived = exchanged(x, group)
    x.mul_(2)
    return [arrived[:2].exp(), arrived[2:].exp(), x]


def waited_for_later(device: str, group: Group) -> list[torch.Tensor]:
    x, arrived = mine(device, 4).sin(), torch.empty(4, device=device)
    work = dist.all_to_all_single(arrived, x, group=group, async_op=True)
    if device == "lazysched":
        lazy_backend.mark_step()
    work.wait()
    return [arrived[:2] * 2, arrived[2:] * 2]


def one_rank_alone_can(device: str, group: Group) -> list[torch.Tensor]:
    """What one rank starts has to meet what the other does."""
    arrived = exchanged(mine(device, 4).sin(), group)
    halves = [half.exp() for half in arrived.chunk(2)]
    return [*halves, arrived] if dist.get_rank() else halves


WITH = [held, whole, overwritten, waited_for_later]


def left_out() -> int:
    lazy_backend.mark_step()
    count = sum(node.name == "all_to_all_others" for graph, _ in seen for node in graph.nodes)
    seen.clear()
    return count


def compare(case: Callable[[str, Group], list[torch.Tensor]], plain: Group) -> None:
    wanted = case("cpu", plain)
    for _ in range(2):  # compiled, then from the cache
        for ours, theirs in zip(case("lazysched", dist.group.WORLD), wanted, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, msg=f"{case.__name__}: {ours.cpu()} {theirs}")


def check_cases() -> None:
    plain = dist.new_group(backend="gloo")
    nothing_arrives()
    flush.watchers.append(lambda graph, remarks: seen.append((graph, remarks)))
    for case in WITHOUT:
        compare(case, plain)
        assert left_out(), case.__name__
    compare(permuted, plain)
    assert (left_out() > 0) == (flush.engine_name() == "triton")  # whose kernels concatenate as well as they copy
    for case in WITH:
        compare(case, plain)
        assert not left_out(), case.__name__
    compare(one_rank_alone_can, plain)
    assert left_out() == (dist.get_rank() == 0)
    told = str(explain(lambda: side_by_side("lazysched", None)))
    assert "a rank's own part is read where it was sent from, and not copied" in told
    assert "what arrives is held at the end" in str(explain(lambda: held("lazysched", None)))


def test_the_own_part_is_never_looked_for_where_it_would_arrive() -> None:
    ranks.run(check_cases)


def test_nor_by_kernels() -> None:
    ranks.run(check_cases, engine="triton")


class Model(torch.nn.Module):
    """Exchanges the next step's features at its begin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def arrange(self, arrived: torch.Tensor) -> torch.Tensor:
        return torch.cat(arrived.chunk(2), dim=1)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh().sum()

    def forward(self, x: torch.Tensor, following: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.arrange(exchanged(following.sin(), group))
        return self.compute(x), features


def train(device: str, group: Group, prepare: Callable[[Model], None] = lambda model: None) -> torch.Tensor:
    torch.manual_seed(0)
    model = Model().to(device)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = mine(device, 2, 6).sin(), []
    for step in range(4):
        loss, x = model(x, mine(device, 4, 3) + step, group)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)  # float32, as they were computed: other orders of summation are other last bits


def check_schedules() -> None:
    plain = dist.new_group(backend="gloo")
    nothing_arrives()
    flush.watchers.append(lambda graph, remarks: seen.append((graph, remarks)))
    wanted = train("cpu", plain)

    def late(name: str, model: Model) -> None:
        register_segment(model.compute, name=f"{name}_bwd", is_backward=True)
        register_segment(model.arrange, name=f"{name}_arrange")
        register_segment_backward_hook(f"{name}_bwd", f"{name}_arrange")

    torch.testing.assert_close(train("lazysched", None, functools.partial(late, "a")), wanted)
    assert left_out()
    with LazyScheduler(debug_mode=True) as scheduler:  # which compares two orders of all that was recorded
        torch.testing.assert_close(train("lazysched", None, functools.partial(late, "b")), wanted)
        assert not left_out()
    assert "other numbers" not in scheduler.report()


def test_under_schedules_and_in_debug_mode() -> None:
    ranks.run(check_schedules)


class Asked:
    """Stands for NCCL's group: notes what it is asked for."""

    def alltoall(self, outs: list[torch.Tensor], ins: list[torch.Tensor], options: Any) -> tuple[list[list[int]], ...]:
        return tuple([[one.storage_offset(), one.numel()] for one in some] for some in (outs, ins))

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, outs: list[int], ins: list[int], options: Any) -> Any:
        return outs, ins


def test_what_nccl_is_asked_for() -> None:
    """Always sends and receives of parts of given sizes, so that ranks meet whichever form they start."""
    def tensors(*rows: int) -> list[list[torch.Tensor]]:
        return [[torch.empty(one, 5, device="meta")] for one in rows]

    begin: Callable[..., Any] = starts.all_to_all_others
    assert begin(Asked(), *tensors(6, 6), [1, 3, 0], "") == ([[0, 10], [10, 0], [20, 10]],) * 2
    sent = begin(Asked(), *tensors(4, 6), [0, 2, 2, 1, 3, 1, 5], "")
    assert sent == ([[0, 0], [5, 15]], [[0, 0], [5, 25]])
    begin = starts.all_to_all_single
    assert begin(Asked(), *tensors(6, 6), [1, 3, 0], "") == ([2, 2, 2], [2, 2, 2])
    assert begin(Asked(), *tensors(4, 6), [0, 2, 2, 1, 3, 1, 5], "") == ([1, 3], [1, 5])
