"""Counters of a library's products, set to zero once for a whole CUDA graph. Imports torch and codegen's driver module.

Some of cuBLASLt's algorithms count the blocks that their programs have taken, in four bytes that have to be zero before. The
library sets them to zero by a node of its own in front of each launch, which takes 2.6 us on an H200, in steps of a hundred such
products. So while a graph is captured each launch gets a counter that nobody else has. One node sets them all to zero, and
those of the library are taken out of the graph before it is made ready to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Callable, Iterator

import torch

from codegen.cuda_driver import DriverError, call

COUNTER, APART = 128, 256
"""Bytes of a counter at most, and from one to the next: a workspace begins at a multiple of it."""
ROOM = 1 << 20
"""Bytes of all counters of a graph; a launch for which none is left has its memory zeroed by the library."""

_MEMSET = 2  # of CUgraphNodeType


class _Memset(ctypes.Structure):
    """`CUDA_MEMSET_NODE_PARAMS`."""

    _fields_ = [("start", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("item", c_uint), ("width", c_size_t),
                ("height", c_size_t)]

    @property
    def nbytes(self) -> int:
        return int(self.item * self.width * self.height)


class Counters:
    """The counters of one capture. They lie in memory of the graph's own pool, which belongs to it while it runs."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._taken = 0

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Zeros that no other launch of the graph has; None where ``nbytes`` are no counter, or there is no room for one more.
        The first one to ask writes the zeros, in front of all launches that get some."""
        if not 0 < nbytes <= COUNTER or self._taken + APART > ROOM:
            return None
        if self._memory is None:
            self._memory = torch.zeros(ROOM, dtype=torch.uint8, device=device)
        self._taken += APART
        return self._memory[self._taken - APART : self._taken]

    def spare(self, captured: Callable[[], int]) -> int:
        """Take nodes that set a counter to zero out of the CUgraph that ``captured`` gives, if there is any counter: how many.
        What the driver does not let go stays, which costs time only."""
        if self._memory is None:
            return 0
        start, graph = self._memory.data_ptr(), captured()
        found = 0
        for node in _list("cuGraphGetNodes", c_void_p(graph)):
            with contextlib.suppress(DriverError):
                found += start <= _zeroed(node) < start + self._taken and _taken_out(graph, node)
        return found


_here = threading.local()


@contextlib.contextmanager
def collected() -> Iterator[Counters]:
    """What this thread launches meanwhile is captured, and finds its counters here."""
    before, _here.counters = current(), Counters()
    try:
        yield _here.counters
    finally:
        _here.counters = before


def current() -> Counters | None:
    return getattr(_here, "counters", None)


def workspace(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory for a product's launch on ``device``: a counter where one is enough and a graph is captured."""
    counters = current()
    counter = counters.take(nbytes, device) if counters is not None else None
    return torch.empty(nbytes, dtype=torch.uint8, device=device) if counter is None else counter


def _zeroed(node: int) -> int:
    """The address that a node sets to zero, if it does nothing else and is as small as a counter; else 0."""
    kind, memset = c_int(), _Memset()
    call("cuGraphNodeGetType", c_void_p(node), byref(kind))
    if kind.value != _MEMSET:
        return 0
    call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(memset))
    return int(memset.start) if memset.nbytes <= COUNTER and memset.value == 0 else 0


def _taken_out(graph: int, node: int) -> bool:
    """What waited for ``node`` waits for what it waited for. Raises DriverError before anything has changed."""
    before, after = _list("cuGraphNodeGetDependencies", c_void_p(node)), _list("cuGraphNodeGetDependentNodes", c_void_p(node))
    for first in before:
        for second in after:
            call("cuGraphAddDependencies", c_void_p(graph), byref(c_void_p(first)), byref(c_void_p(second)), c_size_t(1))
    call("cuGraphDestroyNode", c_void_p(node))
    return True


def _list(name: str, of: c_void_p) -> list[int]:
    """What a function of the driver lists of a graph or node: asked for its length first."""
    count = c_size_t()
    call(name, of, None, byref(count))
    handles = (c_void_p * max(count.value, 1))()
    if count.value:
        call(name, of, handles, byref(count))
    return [int(handle) for handle in handles[: count.value] if handle]
