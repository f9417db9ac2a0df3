"""Exchanges that ranks push into each other's memory by the GPUs' copy engines. Imports torch, `ir_nodes.settings`,
`barriers.passes.inbox` and `lazy_backend.core`.

NCCL's exchange is a kernel: it takes multiprocessors from what runs beside it. Where all ranks of a group have GPUs of one host
that reach each other's memory, PyTorch's symmetric memory gives each rank an inbox that the others write to with plain copies,
which copy engines do. Whether a group can, and which exchanges do, follows from what all ranks know alike: none may push where
another waits for NCCL.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Callable, Sequence, TypeVar

import torch
import torch.distributed as dist

from barriers.passes.inbox import LEAST
from ir_nodes import settings
from lazy_backend import core

Tensor = torch.Tensor
T = TypeVar("T")
MOST_RANKS = 8
"""A rank's copies to the others follow one another."""
MOST_SIZES = 8
"""Of a group's exchanges that have an inbox, the first ones: an inbox stays for as long as its group."""
NOTHING = "-"
PAUSE = 0.002
"""Seconds between two looks at what other ranks say, when a group first exchanges something of a size."""


class Pushed:
    """What an exchange that is under way is waited for with, as c10d's work is."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        """The current stream waits."""
        torch.cuda.current_stream().wait_event(self._done)

    def is_completed(self) -> bool:
        return self._done.query()


class Inbox:
    """``nbytes`` on this rank's GPU into which others push, and theirs. Made by all ranks of a group at once."""

    def __init__(self, name: str, rank: int, size: int, memory: Tensor) -> None:
        """``name``: the group's for PyTorch's symmetric memory; ``memory``: the bytes, allocated there."""
        self._handle = torch._C._distributed_c10d._SymmetricMemory.rendezvous(memory, name)
        self._rank, self._size, self._nbytes, self._part = rank, size, memory.numel(), memory.numel() // size
        self._own = memory
        self._others = [(rank + step) % size for step in range(1, size)]
        self._theirs = {peer: self._seen(peer, self._part, rank * self._part) for peer in self._others}
        self._stream = torch.cuda.Stream(memory.device, priority=-1)  # its waits are tiny kernels, which need not queue
        self._reader = torch.cuda.current_stream(memory.device)

    def _seen(self, rank: int, count: int, first: int) -> Tensor:
        return self._handle.get_buffer(rank, (count,), torch.uint8, first)

    def lend(self) -> Tensor:
        """The inbox as a tensor of bytes with a storage of its own."""
        return self._seen(self._rank, self._nbytes, 0)

    def exchange(self, sent: Tensor, out: Tensor | None, own: bool) -> Pushed:
        """Start to push the parts of ``sent`` to their ranks. ``out``: where what arrives is copied to; None: it stays in the
        inbox until the next exchange. ``own``: this rank's own part arrives, too."""
        current, stream = torch.cuda.current_stream(self._own.device), self._stream
        for reader in {current, self._reader}:  # what arrived before has been read then
            stream.wait_stream(reader)
        self._reader = current
        parts, arrived = as_bytes(sent).split(self._part), self._own.split(self._part)
        with torch.cuda.stream(stream):
            self._handle.barrier(channel=0)
            for peer in self._others:
                self._theirs[peer].copy_(parts[peer])
            self._handle.barrier(channel=1)
            to = arrived if out is None else as_bytes(out).split(self._part)
            if own:
                to[self._rank].copy_(parts[self._rank])
            for peer in self._others if out is not None else ():
                to[peer].copy_(arrived[peer])
            done = torch.cuda.Event()
            done.record(stream)
        return Pushed(done)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class Inboxes:
    """Those of a process group, one for each size of exchange."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        """``group``: of the physical device; ``store``: one that only this object uses, on every rank the same."""
        self._group, self._store, self._rank, self._size, self._timeout = group, store, rank, size, timeout
        self._name = f"lazysched inboxes of {name}"
        self._refusal: str | None = None
        self._made: dict[int, Inbox | None] = {}

    def find(self, sent: Tensor, out: Tensor, numbers: Sequence[int]) -> Inbox | None:
        """What an exchange goes through; None: NCCL, which also says what is wrong with it. ``numbers``: as recorded. All ranks
        ask alike. The first call for a size waits for the other ranks' and raises RuntimeError where one does not come."""
        nbytes = sent.nbytes
        if sent.device.type != "cuda" or not worth_pushing(sent, out, numbers, self._size):
            return None
        if nbytes not in self._made and len(self._made) < MOST_SIZES:
            self._made[nbytes] = None if self.refusal(sent.device) else self._make(nbytes, sent.device)
        return self._made.get(nbytes)

    def refusal(self, device: torch.device) -> str:
        """Why this group's ranks do not push, in a rank's words; "": they do. The first call asks all ranks."""
        if self._refusal is None:
            places = self._say("place", f"{host()} {torch.cuda.get_device_properties(device).uuid}")
            reasons = self._say("reason", unable(places, self._rank, reach(device)))
            self._refusal = next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")
            if self._refusal:
                core.get().count(f"CopyEnginesRefused: {self._refusal}")
            else:
                torch._C._distributed_c10d._register_process_group(self._name, self._group)
        return self._refusal

    def _make(self, nbytes: int, device: torch.device) -> Inbox | None:
        """None where a rank fails: then all leave exchanges of this size to NCCL."""
        allocate = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
        memory = self._together(f"memory {nbytes}", lambda: allocate((nbytes,), (1,), torch.uint8, device, self._name))
        if memory is None:
            return None
        return self._together(f"inbox {nbytes}", lambda: Inbox(self._name, self._rank, self._size, memory))

    def _together(self, what: str, make: Callable[[], T]) -> T | None:
        """What ``make`` gives on this rank, if it fails on none."""
        made, why = None, ""
        try:
            made = make()
        except RuntimeError as error:  # such as no memory left, or a sandbox in which processes share none
            why = str(error).partition("\n")[0] or "an error without words"
        reasons = self._say(what, why)
        for rank, reason in enumerate(reasons):
            if reason:
                core.get().count(f"CopyEnginesRefused: rank {rank}, {what}: {reason}")
        return None if any(reasons) else made

    def _say(self, what: str, mine: str) -> list[str]:
        """What every rank says. Waits for those that have not come here yet."""
        self._store.set(f"{what}/{self._rank}", mine or NOTHING)
        return [self._heard(f"{what}/{rank}", rank) for rank in range(self._size)]

    def _heard(self, key: str, rank: int) -> str:
        """Looks again and again: who waits in the store keeps this process's other threads from it."""
        end = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise RuntimeError(f"rank {self._rank} waits in an exchange that rank {rank} has not begun in {self._timeout}")
            time.sleep(PAUSE)
        return self._store.get(key).decode().removeprefix(NOTHING)

    def close(self) -> None:
        if self._refusal == "":
            torch._C._distributed_c10d._unregister_process_group(self._name)
        self._made.clear()


def worth_pushing(sent: Tensor, out: Tensor, numbers: Sequence[int], ranks: int) -> bool:
    equal = len(numbers) == 3 and out.nbytes == sent.nbytes and sent.size(0) % ranks == 0
    return equal and sent.nbytes >= LEAST and 1 < ranks <= MOST_RANKS


def host() -> str:
    """This machine, since it started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def reach(device: torch.device) -> dict[str, bool]:
    """The GPUs that this process sees, and whether ``device`` reaches their memory."""
    own = device.index
    return {str(torch.cuda.get_device_properties(other).uuid): other == own or torch.cuda.can_device_access_peer(own, other)
            for other in range(torch.cuda.device_count())}


def unable(places: Sequence[str], rank: int, reached: dict[str, bool]) -> str:
    """Why ``rank`` can't push; "": it can. ``places``: host and GPU of each rank."""
    hosts, gpus = zip(*(place.rsplit(" ", 1) for place in places))
    if not settings.enabled("copy_engines"):
        return "LAZYSCHED_DISABLE names copy_engines"
    if len(set(hosts)) > 1:
        return f"ranks run on {len(set(hosts))} hosts"
    if len(set(gpus)) < len(gpus):
        return "two ranks share a GPU"
    for other, gpu in enumerate(gpus):
        if gpu not in reached:
            return f"the GPU of rank {other} is not visible to this process"
        if not reached[gpu]:
            return f"its GPU does not reach the memory of rank {other}'s"
    return ""
