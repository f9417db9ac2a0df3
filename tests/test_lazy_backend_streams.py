"""Streams and events: order, contexts, times. On a CPU streams are names and events are times."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
import torch

import lazy_backend
from lazy_backend import accelerator
from tests.children import call
from tests.device import DEVICE, ON_GPU, needs_host_errors


def test_streams_are_told_apart() -> None:
    torch.lazysched.init()  # torch.Stream, in C, starts no device; torch.lazysched.Stream does
    one, two = torch.Stream(device=DEVICE), torch.lazysched.Stream()
    assert one != two and one.stream_id != two.stream_id and one.device == torch.device(DEVICE, 0)
    again = torch.Stream(stream_id=one.stream_id, device_type=one.device_type, device_index=one.device_index)
    assert again == one and hash(again) == hash(one)
    assert torch.lazysched.default_stream().stream_id == 0 and isinstance(torch.lazysched.current_stream(), torch.Stream)
    assert "device_type=lazysched, device_index=0" in repr(one)
    assert isinstance(one.native_handle, int)


def test_contexts_change_the_current_stream() -> None:
    before = torch.lazysched.current_stream()
    one, two = torch.lazysched.Stream(), torch.lazysched.Stream()
    with one as entered:
        assert entered == one == torch.lazysched.current_stream() == torch.accelerator.current_stream()
        with torch.lazysched.stream(two), torch.lazysched.stream(None):
            assert torch.lazysched.current_stream() == two
        assert torch.lazysched.current_stream() == one
    with pytest.raises(ValueError, match="mine"), torch.lazysched.stream(one):
        raise ValueError("mine")
    assert torch.lazysched.current_stream() == before
    torch.accelerator.set_stream(two)
    assert torch.lazysched.current_stream() == two
    torch.lazysched.set_stream(before)
    assert torch.accelerator.current_stream() == before


def test_what_was_recorded_under_a_stream_runs_before_another_is_current() -> None:
    x = torch.ones(3, device=DEVICE) + 1
    with torch.lazysched.Stream():
        assert lazy_backend.barriers()[-1].kind.label == "stream"
        y = x * 2
    assert lazy_backend.barriers()[-1].kind.label == "stream" and lazy_backend.barriers()[-1].ops == 1
    count = lazy_backend.stats()["flushes"]
    with torch.lazysched.stream(torch.lazysched.current_stream()):
        z = y + 1
    assert lazy_backend.stats()["flushes"] == count, "the same stream again is no barrier"
    assert z.tolist() == [5, 5, 5]


@needs_host_errors
def test_a_failure_under_a_stream_is_told_when_its_result_is_read() -> None:
    with torch.lazysched.Stream():
        bad = torch.nn.functional.embedding(torch.tensor([7], device=DEVICE), torch.ones(3, 2, device=DEVICE))
    with pytest.raises(RuntimeError, match="never computed, because an earlier op failed: index out of range"):
        bad.tolist()


def test_a_stream_of_another_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a stream of lazysched"):
        torch.lazysched.set_stream(torch.Stream(stream_id=0, device_index=0, device_type=1))


def test_streams_wait_for_events_and_each_other() -> None:
    one, two = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    event = one.record_event()
    assert event.event_id != 0 and event.device == torch.device(DEVICE, 0)
    two.wait_event(event)
    two.wait_stream(one)
    two.synchronize()
    assert event.query() and two.query()
    x = torch.ones(4, device=DEVICE)
    x.record_stream(two)
    with torch.lazysched.stream(two):
        y = x + 1
    torch.lazysched.current_stream().wait_stream(two)
    assert y.sum().item() == 8


def test_an_event_marks_what_was_recorded_before_it() -> None:
    event = torch.Event(device=DEVICE)
    assert event.query() and event.event_id == 0 and event.device.type == DEVICE
    x = torch.ones(2, device=DEVICE) + 1
    event.record()
    assert "aten::add" not in lazy_backend.debug.text([x]) and event.event_id != 0
    event.wait()
    event.synchronize()
    assert event.query() and torch.Event().device.type == DEVICE
    first = event.event_id
    event.record(torch.lazysched.current_stream())
    other = torch.lazysched.current_stream().record_event()
    assert first and event.event_id != other.event_id


def test_elapsed_time() -> None:
    start, end = (torch.lazysched.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    time.sleep(0.02)
    torch.ones(8, device=DEVICE).exp_()
    end.record()
    torch.lazysched.synchronize()
    assert 10 < start.elapsed_time(end) < 5_000, "milliseconds"
    plain = torch.Event(device=DEVICE)
    plain.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        plain.elapsed_time(end)


def test_backward_under_streams() -> None:
    gradients = []
    for streams in (False, True):
        leaf = torch.ones(4, device=DEVICE, requires_grad=True)
        with torch.lazysched.stream(torch.lazysched.Stream() if streams else None):
            first = leaf * 3
        with torch.lazysched.stream(torch.lazysched.Stream() if streams else None):
            second = leaf.exp()
        (first * second).sum().backward()
        gradients.append(leaf.grad.tolist())
    assert gradients[0] == gradients[1]


def beside_cuda() -> None:
    """In a fresh process: as where torch has CUDA, libtorch's engine is told that CUDA is the accelerator."""
    torch.lazysched.init()
    shim = ctypes.CDLL(str(accelerator.build()))
    libraries = [str(Path(torch.__file__).parent / "lib" / f"libtorch_{part}.so").encode() for part in ("cpu", "python")]
    assert shim.lazysched_keep_cuda(*libraries) == 1
    stream = torch.Stream(device=DEVICE)
    with stream as entered:
        assert entered == stream == torch.lazysched.current_stream()
    assert torch.lazysched.current_stream().stream_id == 0
    for device in ("cpu", DEVICE):
        leaf = torch.ones(3, device=device, requires_grad=True)
        (leaf * 2).sum().backward()
        assert leaf.grad.tolist() == [2, 2, 2]


@pytest.mark.skipif(ON_GPU, reason="it is so in this very process")
def test_streams_work_beside_cuda() -> None:
    call(beside_cuda)
