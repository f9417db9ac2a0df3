"""Finds ops whose sizes are new in every recording, so that they run at once. Imports torch, `ir_nodes.settings` and `schema`.

A program that decodes text appends to its tokens, to a mask or to a cache: a few ops see other sizes with each token, and sizes
are part of a recording's key. Recorded, these ops would have every token's recording compiled anew. Run at once, they leave
recordings between them that repeat. Training is left alone: its recordings hold backward, and a new size there changes nearly
all ops. An op is known by the user's line that calls it, so none is found where lines are not noted (LAZYSCHED_FRAMES=0).
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any, Protocol

import torch

from ir_nodes import settings
from lazy_backend.schema import ArgKind

PATIENCE = 3
"""Recordings with new sizes of an op, before its next new sizes run at once."""
FEW, SMALL_SHARE = 3, 0.25
"""Ops of a recording: where more are new, it is another program, or one whose sizes all changed."""
MOST_LINES = 20000

Site = tuple[str, str]  # op, and "file:line in function"
_TENSORS = (ArgKind.TENSOR, ArgKind.TENSOR_LIST, ArgKind.OPT_TENSOR_LIST)
_LIBRARIES = ("/torch/", "/lazy_backend/", "/contextlib.py")  # as in csrc/frames.c
_INTERNAL = ("<frozen", "<interpreter", "<shim")

_known: dict[Site, set[int]] = {}  # hashes of the layouts and constants seen at a line
_changed: Counter[Site] = Counter()  # recordings that held new ones, while most of the recording was known


class Recording(Protocol):
    """See `trace.Recording`."""

    def instrs(self) -> list[tuple[str, int, int, int, int, int, str, int, int, int]]: ...
    def args(self) -> list[tuple[int, int, int, Any]]: ...
    def operands(self) -> list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int, bool]]: ...


def note(recording: Recording) -> None:
    """Looks at a recording that is about to be compiled: which of its ops were there before with other sizes?"""
    if torch.is_grad_enabled() or not settings.enabled("varying"):
        return
    instrs = recording.instrs()
    if any(backward >= 0 or segment for *_, backward, segment in instrs):
        return
    args, operands = recording.args(), recording.operands()
    calls = [((target, place), describe(args[first : first + many], operands, operands[outs : outs + n_outs]))
             for target, first, many, outs, n_outs, _, place, *_ in instrs if place]
    fresh = [(site, call) for site, call in calls if call not in _known.get(site, ())]
    same_program = all(site in _known for site, _ in calls)
    if same_program and len(fresh) < len(calls) and len(fresh) <= max(FEW, SMALL_SHARE * len(calls)):
        _changed.update({site for site, _ in fresh})
    if len(_known) > MOST_LINES:
        _known.clear()
    for site, call in fresh:
        _known.setdefault(site, set()).add(call)


def describe(args: list[tuple[int, int, int, Any]], operands: list[Any], outs: list[Any]) -> int:
    """A hash of what decides shapes: layouts and constants, not which buffers they belong to."""
    words: list[Any] = [operand[1:] for operand in outs]
    for kind, first, count, value in args:
        words.append(kind)
        if kind in _TENSORS:
            words += [operand[1:] for operand in operands[first : first + count]]
        elif kind == ArgKind.CONST:
            words.append(repr(value))
    return hash(tuple(words))


def refusal(target: str) -> str:
    """Why ``target``, called now with sizes never seen before, is not recorded; "" where it is. Called below the user's line."""
    if not _changed or torch.is_grad_enabled():
        return ""
    times = _changed.get((target, line(sys._getframe(1))), 0)
    if times < PATIENCE or not settings.enabled("varying"):
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
