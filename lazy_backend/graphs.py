"""Captures what a program launches as a CUDA graph. Imports torch and `lazy_backend.core` only.

PyTorch's own `torch.cuda.CUDAGraph` holds the capture: it gives the allocator a pool for what is taken meanwhile. Graphs that
are captured for one stream share a pool, so that the intermediate results of one lie where those of another did: they never run
at the same time. Results stay with the program, which keeps other graphs out of their memory.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Callable

import torch

from lazy_backend import core

# By device and by the stream that the graphs will run on: graphs that are captured on one stream share cuBLAS's workspace there.
# The default stream can't be captured.
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def capture(device: int, body: Callable[[int], None]) -> tuple[int, torch.cuda.CUDAGraph]:
    """The handle (a CUgraph) of what ``body(stream)`` launches, and the object that keeps it and its memory.

    Raises RuntimeError where something can't be captured, such as an op that waits for the GPU.
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        key = (device, current.stream_id)
        stream = _streams.get(key) or _streams.setdefault(key, torch.cuda.Stream(device))
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                body(stream.cuda_stream)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one to show
                    graph.capture_end()
                raise
            graph.capture_end()
    return graph.raw_cuda_graph(), graph


def install(native: ModuleType) -> None:
    if core.physical_is_cuda():
        native.set_capturer(capture)


core.at_start(install)
