"""Streams and events, as `torch.cuda` has them. Imports torch, `lazy_backend.core` and `lazy_backend.api` only.

What was recorded under a stream runs on it, so that making another one current ends the recording. On a CPU everything runs
in order on the calling thread: streams are names there, and an event is the time when it was recorded.
"""

from __future__ import annotations

import torch

from lazy_backend import api, core

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "is_current_stream_capturing", "set_stream",
           "stream"]

Device = torch.device | str | int | None
Event = torch.Event
_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)


class Stream(torch.Stream):
    """A queue of the device. ``with stream:`` makes it current. Raises RuntimeError where there is no such device."""

    def __new__(cls, device: Device = None, priority: int = 0, **given: int) -> Stream:
        core.get()
        if given:  # stream_id, device_index, device_type: that very stream
            return super().__new__(cls, **given)
        return super().__new__(cls, device=torch.device("lazysched", api.device_index(device)), priority=priority)

    def __enter__(self) -> Stream:
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


class StreamContext:
    """``with torch.lazysched.stream(s):`` s and its device are the current ones inside. None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self.before: list[tuple[int, torch.Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before.append((core.get().current_device(), current_stream(self.stream.device_index)))
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            device, previous = self.before.pop()
            set_stream(previous)
            core.get().set_device(device)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def current_stream(device: Device = None) -> Stream:
    index = api.device_index(device)
    return _stream(index, core.get().current_stream(index))


def default_stream(device: Device = None) -> Stream:
    return _stream(api.device_index(device), 0)


def set_stream(stream: torch.Stream) -> None:
    """Make ``stream`` and its device the current ones; what is recorded on that device runs first.

    Raises ValueError for a stream of another device.
    """
    if stream.device_type != _DEVICE_TYPE:
        raise ValueError(f"expected a stream of lazysched, got {stream}")
    core.get().set_device(stream.device_index)
    core.get().set_stream(stream.device_index, stream.stream_id)


def is_current_stream_capturing() -> bool:
    return core.physical_is_cuda() and torch.cuda.is_current_stream_capturing()


def _stream(index: int, identity: int) -> Stream:
    return Stream(stream_id=identity, device_index=index, device_type=_DEVICE_TYPE)
