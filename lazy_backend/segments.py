"""Names parts of a program: `register_segment` and its like. Imports torch, `barriers.segment` and `lazy_backend` parts below.

A registered method is found through its class: while some module's method has a name, the class's function is one that asks
whether this module's has. So copies and pickles of the module are not touched.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle

from barriers.segment import Segment, SegmentError
from ir_nodes.locks import Lock
from lazy_backend.entered import Before, Part, enter, leave, segments

_lock = Lock(reentrant=True)
_parts: weakref.WeakKeyDictionary[nn.Module, dict[str, Part]] = weakref.WeakKeyDictionary()
_modules: dict[str, weakref.ref[nn.Module]] = {}  # whose method each segment names
_watched: dict[tuple[type, str], tuple[Callable[..., Any], set[str]]] = {}  # the class's own function, and who needs it replaced
_blocks: dict[tuple[str, str | None], Part] = {}
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
        if name in _modules and _modules[name]() is None:  # the module has gone, and its names with it
            forget(name)
        part = _parts.setdefault(module, {}).setdefault(attribute, Part())
        twice = [s for s in part.names if (s.backward, s.nth_call) == (is_backward, nth_call)]
        if twice:
            direction = "backward" if is_backward else "forward"
            raise SegmentError(f"the {direction} of {segment.part} is the segment {twice[0].name!r} already")
        segments.add(segment)
        part.names.append(segment)
        _modules[name] = weakref.ref(module)
        watch(type(module), attribute, name)
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


def watch(cls: type, attribute: str, name: str) -> None:
    """Replace the function that defines ``attribute`` for ``cls``, as long as the segment ``name`` is there."""
    owner = definer(cls, attribute)
    if (owner, attribute) in _watched:
        _watched[owner, attribute][1].add(name)
        return
    original = vars(owner)[attribute]

    @functools.wraps(original)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        part = _parts.get(self, {}).get(attribute)
        if part is None or definer(type(self), attribute) is not owner:  # not named, or called by an overriding method
            return original(self, *args, **kwargs)
        before = enter(part)
        try:
            return original(self, *args, **kwargs)
        finally:
            leave(before)

    _watched[owner, attribute] = original, {name}
    setattr(owner, attribute, watched)


def remove(part: Part, segment: Segment) -> None:
    with _lock:
        if segment in part.names:
            part.names.remove(segment)
            forget(segment.name)
    hooks_changed()


def forget(name: str) -> None:
    """Take a segment away; a class's function comes back when nobody needs it replaced."""
    segments.remove(name)
    _modules.pop(name, None)
    for (owner, attribute), (original, names) in list(_watched.items()):
        names.discard(name)
        if not names and getattr(vars(owner).get(attribute), "__wrapped__", None) is original:  # else another wraps ours
            del _watched[owner, attribute]
            setattr(owner, attribute, original)


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
        part = _blocks.get((name, backward))
        if part is None or not all(segments.has(one) for one in part.names):
            part = block(name, backward)
        self.part = part

    def __enter__(self) -> None:
        self.before: Before | None = enter(self.part)

    def __exit__(self, *error: object) -> None:
        leave(self.before)


def block(name: str, backward: str | None) -> Part:
    """The part of all blocks of this name. Raises SegmentError where a method or another block has it."""
    with _lock:
        names = [segments.add_block(name, False)]
        if backward is not None:
            names.append(segments.add_block(backward, True))
        return _blocks.setdefault((name, backward), Part(*names))


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

