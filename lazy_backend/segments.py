"""Names parts of a program: `register_segment` and its like. Imports torch, `barriers.segment` and `lazy_backend` parts below.

A registered method is found through its class: the class's function is replaced once by one that asks whether this module's
method has a name. So copies and pickles of the module are not touched, and nothing is left behind when a handle is removed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Callable, Iterator, Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle

from barriers.segment import Segment, SegmentError, Segments
from lazy_backend import core

segments = Segments()
_lock = threading.RLock()


class Part:
    """A module's method or a `with` block, and the segments that name it and its backward."""

    def __init__(self) -> None:
        self.names: list[Segment] = []
        self.runs: list[int] = []  # backward calls of the last forward runs: a recomputed forward is that of the latest

    def pick(self, backward: bool, call: int) -> Segment | None:
        """The segment of this direction that call number ``call`` of a step belongs to."""
        fitting = [s for s in self.names if s.backward is backward and s.nth_call in (None, call)]
        return next((s for s in fitting if s.nth_call is not None), fitting[0] if fitting else None)


class _Thread(threading.local):
    """What runs in this thread: numbers of `Segments.calls`."""

    def __init__(self) -> None:
        self.forward = self.backward = self.owner = 0
        self.step = self.recording = -1
        self.step_calls: dict[Part, int] = {}
        self.calls: dict[str, int] = {}

    def renew(self, step: int, recording: int) -> None:
        """Start counting calls anew where another step, or another recording, has begun."""
        if self.step != step:
            self.step, self.step_calls = step, {}
        if self.recording != recording:
            self.recording, self.calls = recording, {}

    def count(self, name: str) -> int:
        self.calls[name] = self.calls.get(name, -1) + 1
        return self.calls[name]


thread = _Thread()
_FLUSHES = 9  # of the core's stats


class Steps:
    """Counts the steps of the program: what lies between two ends of `optimizer.step()` or `mark_step()`."""

    number = 0


class Entered:
    """`with Entered(part)`: what is recorded inside belongs to the part's segments, and so does its backward."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.native: Any = None

    def __enter__(self) -> None:
        if not self.part.names or not core.is_started():
            return
        self.native = core.get()
        self.before = (thread.forward, thread.backward)
        if self.native.backward_segment() >= 0:
            self._recompute()
        else:
            self._run()
        self.before_native = self.native.enter_segment(thread.forward)
        self.first = self.native.sequence_number()

    def _run(self) -> None:
        thread.renew(Steps.number, self.native.stats()[_FLUSHES])
        call = thread.step_calls.get(self.part, 0)
        thread.step_calls[self.part] = call + 1
        forward, backward = self.part.pick(False, call), self.part.pick(True, call)
        if forward is not None:
            thread.forward = segments.call(forward.name, False, thread.count(forward.name), thread.forward, thread.owner)
        self.made = backward is not None
        if backward is not None:
            thread.backward = segments.call(backward.name, True, thread.count(backward.name), thread.backward, thread.owner)
            self.part.runs = [*self.part.runs[-63:], thread.backward]

    def _recompute(self) -> None:
        """Checkpointing runs the forward again while autograd runs: that is a part of the backward."""
        self.made = bool(self.part.runs)
        if self.made:
            thread.forward = thread.backward = self.part.runs.pop()

    def __exit__(self, *error: object) -> None:
        if self.native is None:
            return
        if self.made:
            self.native.note_backward(self.first, thread.backward)
        self.native.enter_segment(self.before_native)
        thread.forward, thread.backward = self.before
        self.native = None


_parts: weakref.WeakKeyDictionary[nn.Module, dict[str, Part]] = weakref.WeakKeyDictionary()
_replaced: dict[tuple[type, str], Callable[..., Any]] = {}
_blocks: dict[str, Part] = {}
on_hooks: list[Callable[[], None]] = []  # called when hooks have changed


def register_segment(
    method: Callable[..., Any] | nn.Module, name: str, is_backward: bool = False, nth_call: int | None = None
) -> RemovableHandle:
    """Call what ``method`` of a module records, or with ``is_backward`` what its backward records, the segment ``name``.

    ``method``: a bound method such as ``model.encoder.forward``; a module stands for its forward. ``nth_call``: only the call
    with this number in each step, from 0. Returns a handle whose ``remove()`` takes the name away. Raises SegmentError.
    """
    module, attribute = method_of(method)
    if nth_call is not None and (not isinstance(nth_call, int) or nth_call < 0):
        raise SegmentError(f"nth_call counts calls from 0, got {nth_call!r}")
    segment = Segment(name, is_backward, nth_call, f"{type(module).__name__}.{attribute}")
    with _lock:
        part = _parts.setdefault(module, {}).setdefault(attribute, Part())
        twice = [s for s in part.names if (s.backward, s.nth_call) == (is_backward, nth_call)]
        if twice:
            direction = "backward" if is_backward else "forward"
            raise SegmentError(f"the {direction} of {segment.part} is the segment {twice[0].name!r} already")
        segments.add(segment)
        part.names.append(segment)
        watch(type(module), attribute)
    return handle(lambda: remove(part, segment))


def register_segments(model: nn.Module, paths: Mapping[str, str], is_backward: bool = False) -> dict[str, RemovableHandle]:
    """Name many methods by their path in ``model``: ``{"attn0_fwd": "layers.0.attn.forward"}``. All or none.

    Raises SegmentError for a path that leads to no method of a module.
    """
    done: dict[str, RemovableHandle] = {}
    try:
        for name, path in paths.items():
            done[name] = register_segment(find(model, path), name, is_backward)
    except SegmentError:
        for one in done.values():
            one.remove()
        raise
    return done


def find(model: nn.Module, path: str) -> Callable[..., Any]:
    """The method at ``path``; a path to a module means its forward."""
    found: Any = model
    for word in path.split("."):
        step = getattr(found, word, None)
        if step is None:
            inside = ", ".join(name for name, _ in found.named_children()) if isinstance(found, nn.Module) else ""
            what = f"{type(found).__name__} has no {word!r} (modules: {inside})"
            raise SegmentError(f"{type(model).__name__} has no {path!r}: {what}")
        found = step
    return found


def method_of(method: Any) -> tuple[nn.Module, str]:
    """The module and the method's name."""
    if isinstance(method, nn.Module):
        return method, "forward"
    module, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(module, nn.Module):
        raise SegmentError(f"{method!r} is no module's method; register_segment takes one such as model.encoder.forward. "
                           "For other code use `with segment(name):`")
    name = "forward" if name in ("_wrapped_call_impl", "_call_impl", "__call__") else name
    if not callable(getattr(type(module), name, None)) or name in vars(module):
        raise SegmentError(f"{type(module).__name__}.{name} is not a method of its class (compiled, scripted or replaced on the "
                           "object), so it cannot be watched; use `with segment(name):` inside it")
    return module, name


def definer(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def watch(cls: type, name: str) -> None:
    """Replace the function that defines ``name`` for ``cls``, once."""
    owner = definer(cls, name)
    if (owner, name) in _replaced:
        return
    original = vars(owner)[name]

    @functools.wraps(original)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        part = _parts.get(self, {}).get(name)
        if part is None or definer(type(self), name) is not owner:  # not named, or called by an overriding method
            return original(self, *args, **kwargs)
        with Entered(part):
            return original(self, *args, **kwargs)

    _replaced[owner, name] = original
    setattr(owner, name, watched)


def remove(part: Part, segment: Segment) -> None:
    with _lock:
        if segment in part.names:
            part.names.remove(segment)
            segments.remove(segment.name)
    hooks_changed()


def handle(action: Callable[[], object]) -> RemovableHandle:
    """A handle as PyTorch's hooks give: ``remove()``, or leaving its ``with`` block, runs ``action`` once."""

    class Registry(dict[int, Callable[[], object]]):
        def __delitem__(self, key: int) -> None:
            self.pop(key)()

    registry = Registry()
    made = RemovableHandle(registry)
    registry[made.id] = action
    made._keep = registry  # type: ignore[attr-defined]  # the handle itself has a weak reference only
    return made


class segment:  # noqa: N801  (used like a function)
    """``with segment("a1"): ...``: what is recorded inside is the segment ``a1``; its backward is ``backward``, if given."""

    def __init__(self, name: str, backward: str | None = None) -> None:
        with _lock:
            segments.add_block(name, False)
            part = _blocks.get(name)
            if part is None:
                part = _blocks[name] = Part()
                part.names.append(segments.get(name))
            if backward is not None and all(s.name != backward for s in part.names):
                segments.add_block(backward, True)
                part.names.append(segments.get(backward))
        self.entered = Entered(part)

    def __enter__(self) -> None:
        self.entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self.entered.__exit__(*error)


def hooks_changed() -> None:
    for action in on_hooks:
        action()


def _hook(anchor: str, name: str, backward: bool, before: bool) -> RemovableHandle:
    cause = f"register_segment_{'backward' if backward else 'forward'}_{'pre_hook' if before else 'hook'}({anchor!r}, {name!r})"
    number = segments.add_hook(anchor, name, backward, before, cause)
    hooks_changed()
    return handle(lambda: (segments.remove_hook(number), hooks_changed()))


def register_segment_forward_pre_hook(anchor: str, segment: str) -> RemovableHandle:
    """Run ``segment`` right before the forward segment ``anchor``. Raises SegmentError."""
    return _hook(anchor, segment, False, True)


def register_segment_forward_hook(anchor: str, segment: str) -> RemovableHandle:
    """Run ``segment`` right after the forward segment ``anchor``. Raises SegmentError."""
    return _hook(anchor, segment, False, False)


def register_segment_backward_pre_hook(anchor: str, segment: str) -> RemovableHandle:
    """Run ``segment`` right before the backward segment ``anchor``. Raises SegmentError."""
    return _hook(anchor, segment, True, True)


def register_segment_backward_hook(anchor: str, segment: str) -> RemovableHandle:
    """Run ``segment`` right after the backward segment ``anchor``. Raises SegmentError."""
    return _hook(anchor, segment, True, False)


def block_names() -> Iterator[str]:
    yield from _blocks
