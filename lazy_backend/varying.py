"""Finds ops whose sizes are new in every recording, so that they run at once. Imports torch, `ir_nodes.settings` and `schema`.

A program that decodes text appends to its tokens, to a mask or to a cache: a few ops see other sizes with each token, and sizes
are part of a recording's key. Recorded, these ops would have every token's recording compiled anew. Run at once, they leave
recordings between them that repeat. Training is left alone: its recordings hold backward, and a new size there changes nearly
all ops. An op is known by the user's line that calls it, so none is found where lines are not noted (LAZYSCHED_FRAMES=0), and by
all its sizes that do not grow: a library's line that one model's cache grows at is another model's, too, and its prompts'.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch

from ir_nodes import settings
from lazy_backend import schema
from lazy_backend.schema import ArgKind

PATIENCE = 3
"""Recordings with new sizes of an op, before its next new sizes run at once."""
FEW, SMALL_SHARE = 3, 0.25
"""Ops of a recording: where more are new, it is another program, or one whose sizes all changed."""
MOST_LINES = 20000
LATEST = 8
"""Calls at a line among which the one is looked for that a new call has grown from."""

Site = tuple[str, str]  # op, and "file:line in function"
Words = tuple[Any, ...]  # what decides a call's shapes, in the order of its arguments: types, sizes, strides, offsets, constants
Instr = tuple[str, int, int, int, int, int, str, int, int, int]
Growth = tuple[tuple[int, ...], Words]  # the places of the words that are others each time, and the words that are the same
_TENSORS = (ArgKind.TENSOR, ArgKind.TENSOR_LIST, ArgKind.OPT_TENSOR_LIST)
_NUMBER = "a number"
_LIBRARIES = ("/torch/", "/lazy_backend/", "/contextlib.py")  # as in csrc/frames.c
_INTERNAL = ("<frozen", "<interpreter", "<shim")


@dataclass(slots=True)
class Seen:
    """The calls at a line: hashes of all of them, as there may be many, and the latest themselves."""

    hashes: set[int] = field(default_factory=set)
    latest: deque[Words] = field(default_factory=lambda: deque(maxlen=LATEST))

    def add(self, call: Words) -> None:
        if hash(call) not in self.hashes:
            self.hashes.add(hash(call))
            self.latest.append(call)


_known: dict[Site, Seen] = {}
_grown: dict[Site, Counter[Growth]] = defaultdict(Counter)  # recordings that held new ones, while most of the recording was known


class Recording(Protocol):
    """See `trace.Recording`."""

    def instrs(self) -> list[Instr]: ...
    def args(self) -> list[tuple[int, int, int, Any]]: ...
    def operands(self) -> list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int, bool]]: ...


def note(recording: Recording) -> None:
    """Looks at a recording that is about to be compiled: which of its ops were there before with other sizes?"""
    if torch.is_grad_enabled() or not settings.enabled("varying"):
        return
    instrs = recording.instrs()
    if any(backward >= 0 or segment for *_, backward, segment in instrs):
        return
    calls = list(calls_of(instrs, recording))
    fresh = [(site, call) for site, call in calls if site not in _known or hash(call) not in _known[site].hashes]
    same_program = all(site in _known for site, _ in calls)
    if same_program and len(fresh) < len(calls) and len(fresh) <= max(FEW, SMALL_SHARE * len(calls)):
        for site, grown in {(site, growth(call, _known[site].latest)) for site, call in fresh}:
            if grown:
                _grown[site][grown] += 1
    if len(_known) > MOST_LINES:
        _known.clear()
    for site, call in fresh:
        _known.setdefault(site, Seen()).add(call)


def calls_of(instrs: Iterable[Instr], recording: Recording) -> Iterator[tuple[Site, Words]]:
    """The recorded ops whose line is known, and what decides their shapes."""
    args, operands = recording.args(), recording.operands()
    for target, first, many, _, _, _, place, *_ in instrs:
        if place:
            given = [recorded(operands, *arg) for arg in args[first : first + many]]
            yield (target, place), words(target, given)


def recorded(operands: list[tuple[Any, ...]], kind: int, first: int, count: int, value: Any) -> Any:
    """A recorded argument: a layout, a list of such, a constant, or `_NUMBER` for what a program takes as a number."""
    if kind in _TENSORS:
        given = [tuple(operand[1:5]) if operand[0] >= 0 else None for operand in operands[first : first + count]]
        return given[0] if kind == ArgKind.TENSOR else given
    return value if kind == ArgKind.CONST else _NUMBER


def called(arg: Any) -> Any:
    """An argument of an op that is called, as `recorded` gives it."""
    if isinstance(arg, torch.Tensor):
        host = arg.device.type == "cpu" and not arg.dim()
        return _NUMBER if host else (arg.dtype, tuple(arg.shape), arg.stride(), arg.storage_offset())
    return [called(one) for one in arg] if isinstance(arg, (list, tuple)) else arg


def words(target: str, given: list[Any]) -> Words:
    """``given``: arguments as `recorded` and `called` give them. Numbers that a program takes are left out."""
    found: list[Any] = []
    for kind, one in zip(_kinds(target), given, strict=True):
        if kind in _TENSORS or kind == ArgKind.CONST:
            _flatten(one, found)
    return tuple(found)


@functools.cache
def _kinds(target: str) -> list[int]:
    return [kind for kind, _ in schema.read(target).args]


def _flatten(one: Any, found: list[Any]) -> None:
    if isinstance(one, (list, tuple)):
        found.append(str(len(one)))  # a string: a list that is longer has not the same words elsewhere
        for part in one:
            _flatten(part, found)
    else:
        found.append(one if one is None or isinstance(one, (int, torch.dtype)) else repr(one))


def growth(call: Words, latest: deque[Words]) -> Growth | None:
    """What has grown since the call among the latest that is most like ``call``; None where they differ in more than sizes."""
    ways = [differ for earlier in reversed(latest) if (differ := differing(call, earlier))]
    fewest = min(ways, key=len, default=())
    return (fewest, rest(call, fewest)) if fewest else None


def differing(call: Words, earlier: Words) -> tuple[int, ...]:
    """The places of the integers in which calls differ; () where they differ in anything else."""
    if len(call) != len(earlier):
        return ()
    places = tuple(place for place, (one, other) in enumerate(zip(call, earlier)) if one != other)
    return places if all(type(call[place]) is type(earlier[place]) is int for place in places) else ()


def rest(call: Words, places: tuple[int, ...]) -> Words:
    return tuple(word for place, word in enumerate(call) if place not in places)


def refusal(target: str, args: tuple[Any, ...]) -> str:
    """Why ``target``, called now with sizes never seen before, is not recorded; "" where it is. Called below the user's line."""
    if not _grown or torch.is_grad_enabled() or not settings.enabled("varying"):
        return ""
    ways = _grown.get((target, line(sys._getframe(1))))
    if not ways:
        return ""
    call = words(target, [called(arg) for arg in args])
    if not any(times >= PATIENCE and rest(call, places) == same for (places, same), times in ways.items()):
        return ""
    return "its sizes at this line are new with every recording, while the rest repeats"


def line(frame: FrameType | None) -> str:
    """The innermost frame of the user's, as the core writes it; "" where there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INTERNAL) and not any(part in file for part in _LIBRARIES):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
