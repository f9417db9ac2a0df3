"""`replayed(function)`: records again what a function recorded before, without its Python. Imports torch, `ir_nodes` and parts
below it.

What a small step or a decoded token costs is mostly Python: the model's, autograd's, the optimizer's. The promise that a user
gives is that of CUDA graphs: the function has no effects but on tensors, and what it does follows from its arguments' layouts,
from arguments that are no tensors, and from tensors that stay where they are (parameters, gradients, a cache). Unlike with CUDA
graphs results are new tensors, arguments may lie anywhere, what is recorded around the function fuses with it, and it may be
replayed inside one recording as often as one likes. Two calls are recorded and compared before one is replayed, so a function
that does not keep the promise is most often found out, and runs as always.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Sequence, TypeVar

import torch
import torch._lazy
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ir_nodes import settings
from lazy_backend import api, core, orders
from lazy_backend.garbage import uncollected
from lazy_backend.questions import OtherAnswer, Question, Questions, ask
from lazy_backend.rates import changed, follow, same
from lazy_backend.recalled import Recorded, Stretch
from lazy_backend.returned import Refused, home, kept_elsewhere
from lazy_backend.watched import Watched

_TRIES = 8  # recordings of calls with arguments alike, before they run as always
_FORGIVEN = 64  # replays, after which failures before count no more
_KINDS_OF_CALLS = 64  # that are remembered; what was not called for the longest time goes first
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Given:
    """A call's arguments; ``leaves``: all of them, out of their collections."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    tensors: list[Tensor]


@dataclass(slots=True)
class Known:
    """What is known of calls with arguments alike."""

    calls: int = 0
    tries: int = 0
    served: int = 0
    recorded: Recorded | None = None
    asked: Sequence[Question] = ()  # of the arguments; with other answers calls are of another kind
    stretch: Stretch | None = None
    watched: Watched | None = None
    trains: bool = True  # may autograd or an optimizer run in it?
    state: list[Any] | None = None  # how the last call left what it found in modules and optimizers
    numbers: Sequence[Any] = ()  # the optimizers'
    followed: frozenset[int] = frozenset()  # the places of those that may change between replays

    def stands(self, watched: Watched, numbers: Sequence[Any], followed: frozenset[int]) -> bool:
        """Is all as the last call left it, but for the ``numbers`` that are ``followed``?"""
        return self.watched is not None and watched.state(self.trains) == self.state and (
            not self.trains or same(self.numbers, numbers, followed))


def replayed(function: F) -> F:
    """``function``, a module or any callable, whose later calls with arguments alike record what an earlier one did, in
    microseconds: no Python of it runs.

    The first call runs as always, the next two are recorded and compared, and from the fourth on they are replayed. What a call
    does to tensors (parameters, gradients, buffers, caches, generators) a replay does too, and it returns new tensors. Gradients
    that a call leaves behind keep their memory, so call ``zero_grad()`` inside, and optimizers need ``capturable=True`` or
    ``fused=True``, which keep their step counts on the device. Arguments alike are tensors of the same layouts and equal other
    values. What little the function asks of them (``if mask.all():``) each replay asks first; another answer is another kind of
    call. Calls run as always, and `torch._lazy.metrics` counts why (``ReplayRefused: ...``), where the function reads another
    value, seeds a generator, copies from the CPU, takes a number that changes, returns a tensor with a gradient's graph or
    replaces what it keeps; where modules' modes or gradients are not as the recorded call left them, it is recorded anew.
    Learning rates and the like of PyTorch's optimizers, which schedules change between calls, are followed (`rates`); other
    optimizers' have to stay. What little both calls copy alike, such as the list of ``x[:, [0, 2]]``, counts as numbers do:
    later calls are taken to use the same.
    """
    known: OrderedDict[Any, Known] = OrderedDict()
    called = function.forward if isinstance(function, nn.Module) else function

    @functools.wraps(called)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not may_replay():
            return function(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = Given(args, kwargs, leaves, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        try:
            kind: Any = (spec, mode(), *described(leaves))
            hash(kind)
        except (Refused, TypeError) as why:  # what has no hash tells nothing about its contents
            note(str(why))
            return function(*args, **kwargs)
        while True:
            one = known_of(known, kind)
            try:
                ask(one.asked, given.tensors)
                if one.stretch is not None and one.watched is not None:
                    numbers = one.watched.numbers() if one.trains else ()
                    if one.stands(one.watched, numbers, one.followed):
                        return replay(one, one.stretch, given.tensors, numbers)
            except OtherAnswer as other:
                kind = (kind, other.question)
                continue
            except Refused as why:
                note(str(why))
            one.stretch = None
            return run(function, given, one)

    return wrapper  # type: ignore[return-value]


def may_replay() -> bool:
    """Is this thread where recordings may be made and replayed?"""
    return (not core.step_ends.put_off and settings.current().mode == "lazy" and settings.enabled("replay")
            and not orders.asked() and torch._C._len_torch_dispatch_stack() == 0 and core.is_started())


def mode() -> tuple[Any, ...]:
    """What around a call decides what it records."""
    autocast = torch.is_autocast_enabled("lazysched")
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), core.get().current_device(),
            autocast and torch.get_autocast_dtype("lazysched"), autocast and torch.is_autocast_cache_enabled())


def described(leaves: Sequence[Any]) -> list[Any]:
    """What of arguments decides what is recorded. Raises Refused."""
    found: list[Any] = []
    homes: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            found.append((type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf))
            continue
        if type(leaf) not in (Tensor, nn.Parameter) or leaf.device.type != "lazysched" or leaf.layout is not torch.strided:
            raise Refused(f"an argument is a {type(leaf).__name__} on {leaf.device.type}: move it to the device before the call")
        if leaf.requires_grad and torch.is_grad_enabled():
            raise Refused("an argument requires a gradient: give it detached, or let the function find it as a parameter")
        alias = homes.setdefault(home(leaf), len(homes))
        found.append((leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.device, leaf.untyped_storage().nbytes(),
                      alias, leaf.is_conj(), leaf.is_neg()))
    return found


def known_of(known: OrderedDict[Any, Known], key: Any) -> Known:
    one = known.get(key)
    if one is None:
        one = known[key] = Known()
        if len(known) > _KINDS_OF_CALLS:
            known.popitem(last=False)
    known.move_to_end(key)
    return one


def replay(one: Known, stretch: Stretch, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
    if any(home(tensor) in stretch.others for tensor in tensors):
        raise Refused("an argument is memory that the function also finds elsewhere")
    out = stretch.replay(tensors, numbers)
    if stretch.ends:
        end_step()
    one.served += 1
    if one.served % _FORGIVEN == 0:
        one.tries = 0
    return out


def run(function: Callable[..., Any], given: Given, one: Known) -> Any:
    """Run the function; from the second call on look at what it records."""
    one.calls += 1
    if one.calls == 1 or one.tries >= _TRIES:
        return function(*given.args, **given.kwargs)
    one.tries += 1
    for index in range(core.device_count()):  # what it records is to be told apart
        api.run_recorded(index, "mark_step", "lazy_backend.replayed() looks at what a function records")
    before, why = Before(function, given, one), ""
    index = core.get().current_device()
    with Questions(index, given.tensors) as questions:
        out, ends = apart(function, given, one)
    try:
        ops, kept = before.recorded(questions.why), kept_elsewhere(out)
        learn(one, before, Recorded(index, given.tensors, out, kept, ops, ends, questions.asked))
    except Refused as refused:
        one.recorded, one.asked = None, ()
        why = str(refused)
        note(why)
    one.watched = before.watched
    one.trains = one.stretch is None or one.stretch.trains or bool(one.watched.optimizers)
    one.state, one.numbers = one.watched.state(one.trains), one.watched.numbers()
    if ends:
        end_step()
    if one.tries == _TRIES and one.stretch is None:
        name, told = getattr(function, "__qualname__", type(function).__name__), why.replace("\n", ": ")
        warnings.warn(f"lazysched: {name} is not replayed: {told or 'two calls in turn were never the same'} "
                      "(torch._lazy.metrics counts all reasons as ReplayRefused)", RuntimeWarning, stacklevel=3)
    return out


@uncollected()
def apart(function: Callable[..., Any], given: Given, one: Known) -> tuple[Any, bool]:
    """Run the function; what it returned, and whether it ended a step, which is put off."""
    core.step_ends.put_off, core.step_ends.asked = True, False
    try:
        return function(*given.args, **given.kwargs), core.step_ends.asked
    except BaseException:
        one.recorded = None
        raise
    finally:
        core.step_ends.put_off = False


class Before:
    """What held before a call: counters, and what it finds in modules and optimizers; as the last call left it?"""

    def __init__(self, function: Callable[..., Any], given: Given, one: Known) -> None:
        self.watched = Watched(function, given.leaves)
        self.earlier, self.numbers, self.host = one.numbers, self.watched.numbers(), self.watched.on_the_host()
        self.changed = changed(self.earlier, self.numbers, self.watched.names())
        self.same = one.stands(self.watched, self.numbers, self.changed)
        self.stats, self.last_end = api.stats(), (api.barriers() or [None])[-1]

    def recorded(self, why: str) -> int:
        """Ops recorded since; ``why``: what it asked was looked at. Raises Refused where they may not be all that it did."""
        after = api.stats()
        if any(after[name] != self.stats[name] for name in ("fallbacks", "flushes", "values_looked_at")):
            more = f": {why}" if why else ""
            raise Refused(f"it reads a value, marks a step, or an op of it runs at once{more}{self.first_end()}")
        if after["generators_settled"] != self.stats["generators_settled"]:
            raise Refused("it seeds a random generator, or asks for its state or sets it in another way than by "
                          "torch.lazysched.get_rng_state() and set_rng_state()")
        if self.watched.numbers() != self.numbers:
            raise Refused("it changes an optimizer's numbers (a learning rate); change them between its calls, or make them "
                          "tensors on the device")
        if self.watched.on_the_host() != self.host:
            raise Refused("it changes tensors on the CPU (an optimizer's step counts); use capturable=True or fused=True, "
                          "where the optimizer has one of them")
        return int(after["recorded"] - self.stats["recorded"])

    def first_end(self) -> str:
        """What ended the recording first since, and where, as a line; "" where nothing did."""
        since = list(takewhile(lambda one: one is not self.last_end, reversed(api.barriers())))
        return "".join(f"\n{one.reason} at {one.frame}" for one in since[-1:] if one.frame is not None)


def learn(one: Known, before: Before, recorded: Recorded) -> None:
    """Two calls one after the other that recorded the same can be replayed. Raises Refused."""
    if one.recorded is None:
        one.recorded, one.asked = recorded, recorded.asked
    elif not before.same:
        raise Refused("modules' modes, gradients or learning rates changed between two calls; call zero_grad() inside")
    else:
        old, new = one.recorded.trace.scalars(), recorded.trace.scalars()
        follows = follow(old, new, before.earlier, before.numbers, before.watched.names())
        recorded.check_same(one.recorded, follows)
        one.stretch, one.recorded, one.followed = recorded.stretch(follows), None, before.changed


def end_step() -> None:
    api.run_recorded(core.get().current_device(), "mark_step", "a step ended in a replayed function")
    torch._lazy.run_step_closures()


def note(why: str) -> None:
    core.get().count(f"ReplayRefused: {why.splitlines()[0]}")
