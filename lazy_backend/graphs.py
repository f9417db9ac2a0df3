"""Captures what a program launches as a CUDA graph. Imports torch and `lazy_backend.core` only.

PyTorch's own `torch.cuda.CUDAGraph` holds the capture: it gives the allocator a pool for what is taken meanwhile. Graphs that
are captured for one stream share a pool, so that the intermediate results of one lie where those of another did: they never run
at the same time. So nothing in it outlives a replay; a stretch's results lie elsewhere (csrc/graph.cpp).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Callable, Sequence

import torch

from lazy_backend import core

SPARE = 16
"""The part of the GPU's memory, one over this, below which no graph is made."""
LARGE = 1 << 28
"""Bytes of a graph's memory for which it pays to give cached memory back, which waits for the GPU and happens once a graph."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Memory of the graphs that run on one stream, as long as there are any. ``keeper``: a graph of nothing, because PyTorch
    takes no graph into a pool that all others have left."""

    handle: Any
    keeper: torch.cuda.CUDAGraph


# By device and by the stream that graphs will run on. Graphs that are captured on one stream share cuBLAS's workspace there, too.
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # the default stream can't be captured
_pools: weakref.WeakValueDictionary[tuple[int, int], Pool] = weakref.WeakValueDictionary()


def capture(device: int, states: Sequence[torch.Generator], body: Callable[[int], None]) -> tuple[int, Callable[[], None]]:
    """The handle (a CUgraphExec) of what ``body(stream)`` launches, and what launches it, which keeps it and its memory.

    ``states``: generators that ops draw from meanwhile. What launches the graph tells it their seeds and offsets as they are
    then. Raises RuntimeError where something can't be captured, such as an op that waits for the GPU.
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        key = (device, current.stream_id)
        stream = _streams.get(key) or _streams.setdefault(key, torch.cuda.Stream(device))
        stream.wait_stream(current)
        make_room()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        if hasattr(graph, "register_generator_state"):  # else PyTorch finds them by itself
            for state in states:
                graph.register_generator_state(state)
        with torch.cuda.stream(stream):
            pool, before = pool_of(key), torch.cuda.memory_reserved()
            graph.capture_begin(pool.handle, capture_error_mode="thread_local")
            try:
                body(stream.cuda_stream)
                graph.capture_end()
                graph.instantiate()
            except BaseException:
                abandon(graph, device, pool.handle)
                raise
        if torch.cuda.memory_reserved() - before >= LARGE:
            torch.cuda.empty_cache()  # else what the runs before had taken would lie idle beside the graph's memory
    return graph.raw_cuda_graph_exec(), partial(launch, graph, pool)


def make_room() -> None:
    """Give cached memory back where a graph might need it: while a stream is captured PyTorch can't. Raises RuntimeError where
    memory runs short: the results of a graph keep theirs, which programs that run by themselves share."""
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > torch.cuda.mem_get_info()[0]:
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free < total // SPARE:
        raise RuntimeError(f"less than a {SPARE}th of the GPU's memory is free, and a graph keeps that of its results")


def launch(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """``pool`` lives as long as whoever may call this."""
    graph.replay()


def pool_of(key: tuple[int, int]) -> Pool:
    pool = _pools.get(key)
    if pool is None:
        handle = torch.cuda.graph_pool_handle()
        pool = _pools.setdefault(key, Pool(handle, nothing(handle)))
    return pool


def nothing(pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of nothing."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is empty
        graph.capture_begin(pool, capture_error_mode="thread_local")
        graph.capture_end()
    return graph


def abandon(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """Take back what a capture has begun that failed. PyTorch up to 2.11 leaves its allocator as if it still captured, so that
    memory which several streams use is never free again, and its generator, which then refuses to draw."""
    with contextlib.suppress(RuntimeError):  # the first error is the one to show
        graph.capture_end()
    with contextlib.suppress(RuntimeError):  # raised where PyTorch has done so, and gives the pool back by itself
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with contextlib.suppress(RuntimeError):
        nothing()  # the end of a capture is what resets the generator


def install(native: ModuleType) -> None:
    if core.physical_is_cuda():
        native.set_capturer(capture)


core.at_start(install)
