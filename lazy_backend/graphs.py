"""Captures what a program launches as a CUDA graph. Imports torch, `codegen.counters`, `ir_nodes.settings` and
`lazy_backend.core` only.

PyTorch's own `torch.cuda.CUDAGraph` holds the capture: it gives the allocator a pool for what is taken meanwhile. Graphs that
are captured for one stream share a pool, so that the intermediate results of one lie where those of another did: they never run
at the same time. So nothing in it outlives a replay; a stretch's results lie elsewhere (csrc/graph.cpp). A pool is one range of
addresses that grows: what small values leave makes room for a large one, which pieces of memory of their own would not.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Callable, Iterator, Sequence

import torch

from codegen import counters
from ir_nodes import settings
from lazy_backend import core

SPARE = 16
"""The part of the GPU's memory, one over this, below which no graph is made."""
LARGE = 1 << 28
"""Bytes of a graph's memory, or of cached memory before a stream's first graph, for which it pays to give cached memory back,
which waits for the GPU and happens once a graph."""

TRIED = 1 << 25
"""Bytes that are mapped once, to see whether that works."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Memory of the graphs that run on one stream, as long as there are any. ``keeper``: a graph of nothing, because PyTorch
    takes no graph into a pool that all others have left."""

    handle: Any
    keeper: torch.cuda.CUDAGraph


# By device and by the stream that graphs will run on. Graphs that are captured on one stream share cuBLAS's workspace there, too.
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # the default stream can't be captured
_pools: weakref.WeakValueDictionary[tuple[int, int], Pool] = weakref.WeakValueDictionary()
_failed: list[torch.cuda.CUDAGraph] = []
"""Captures that failed: PyTorch up to 2.11 leaves its allocator of pinned memory with a function that looks at them."""


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
            ranged, pool, before = can_map(device), pool_of(key), torch.cuda.memory_reserved()
            with in_one_range() if ranged else contextlib.nullcontext():
                try:
                    graph.capture_begin(pool.handle, capture_error_mode="thread_local")
                    with counters.collected() if settings.enabled("counters") else contextlib.nullcontext() as found:
                        body(stream.cuda_stream)
                        graph.capture_end()
                        if found is not None:
                            found.spare(graph.raw_cuda_graph)
                    graph.instantiate()
                except BaseException:
                    _pools.pop(key, None)  # PyTorch up to 2.11 lets no graph into a pool in which a capture has failed
                    abandon(graph, device, pool.handle)
                    raise
        if torch.cuda.memory_reserved() - before >= LARGE:
            give_back()  # else what the runs before had taken would lie idle beside the graph's memory
    return graph.raw_cuda_graph_exec(), partial(launch, graph, pool)


@contextlib.contextmanager
def in_one_range() -> Iterator[None]:
    """PyTorch's allocator maps what it takes meanwhile into one range of addresses ("expandable segments"), where free neighbours
    join. What else the user has set stays; where that can't be known or set, memory is taken as ever."""
    before, change = allocator_settings(), change_allocator()
    if before is None or change is None or not settings.enabled("static_plan"):
        yield
        return
    try:
        change(",".join([*before, "expandable_segments:True"]))
    except (RuntimeError, ValueError) as error:
        warnings.warn(f"lazysched: CUDA graphs take more memory than they need, for PyTorch's allocator says: {error}",
                      RuntimeWarning, stacklevel=2)
        yield
        return
    try:
        yield
    finally:
        change(",".join([*before, "expandable_segments:False"]))


@functools.cache
def can_map(device: int) -> bool:
    """Does a capture go well during which the allocator maps memory? Tried on a graph that holds nothing else."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(), in_one_range():
        warnings.simplefilter("ignore")  # that it is empty
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            torch.empty(TRIED, dtype=torch.uint8, device=torch.device("cuda", device))
            graph.capture_end()
        except RuntimeError:
            abandon(graph, device, graph.pool())
            return False
    graph.reset()
    torch.cuda.empty_cache()  # else what was tried would lie idle
    return True


def allocator_settings() -> list[str] | None:
    """What the user has told PyTorch's allocator, or None where that maps memory already, or is another allocator."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    told = torch.cuda.memory._snapshot().get("allocator_settings", {})
    if told.get("expandable_segments", True) or "PYTORCH_CUDA_ALLOC_CONF" not in told:
        return None
    parts = [part for part in str(told["PYTORCH_CUDA_ALLOC_CONF"]).split(",") if part.strip()]
    return [part for part in parts if not part.strip().startswith("expandable_segments")]


def change_allocator() -> Callable[[str], None] | None:
    """PyTorch's function that tells its allocator other settings; its name has changed."""
    names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
    return next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)


def make_room() -> None:
    """Give cached memory back where a graph might need it: while a stream is captured PyTorch can't. Raises RuntimeError where
    memory runs short: the results of a graph keep theirs, which programs that run by themselves share."""
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > torch.cuda.mem_get_info()[0]:
        give_back()
    free, total = torch.cuda.mem_get_info()
    if free < total // SPARE:
        raise RuntimeError(f"less than a {SPARE}th of the GPU's memory is free, and a graph keeps that of its results")


def give_back() -> None:
    """Give cached memory back, that of ended graphs as well: there the allocator waits for the stream of their capture only, and
    they ran on another."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def launch(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """``pool`` lives as long as whoever may call this."""
    graph.replay()


def pool_of(key: tuple[int, int]) -> Pool:
    pool = _pools.get(key)
    if pool is None:
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= LARGE:
            give_back()  # else what ran so far would hold as much again while the first graph takes its memory
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
    memory which several streams use is never free again, and its generator, which then refuses to draw. What it leaves in its
    allocator of pinned memory can't be taken back: ``pool`` must not be captured into again."""
    _failed.append(graph)
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
