"""The ops that collectives are recorded as, and what starts them on the physical device. Imports torch, `ir_nodes`,
`barriers.passes.inbox`, `core`.

Each collective is two nodes: one that starts it, and `wait`, recorded where the program waits for it, which the planner moves
right before the first reader. A recording may end between the two; what is in flight then is found by its memory. Both are
called by a program as ordinary ops: on CUDA a wait makes the current stream wait, on a CPU the calling thread. Sends and receives
have a third between the two, `launch`: those that a plan has side by side start together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, Protocol, Sequence

import torch
import torch.distributed as dist

from barriers.passes.inbox import FORMS
from ir_nodes import ops
from lazy_backend import core
from lazy_backend.distributed.inboxes import Inboxes
from lazy_backend.distributed.starts import STARTS, Landing, reduction

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
_SCHEMA = "(Tensor(a!)[] outs, Tensor[] ins, int[] numbers, str reduce, str group) -> ()"
"""``numbers``: the root; the peer and the tag; or, for an `all_to_all_single`, this rank, how many ranks there are, how many
split sizes of the output, these, and those of the input."""
_BRINGS_MEMORY = "(Tensor[] ins, int[] numbers, str reduce, str group) -> Tensor"
EXCHANGES = tuple(target.removeprefix("lazysched::") for target in FORMS)  # with each rank's own part, and without

Key = tuple[int, int]
"""Of a collective: its first tensor's storage, and where in it. What is only sent may be sent several times at once."""
Sizes = tuple[tuple[torch.dtype, int], ...]
"""Of tensors: dtypes and how many elements."""


class Group(Protocol):
    """What starting a collective needs of its process group."""

    inner: dist.ProcessGroup  # of the physical device
    agreement: Any  # is told what starts
    inboxes: Inboxes
    queue: list[Callable[[], Flight]]  # sends and receives that a program has reached, and `launch` starts together


@dataclass(slots=True)
class Flight:
    """A collective that has been started and not been waited for. ``land`` is called once it has arrived."""

    work: Any
    land: Callable[[], None] | None = None
    group: Group | None = None
    held: tuple[Tensors, Tensors] = ((), ())  # memory that nobody else may use yet, a CUDA graph that made it neither

    def let_go(self) -> None:
        pin(self.held, -1)
        self.held = (), ()

    def forgotten(self) -> bool:
        """Let go of what has arrived, if nothing is left to do then."""
        arrived = bool(not self.land and self.work and self.work.is_completed())
        if arrived:
            self.let_go()
        return arrived


def pin(held: tuple[Tensors, Tensors], by: int) -> None:
    if core.physical_is_cuda():
        for tensor in (*held[0], *held[1]):
            core.get().pin(tensor, by)


groups: dict[str, Group] = {}
"""Process groups by name, as recorded nodes name them."""
_flights: dict[Key, list[Flight]] = {}  # in the order of their starts


def reduction_name(op: Any) -> str:
    """"SUM" for ReduceOp.SUM. Raises NotImplementedError for what has a factor of its own."""
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        if op == reduction(name):
            return name
    raise NotImplementedError(f"lazysched records no {op}; multiply the tensor before an all_reduce with ReduceOp.SUM instead")


MOST_FLIGHTS = 256
SHOWN = 4  # tensors of a coalesced collective that its name tells one by one
POINT_TO_POINT = ("send", "recv")
_ALL_RANKS_ALIKE = ("all_reduce_", "broadcast_", "reduce_", "all_gather_single", "gather", "scatter", "reduce_scatter_single")


@functools.cache
def entry(name: str, outs: Sizes, ins: Sizes, numbers: tuple[int, ...], reduce: str) -> str:
    """A collective as every rank has to see it: "all_reduce(SUM) float32[1024]"."""
    name = "all_to_all_single" if name in EXCHANGES else name  # ranks may differ in that
    words = [reduce] if reduce else []
    if name in ("broadcast_", "reduce_", "gather", "scatter"):
        words.append(f"root {numbers[0]}")
    told = {"gather": ins, "all_gather_single": ins}.get(name, outs or ins)
    sized = name in _ALL_RANKS_ALIKE or (name == "all_to_all_single" and len(numbers) == 3)  # splits differ between ranks
    told, more = (told[:SHOWN], told[SHOWN:]) if sized else (told[:1], ())
    texts = [str(dtype).removeprefix("torch.") + (f"[{count}]" if sized else "") for dtype, count in told]
    texts += [f"and {sum(count for _, count in more)} elements in {len(more)} more"] if more else []
    return f"{name.removesuffix('_')}({', '.join(words)}) {', '.join(texts)}"


def start(begin: Callable[..., Any], outs: list[Tensor], ins: list[Tensor], numbers: list[int], reduce: str, group: str) -> None:
    """Runs when a program reaches the node."""
    home, name = groups[group], begin.__name__

    def go() -> Flight:
        inbox = home.inboxes.find(ins[0], outs[0], numbers) if name in EXCHANGES else None
        begun = inbox.exchange(ins[0], outs[0], name == EXCHANGES[0]) if inbox else begin(home.inner, outs, ins, numbers, reduce)
        return take_off(home, begun, outs, ins)

    if name in POINT_TO_POINT:
        home.queue.append(go)
        return
    announce(home, name, outs, ins, numbers, reduce)
    go()


def bring(begin: Callable[..., Any], ins: list[Tensor], numbers: list[int], reduce: str, group: str) -> Tensor:
    """Start an exchange of equal parts that arrives in memory of its own, which is returned: the group's inbox, if it has one,
    until the next exchange of this size."""
    home, name = groups[group], begin.__name__
    announce(home, name, ins, ins, numbers, reduce)  # as many bytes arrive as are sent
    inbox = home.inboxes.find(ins[0], ins[0], numbers)
    out = inbox.lend() if inbox else torch.empty_like(ins[0])
    begun = inbox.exchange(ins[0], None, name == EXCHANGES[0]) if inbox else begin(home.inner, [out], ins, numbers, reduce)
    take_off(home, begun, [out], ins)
    return out


def announce(home: Group, name: str, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> None:
    """Tell the group's agreement what starts now."""
    launch_queue(home)
    sizes = (tuple((t.dtype, t.numel()) for t in some) for some in (outs, ins))
    home.agreement.start(entry(name, *sizes, tuple(numbers), reduce))


def take_off(home: Group, begun: Any, outs: Tensors, ins: Tensors) -> Flight:
    """Note what has been started."""
    flight = Flight(*begun) if isinstance(begun, Landing) else Flight(begun)
    flight.group, flight.held = home, (outs, ins)
    pin(flight.held, 1)
    forget_arrived()
    _flights.setdefault(key(outs, ins), []).append(flight)
    return flight


def forget_arrived() -> None:
    """Where a program waits for little of what it starts, let go of what has arrived."""
    if len(_flights) < MOST_FLIGHTS:
        return
    for where, flights in list(_flights.items()):
        flights[:] = [flight for flight in flights if not flight.forgotten()]
        if not flights:
            del _flights[where]


def launch_queue(home: Group) -> None:
    """Start what is queued. NCCL runs what one group sends and receives one after the other, so that two ranks which both send
    first would wait for each other, unless it is started together."""
    queued, home.queue[:] = list(home.queue), []
    device = next((one for one in home.inner._device_types if one.type == "cuda"), None)
    if len(queued) < 2 or device is None:
        for go in queued:
            go()
        return
    home.inner._start_coalescing(device)
    flights = [go() for go in queued]
    work = home.inner._end_coalescing(device)
    for flight in flights:
        flight.work = work


def wait(outs: list[Tensor], ins: list[Tensor]) -> None:
    where = key(outs, ins)
    if where not in _flights:  # a start that failed, or one that is still queued
        for home in groups.values():
            launch_queue(home)
    if where not in _flights:
        return
    flight = _flights[where].pop(0)
    if not _flights[where]:
        del _flights[where]
    try:
        flight.work.wait()
    except RuntimeError:
        if flight.group is not None:
            flight.group.agreement.raise_if_broken()  # says more
        raise
    finally:
        flight.let_go()
    if flight.land is not None:
        flight.land()


def key(outs: Tensors, ins: Tensors) -> Key:
    first = (outs or ins)[0]
    return int(first.untyped_storage()._cdata), first.storage_offset()


def record(name: str, outs: Tensors, ins: Tensors, numbers: Sequence[int] = (), reduce: str = "", group: str = "") -> None:
    """Record the collective ``name`` on lazy tensors. It does not differentiate, like those of torch.distributed."""
    with torch._C._AutoDispatchBelowAutograd():
        getattr(torch.ops.lazysched, name)(outs, ins, numbers, reduce, group)
        if name in POINT_TO_POINT:
            torch.ops.lazysched.launch(outs, ins, group)


def record_wait(outs: Tensors, ins: Tensors) -> None:
    """Record that from here on the collective on these tensors, recorded or in flight, has arrived."""
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.lazysched.wait(outs, ins)


def has_arrived(outs: Tensors, ins: Tensors) -> bool:
    """Of a collective that has been started: need nobody wait for it?"""
    native = core.get()
    physical = [[native.lend(tensor, 0) for tensor in some] for some in (outs, ins)]
    return all(flight.work.is_completed() for flight in _flights.get(key(*physical), []))


_library = torch.library.Library("lazysched", "DEF")
for _begin in STARTS:
    _library.define(_begin.__name__ + _SCHEMA)
    for _key in ("CPU", "CUDA"):
        _library.impl(_begin.__name__, functools.partial(start, _begin), _key)
    _form = FORMS.get(f"lazysched::{_begin.__name__}", "").removeprefix("lazysched::")
    if _form:
        _library.define(_form + _BRINGS_MEMORY)
    for _key in ("CPU", "CUDA") if _form else ():
        _library.impl(_form, functools.partial(bring, _begin), _key)
_library.define("launch(Tensor[] outs, Tensor[] ins, str group) -> ()")
_library.define("wait(Tensor(a!)[] outs, Tensor[] ins) -> ()")
for _key in ("CPU", "CUDA"):
    _library.impl("launch", lambda outs, ins, group: launch_queue(groups[group]), _key)
    _library.impl("wait", wait, _key)
for _name in ("launch", "wait", *(begin.__name__ for begin in STARTS)):
    _library.impl(_name, lambda *args: None, "Meta")
assert all(ops.info(f"lazysched::{begin.__name__}").kind == "collective" for begin in STARTS)
