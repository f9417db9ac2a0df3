"""LAZYSCHED_SCHEDULE=file.json: segments, hooks and a schedule for an unchanged program. Imports torch and `lazy_backend` parts.

The model is the first module that is moved to the device, or the first of the class that the file names.
"""

from __future__ import annotations

import atexit
import difflib
import functools
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from torch import nn

from barriers.policies import POLICIES
from barriers.segment import SegmentError
from ir_nodes import settings
from lazy_backend import segments
from lazy_backend.scheduler import LazyScheduler

_HOOKS: dict[tuple[str, bool], Callable[[str, str], Any]] = {
    ("before", False): segments.register_segment_forward_pre_hook,
    ("before", True): segments.register_segment_backward_pre_hook,
    ("after", False): segments.register_segment_forward_hook,
    ("after", True): segments.register_segment_backward_hook,
}


class ScheduleFileError(ValueError):
    """A schedule file that cannot be used; the text names the file, the key and what it takes."""


@dataclass(slots=True)
class ScheduleFile:
    """What a file asks for; see the README for an example."""

    path: Path
    model: str = ""
    segments: dict[str, dict[str, Any]] = field(default_factory=dict)
    hooks: list[dict[str, str]] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)
    schedule_hooks: list[str] = field(default_factory=list)
    debug_mode: bool = False
    measure: bool = False
    report: str = ""

    def error(self, key: str, text: str) -> ScheduleFileError:
        return ScheduleFileError(f"{self.path}: {key}: {text}")


_TYPES = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}
_KEYS: dict[str, type] = {"model": str, "segments": dict, "hooks": list, "schedule": list, "schedule_hooks": list,
                          "debug_mode": bool, "measure": bool, "report": str}
_SEGMENT: dict[str, type] = {"path": str, "backward": bool, "nth_call": int}
_HOOK: dict[str, type] = {"run": str, "before": str, "after": str}


def read(path: Path) -> ScheduleFile:
    """The file, checked as far as that goes without the model. Raises ScheduleFileError."""
    found = ScheduleFile(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleFileError(f"LAZYSCHED_SCHEDULE={path}: cannot be read: {error.strerror}") from None
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleFileError(f"{path}:{error.lineno}: is not JSON: {error.msg}") from None
    check_object(found, "the file", given, _KEYS)
    for key, value in given.items():
        setattr(found, key, value)
    found.segments = {name: segment_of(found, name, value) for name, value in found.segments.items()}
    for number, hook in enumerate(found.hooks):
        check_hook(found, f"hooks[{number}]", hook)
    for number, name in enumerate(found.schedule):
        if not isinstance(name, str):
            raise found.error(f"schedule[{number}]", f"takes the name of a segment, got {name!r}")
    for number, name in enumerate(found.schedule_hooks):
        if name not in POLICIES:
            raise found.error(f"schedule_hooks[{number}]", f"takes one of {', '.join(POLICIES)}, got {name!r}")
    return found


def check_object(file: ScheduleFile, key: str, given: Any, keys: dict[str, type]) -> None:
    """Raises ScheduleFileError for a key or a type that is not in ``keys``."""
    if not isinstance(given, dict):
        raise file.error(key, f"takes an object with {', '.join(keys)}, got {given!r}")
    for name, value in given.items():
        if name not in keys:
            close = difflib.get_close_matches(name, keys, n=1)
            raise file.error(key, f"has no key {name!r}{f', did you mean {close[0]!r}?' if close else ''} ({', '.join(keys)})")
        if not isinstance(value, keys[name]) or (keys[name] is int and (isinstance(value, bool) or value < 0)):
            where = name if key == "the file" else f"{key}.{name}"
            raise file.error(where, f"takes {_TYPES.get(keys[name], 'a number from 0 on')}, got {value!r}")


def segment_of(file: ScheduleFile, name: str, given: Any) -> dict[str, Any]:
    """A segment's path, direction and call; a text is a path."""
    key = f"segments.{name}"
    row = {"path": given} if isinstance(given, str) else given
    check_object(file, key, row, _SEGMENT)
    if "path" not in row:
        raise file.error(key, 'needs "path", the way from the model to a method or module: "encoder.layers.0.attn"')
    return row


def check_hook(file: ScheduleFile, key: str, given: Any) -> None:
    check_object(file, key, given, _HOOK)
    if "run" not in given or ("before" in given) == ("after" in given):
        raise file.error(key, 'takes {"run": segment, "before": segment} or {"run": segment, "after": segment}')


def model_in(file: ScheduleFile, module: nn.Module) -> nn.Module | None:
    """The model that the file is about, if it is ``module`` or inside it."""
    if not file.model:
        return module
    return next((one for one in module.modules() if file.model in (type(one).__name__, type(one).__qualname__)), None)


def put_in_force(file: ScheduleFile, model: nn.Module) -> LazyScheduler:
    """Name the segments of ``model`` and start the scheduler. Raises ScheduleFileError."""
    for name, row in file.segments.items():
        try:
            method = segments.find(model, row["path"])
            segments.register_segment(method, name, row.get("backward", False), row.get("nth_call"))
        except SegmentError as error:
            raise file.error(f"segments.{name}", str(error)) from None
    for number, hook in enumerate(file.hooks):
        side = "before" if "before" in hook else "after"
        try:
            backward = segments.segments.get(hook[side]).backward
            _HOOKS[side, backward](hook[side], hook["run"])
        except SegmentError as error:
            raise file.error(f"hooks[{number}]", str(error)) from None
    asked = [POLICIES[name] for name in file.schedule_hooks]
    try:
        return LazyScheduler(file.schedule, hooks=asked, debug_mode=file.debug_mode, measure=file.measure).start()
    except ValueError as error:  # an unknown name, a name that stands twice, a circle
        raise file.error("schedule", str(error)) from None


class _Waiting:
    """Until the model has been moved to the device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.depth = 0
        self.scheduler: LazyScheduler | None = None

    def moved(self, module: nn.Module) -> None:
        if self.scheduler is not None or not any(one.device.type == "lazysched" for one in module.parameters()):
            return
        file = read(self.path)
        model = model_in(file, module)
        if model is None:
            return
        self.scheduler = put_in_force(file, model)
        if file.report:
            atexit.register(write_report, self.scheduler, Path(file.report))

    def at_exit(self) -> None:
        if self.scheduler is None:
            warnings.warn(f"LAZYSCHED_SCHEDULE={self.path}: its model was never moved to lazysched, nothing was scheduled",
                          RuntimeWarning, stacklevel=1)


def write_report(scheduler: LazyScheduler, path: Path) -> None:
    """A page for a name that ends in .html, else text."""
    if path.suffix == ".html":
        scheduler.report(html=path)
    else:
        path.write_text(scheduler.report() + "\n", encoding="utf-8")


def install() -> None:
    """Watch modules move, if a file is set; otherwise nothing is touched."""
    try:
        path = settings.current().schedule
    except settings.SettingsError:  # the device's first use says so; importing must not fail
        return
    if path is None:
        return
    waiting = _Waiting(path)
    original = nn.Module._apply

    @functools.wraps(original)
    def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        waiting.depth += 1
        try:
            result = original(self, fn, recurse)
        finally:
            waiting.depth -= 1
        if not waiting.depth:
            waiting.moved(self)
        return result

    nn.Module._apply = _apply  # type: ignore[method-assign]
    atexit.register(waiting.at_exit)
