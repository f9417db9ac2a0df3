"""Exchanges that bring their own memory, over two ranks: gloo's numbers on a CPU, and what ranks push where they have GPUs."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Callable

import pytest
import torch
import torch._lazy.metrics
import torch.distributed as dist

import lazy_backend
from barriers.passes import inbox
from ir_nodes import settings
from lazy_backend import flush
from lazy_backend.distributed import collectives, inboxes
from lazy_backend.distributed.inboxes import Inboxes, unable, worth_pushing
from tests import ranks
from tests.test_lazy_backend_distributed import Group, mine
from tests.test_lazy_backend_distributed_own_part import exchanged

BROUGHT = ("all_to_all_inbox", "all_to_all_inbox_others")
NUMBER = 64


def summed(device: str, group: Group) -> list[torch.Tensor]:
    """Read as a whole, so that the own part arrives, too."""
    return [exchanged(mine(device, NUMBER, 2).sin(), group).view(2, -1).t().exp()]


def arranged(device: str, group: Group) -> list[torch.Tensor]:
    return [half.to(torch.bfloat16) for half in exchanged(mine(device, NUMBER, 3).cos(), group).chunk(2)]


def there_and_back(device: str, group: Group) -> list[torch.Tensor]:
    """As in a model with trained embeddings, twice of one size; then of another type and size."""
    there = exchanged(mine(device, NUMBER, 2).sin(), group).view(2, -1).t().exp()
    back = exchanged(there.t().reshape(NUMBER, 2).contiguous(), group).view(2, -1).cumsum(1)
    half = exchanged(mine(device, NUMBER).double().cos(), group).view(2, -1).t() * 2
    return [there, back, half]


def beside(device: str, group: Group) -> list[torch.Tensor]:
    """Two of a size under way at once, so that the first has memory of its own."""
    x, one, other = mine(device, NUMBER).sin(), torch.empty(NUMBER, device=device), torch.empty(NUMBER, device=device)
    first = dist.all_to_all_single(one, x, group=group, async_op=True)
    second = dist.all_to_all_single(other, x * 3, group=group, async_op=True)
    first.wait()
    second.wait()
    return [one.view(2, -1).t() + 1, other.view(2, -1).t() + 1]


def held(device: str, group: Group) -> list[torch.Tensor]:
    """What a program keeps is not overwritten by the next exchange."""
    arrived = exchanged(mine(device, NUMBER, 2).sin(), group)
    again = exchanged(mine(device, NUMBER, 2).cos(), group)
    return [arrived, again.view(2, -1).t().exp()]


def over_recordings(device: str, group: Group) -> list[torch.Tensor]:
    x, arrived = mine(device, NUMBER).sin(), torch.empty(NUMBER, device=device)
    work = dist.all_to_all_single(arrived, x, group=group, async_op=True)
    if device == "lazysched":
        lazy_backend.mark_step()
    other = exchanged(x * 2, group).view(2, -1).t() + 1
    work.wait()
    return [arrived * 1, other]


def one_rank_alone_can(device: str, group: Group) -> list[torch.Tensor]:
    arrived = exchanged(mine(device, NUMBER).sin(), group)
    turned = arrived.view(2, -1).t().exp()
    return [turned, arrived] if dist.get_rank() else [turned]


CASES: dict[Callable[[str, Group], list[torch.Tensor]], int] = {
    summed: 1, arranged: 1, there_and_back: 3, beside: 1, held: 1, over_recordings: 1}  # fmt: skip
"""How many of their exchanges bring their memory."""


def check_cases() -> None:
    brought: list[str] = []
    flush.watchers.append(lambda graph, remarks: brought.extend(node.name for node in graph.nodes if node.name in BROUGHT))
    inbox.LEAST = inboxes.LEAST = 1
    plain = dist.new_group(backend="gloo")
    for case in (*CASES, one_rank_alone_can):
        wanted = case("cpu", plain)
        for _ in range(6):  # compiled, from the cache, as a CUDA graph
            got = case("lazysched", dist.group.WORLD)
            lazy_backend.mark_step()
            for ours, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, msg=f"{case.__name__}: {ours.cpu()} {theirs}")
        wanted_count = CASES.get(case, 1 - dist.get_rank())
        assert len(brought) == wanted_count, f"{case.__name__}: {brought}"
        brought.clear()
    home = collectives.groups[dist.group.WORLD.group_name]
    assert len(home.inboxes._made) <= inboxes.MOST_SIZES
    if lazy_backend.core.physical_is_cuda():
        assert home.inboxes.refusal(torch.device("cuda", dist.get_rank())) == ""
        assert home.inboxes._made and all(home.inboxes._made.values())


def test_exchanges_that_bring_their_memory() -> None:
    ranks.run(check_cases)


def test_kernels_read_them() -> None:
    ranks.run(check_cases, engine="triton")


def test_without_copy_engines() -> None:
    ranks.run(check_disabled, disable=("copy_engines",))


def check_disabled() -> None:
    brought: list[str] = []
    flush.watchers.append(lambda graph, remarks: brought.extend(node.name for node in graph.nodes if node.name in BROUGHT))
    inbox.LEAST = inboxes.LEAST = 1
    plain = dist.new_group(backend="gloo")
    for ours, theirs in zip(there_and_back("lazysched", dist.group.WORLD), there_and_back("cpu", plain)):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert not brought


class Sent(torch.Tensor):
    """A tensor without memory that says it lies on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def test_a_program_of_many_sizes_keeps_few_inboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    parties = Inboxes(None, dist.HashStore(), 0, 2, timedelta(1), "g")  # type: ignore[arg-type]
    monkeypatch.setattr(parties, "refusal", lambda device: "")
    monkeypatch.setattr(parties, "_make", lambda nbytes, device: nbytes)
    sent = [torch.empty(inboxes.LEAST + 2 * number, device="meta").as_subclass(Sent) for number in range(20)]
    found = [parties.find(one, one, [0, 2, 0]) for one in (*sent, sent[3])]
    assert found == [*(one.nbytes for one in sent[:inboxes.MOST_SIZES]), *[None] * (20 - inboxes.MOST_SIZES), sent[3].nbytes]


def test_what_fails_on_one_rank_is_made_on_none() -> None:
    store, found = dist.HashStore(), {}
    torch.ones(1, device="lazysched")  # starts the core, whose metrics count why

    def make(rank: int) -> str:
        if rank:
            raise RuntimeError("processes share no memory here\nand more")
        return "inbox"

    def run(rank: int) -> None:
        party = Inboxes(None, store, rank, 2, timedelta(seconds=20), "g")  # type: ignore[arg-type]
        found[rank] = [party._together("one", lambda: "inbox"), party._together("other", lambda: make(rank))]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: ["inbox", None], 1: ["inbox", None]}
    name = "CopyEnginesRefused: rank 1, other: processes share no memory here"
    assert torch._lazy.metrics.counter_value(name) == 2


HOST = ["a/1 gpu0", "a/1 gpu1"]


@pytest.mark.parametrize("places, reached, reason", [
    (HOST, {"gpu0": True, "gpu1": True}, ""),
    (["a/1 gpu0", "b/1 gpu1"], {"gpu0": True, "gpu1": True}, "ranks run on 2 hosts"),
    (["a/1 gpu0", "a/1 gpu0"], {"gpu0": True}, "two ranks share a GPU"),
    (HOST, {"gpu0": True}, "the GPU of rank 1 is not visible to this process"),
    (HOST, {"gpu0": True, "gpu1": False}, "its GPU does not reach the memory of rank 1's"),
])  # fmt: skip
def test_who_can_push(places: list[str], reached: dict[str, bool], reason: str) -> None:
    assert unable(places, 0, reached) == reason
    with settings.override(disable=frozenset(("copy_engines",))):
        assert unable(HOST, 0, {"gpu0": True, "gpu1": True}) == "LAZYSCHED_DISABLE names copy_engines"


def test_ranks_hear_one_another_and_do_not_wait_for_ever() -> None:
    store, heard = dist.HashStore(), {}
    parties = [Inboxes(None, store, rank, 2, timedelta(seconds=20), "g") for rank in range(2)]  # type: ignore[arg-type]

    def say(rank: int) -> None:
        heard[rank] = parties[rank]._say("reason", "" if rank else "no GPU")

    threads = [threading.Thread(target=say, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {0: ["no GPU", ""], 1: ["no GPU", ""]}
    alone = Inboxes(None, store, 0, 2, timedelta(seconds=0.01), "g")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="rank 0 waits in an exchange that rank 1 has not begun"):
        alone._say("other", "")


def test_exchanges_that_go_through_the_library() -> None:
    """Those of unequal parts, small ones, and those of too many ranks."""
    x, small = torch.empty(1 << 22, 9, device="meta"), torch.empty(1 << 21, device="meta")
    assert worth_pushing(x, x, [0, 2, 0], 2) and worth_pushing(x, x, [0, 8, 0], 8)
    assert not worth_pushing(x, x, [0, 2, 2, 1, 1, 1, 1], 2)
    assert not worth_pushing(x, x, [0, 16, 0], 16)
    assert not worth_pushing(x, x[:-1], [0, 2, 0], 2)
    assert not worth_pushing(x[:-1], x[:-1], [0, 2, 0], 2)
    assert not worth_pushing(small, small, [0, 2, 0], 2)
