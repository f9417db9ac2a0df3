"""What is asked of each new recording's order, and what became of it. Imports torch, `barriers` and `lazy_backend` parts below.

Whatever is asked for is a part of every recording's key, so that no program serves that was compiled under other wishes.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from barriers.holding import Held
from barriers.hooks import ScheduleHook
from barriers.order import Ordered, order_segments
from barriers.recorded import Ask
from barriers.wishes import Wish
from ir_nodes import Graph, ops, settings
from ir_nodes.estimate import CPU, CUDA, Rates
from ir_nodes.locks import Lock
from lazy_backend import core, switches
from lazy_backend.entered import segments
from lazy_backend.segments import handle, on_hooks

_lock = Lock()
_numbers = itertools.count(1)
_key = 0
_state_read = False
_KEPT_GRAPHS = 16


@dataclass(frozen=True, slots=True)
class Demands:
    """What one scheduler asks for."""

    wishes: tuple[Wish, ...] = ()
    hooks: tuple[ScheduleHook, ...] = ()
    debug: bool = False  # compare with the program's order
    measure: bool = False  # time each segment

    def key(self) -> tuple[object, ...]:
        """The same for two schedulers that ask for the same."""
        pairs = tuple((wish.earlier, wish.later) for wish in self.wishes)
        return pairs, tuple(hook.number for hook in self.hooks), self.debug, self.measure

    def of(self, owner: int) -> Demands:
        """These for the calls under scheduler ``owner``."""
        wishes = tuple(replace(wish, owner=owner) for wish in self.wishes)
        return replace(self, wishes=wishes, hooks=tuple(replace(hook, owner=owner) for hook in self.hooks))


_demands: dict[int, Demands] = {}  # of the schedulers in force, by owner number
_owners: dict[tuple[object, ...], int] = {}
_hooks: dict[int, ScheduleHook] = {}  # those of every recording
_functions: weakref.WeakKeyDictionary[Ask, int] = weakref.WeakKeyDictionary()
_callables: dict[Ask, int] = {}
_reports: OrderedDict[int, Ordered] = OrderedDict()  # what became of each compiled recording's segments, the last used last


def owner_of(*what: object) -> int:
    """One number for schedulers that ask for the same, so that a `with` block in a loop compiles once."""
    with _lock:
        return _owners.setdefault(what, len(_owners) + 1)


def hook_of(ask: Ask, owner: int | None = None) -> ScheduleHook:
    """``ask`` as a schedule hook; the same function has the same number. Raises TypeError where it cannot be called."""
    if not callable(ask):
        raise TypeError(f"a schedule hook is a function of the recorded segments, got {ask!r}")
    known: Any = _functions if isinstance(ask, types.FunctionType) else _callables
    with _lock:
        number = known.setdefault(ask, next(_numbers))
    return ScheduleHook(ask, number, owner)


def register_schedule_hook(fn: Ask) -> RemovableHandle:
    """Ask ``fn`` about the order of every new recording: it gets a `Recorded` and answers a list of constraints, [] for none.

    Constraints are pairs (earlier, later), `Before`, `Early`, `Late` and `Overlap`; they name segments by object, by name or by
    call ("mlp#1"). What schedules and hooks between segments ask for goes first, and data flow before everything. A hook that
    fails is passed over with a warning. It runs when a recording is compiled, not when it runs again. Returns a handle whose
    ``remove()`` takes it away.
    """
    hook = hook_of(fn)
    place = next(_numbers)
    with _lock:
        _hooks[place] = hook
    renew_key()

    def remove() -> None:
        with _lock:
            _hooks.pop(place, None)
        renew_key()

    return handle(remove)


def enforce(owner: int, demands: Demands | None) -> None:
    """From now on recordings are ordered by ``demands`` too; None: no more."""
    with _lock:
        _demands.pop(owner, None)
        if demands is not None:
            _demands[owner] = demands
    renew_key()


def renew_key() -> None:
    wishes, hooks = wanted(), hooks_now()
    text = "\n".join([*(f"{wish.owner} {wish} {wish.moves.name}" for wish in wishes), *(f"{h.owner} {h.number}" for h in hooks)])
    text += "debug" * debugging() + "measure" * measuring() + switches.key() + settings.unusual()
    text += "a state was read" * (_state_read and settings.current().attention != "eager")
    global _key
    _key = hash(text) & (2**63 - 1) if text else 0
    if core.is_started():
        set_key(core.get())


def note_state_read() -> None:
    """The program has a generator's state, and may ask for the same numbers again, perhaps in another recording: checkpointed
    layers do, which have to drop what they dropped before. Kernels that draw otherwise than ATen's are not for it."""
    global _state_read
    if not _state_read:
        _state_read = True
        renew_key()


def state_was_read() -> bool:
    return _state_read


def set_key(native: ModuleType) -> None:
    native.set_schedule_key(_key)


def wanted() -> list[Wish]:
    with _lock:
        return [*segments.hooks(), *(wish for demands in _demands.values() for wish in demands.wishes)]


def asked() -> bool:
    """Does anybody ask for an order now?"""
    return bool(_demands or _hooks or segments.hooks())


def hooks_now() -> list[ScheduleHook]:
    with _lock:
        return [*_hooks.values(), *(hook for demands in _demands.values() for hook in demands.hooks)]


def debugging() -> bool:
    """Is the order of each new recording to be compared with the program's?"""
    with _lock:
        return any(demands.debug for demands in _demands.values())


def measuring() -> bool:
    """Is the time of each segment to be measured?"""
    with _lock:
        return any(demands.measure for demands in _demands.values())


class _Untouched(TorchDispatchMode):
    """While a recording is compiled nothing else can run: an error instead of waiting for ever."""

    def __enter__(self) -> Any:
        core.compiling.now = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        core.compiling.now = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(one, torch.Tensor) and one.device.type == "lazysched" for one in found):
            raise RuntimeError(f"{func} on a lazysched tensor: a schedule hook can't use the device's tensors, nothing runs yet")
        return func(*args, **(kwargs or {}))


def apply(graph: Graph, held: Held) -> int:
    """Order ``graph`` by all that is asked. Returns the number of its report, -1 where there is nothing to order.

    ``held``: what was taken out of it before.
    """
    if not held.waiting and all(node.segment is None and ops.info(node.target).kind != "collective" for node in graph.nodes):
        return -1
    hooks = hooks_now()
    if hooks:
        with _Untouched():
            report = order_segments(graph, wanted(), hooks, rates())
    else:
        report = order_segments(graph, wanted())
    report.recorded = held.recorded or report.recorded
    report.early, report.waiting = held.early, held.waiting
    with _lock:
        number = next(_numbers)
        _reports[number] = report
        if _demands:
            report.graph = graph
    return number


def rates() -> Rates:
    return CUDA if core.physical_is_cuda() else CPU


def report(number: int) -> Ordered | None:
    """The report of a program that has just run.

    The core keeps the programs that were used last, so the reports that were used last are those of all programs that it has.
    The last few keep their graph too, which takes memory.
    """
    if number < 0:
        return None
    with _lock:
        found = _reports.get(number)
        if found is not None:
            _reports.move_to_end(number)
        if len(_reports) > _KEPT_GRAPHS:
            _reports[next(itertools.islice(reversed(_reports), _KEPT_GRAPHS, None))].graph = None
        while len(_reports) > settings.current().cache_size * core.device_count():
            _reports.popitem(last=False)
        return found


core.at_start(set_key)
on_hooks.append(renew_key)
switches.changed.append(renew_key)
settings.changed.append(renew_key)
