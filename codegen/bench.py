"""Times launches on scratch memory of their own, never on a program's tensors.

Scratch has the sizes, strides and shared buffers of the launch. Floating-point numbers are random, because functions take other
ways at zero than elsewhere, and a GPU that computes with zeros takes less power; the rest is zeros, so that indices are in range.
Before each launch the L2 cache is filled with something else, as a step's other kernels do. Imports torch, `codegen.cuda_driver`
and plan types.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
from itertools import accumulate
from typing import Any, Callable, Iterator, Sequence

import torch

from codegen import cuda_driver
from codegen.cuda_driver import DriverError, Function
from codegen.kernel import ExternStep, KernelArg, KernelStep, Offset, Pointer, Size, Temporary
from ir_nodes import call, ops
from ir_nodes.node import Node, Operand, Value, Write

_ALIGNMENT = 512  # more than any kernel is compiled to expect
_SHARE = 2  # scratch takes at most one part in so many of the free memory
_KINDS: dict[str, type[Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "fp64": ctypes.c_double}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


Ready = tuple[KernelStep | ExternStep, Function | None]
"""A launch with its kernel, or an ATen call."""


class Raw:
    """Memory at ``address`` as PyTorch takes it from others."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class Bench:
    """A context manager on device ``device`` with ``nbytes`` of scratch. Raises DriverError where there is not so much."""

    def __init__(self, device: int, nbytes: int) -> None:
        self._device = torch.cuda.device(device)
        self._flush = 2 * max(torch.cuda.get_device_properties(device).L2_cache_size, 1 << 20)
        self._nbytes = nbytes
        self._scratch = self._evicted = 0

    def __enter__(self) -> Bench:
        self._device.__enter__()
        try:
            self._scratch = cuda_driver.allocate(max(self._nbytes, 1))
            self._evicted = cuda_driver.allocate(self._flush)
        except DriverError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.current_stream().synchronize()
        for address in filter(None, (self._scratch, self._evicted)):
            cuda_driver.free(address)
        self._device.__exit__(None, None, None)

    def seconds(self, contestants: Sequence[Sequence[Ready]], rounds: int) -> list[float]:
        """Median times of launches, or of launches one after the other."""
        stream = torch.cuda.current_stream()
        return self.times([self._launches(contestant, stream.cuda_stream) for contestant in contestants], rounds)

    def times(self, ready: Sequence[Sequence[Callable[[], Any]]], rounds: int) -> list[float]:
        """Median seconds of calls one after the other, each list in turn, so that clocks that drift favour none."""
        stream = torch.cuda.current_stream()
        timed: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in ready]
        for _ in range(rounds):
            for events, launches in zip(timed, ready):
                cuda_driver.fill(self._evicted, self._flush, stream.cuda_stream)
                events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
                events[-1][0].record(stream)
                for launch in launches:
                    launch()
                events[-1][1].record(stream)
        stream.synchronize()
        return [statistics.median(start.elapsed_time(end) for start, end in events) / 1e3 for events in timed]

    def pieces(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The scratch in pieces of so many bytes each; for all of them `pieces_bytes` have to be there."""
        ends = list(accumulate(map(_rounded, sizes), initial=self._scratch))
        return [memory_at(start, nbytes) for start, nbytes in zip(ends, sizes)]

    def _launches(self, contestant: Sequence[Ready], stream: int) -> list[Callable[[], Any]]:
        """The launches, made once already."""
        places = memory_places([step for step, _ in contestant], self._scratch)
        cuda_driver.fill(self._scratch, self._nbytes, stream)
        self._draw([step for step, _ in contestant], places)
        launches: list[Callable[[], Any]] = []
        for step, function in contestant:
            if isinstance(step, KernelStep) and function is not None:
                launches.append(functools.partial(cuda_driver.launch, function, step.grid, arguments(step, places), stream,
                                                  step.kernel.cluster))
            elif isinstance(step, ExternStep):
                launches.append(aten_call(step.node, lambda place: memory_at(places[place.buffer.index], place.buffer.nbytes)))
        for launch in launches:
            launch()
        return launches


    def _draw(self, steps: Sequence[KernelStep | ExternStep], places: dict[object, int]) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        sizes = _sources(steps)
        for source, dtype in floats(steps).items():
            whole = sizes[source] // dtype.itemsize * dtype.itemsize
            memory_at(places[source], whole).view(dtype).normal_(generator=generator)


def memory_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.as_tensor(Raw(address, nbytes), device="cuda")


def room(device: int) -> int:
    """Bytes that scratch may take now."""
    return int(torch.cuda.mem_get_info(device)[0]) // _SHARE


def aten_call(node: Node, memory: Callable[[Value], torch.Tensor]) -> Callable[[], Any]:
    """The node's call on tensors in ``memory``, which gives the bytes of a value's buffer. Numbers are 1."""

    def seen(place: Operand | Write) -> torch.Tensor:
        layout = place.layout
        return torch.empty(0, dtype=layout.dtype, device=memory(place.value).device).set_(
            memory(place.value).untyped_storage(), layout.offset, layout.size, layout.stride)

    fill = call.Fill(operand=seen, target=seen, scalar=lambda number: 1, device=torch.device("cuda"))
    positional, keyword = call.arguments(node, fill)
    return functools.partial(ops.overload(node.target), *positional, **keyword)


def scratch_bytes(steps: Sequence[KernelStep | ExternStep]) -> int:
    return sum(_rounded(nbytes) for nbytes in _sources(steps).values())


def pieces_bytes(sizes: Sequence[int]) -> int:
    return sum(map(_rounded, sizes))


def can_time(step: KernelStep) -> bool:
    """False for a launch with arguments of a kind that nobody has thought of here."""
    return all(kind in _KINDS or kind.startswith("*") for _, kind in step.kernel.signature)


def memory_places(steps: Sequence[KernelStep | ExternStep], base: int) -> dict[object, int]:
    """An address, from ``base`` on, for each piece of memory that the steps touch."""
    places, end = {}, base
    for source, nbytes in _sources(steps).items():
        places[source] = end
        end += _rounded(nbytes)
    return places


def arguments(step: KernelStep, places: dict[object, int]) -> list[Any]:
    """What the launch takes, as ctypes values."""
    return [_argument(arg, kind, places) for arg, (_, kind) in zip(step.args, step.kernel.signature)]


def _argument(arg: KernelArg, kind: str, places: dict[object, int]) -> Any:
    if isinstance(arg, Pointer):
        return ctypes.c_uint64(places[_memory(arg)] + arg.byte_offset)
    return _KINDS[kind](arg.value if isinstance(arg, Size) else 4 if isinstance(arg, Offset) else 1)


def _memory(arg: Pointer) -> object:
    """What values that share memory share."""
    return arg.source if isinstance(arg.source, Temporary) else arg.source.buffer.index


def _sources(steps: Sequence[KernelStep | ExternStep]) -> dict[object, int]:
    """The bytes of each piece of memory."""
    return {source: nbytes for source, nbytes, _ in _touched(steps)}


def floats(steps: Sequence[KernelStep | ExternStep]) -> dict[object, torch.dtype]:
    """The memory that all see as numbers of one floating-point type, and that type."""
    seen: dict[object, set[torch.dtype]] = {}
    for source, _, dtype in _touched(steps):
        seen.setdefault(source, set()).add(dtype)
    return {source: next(iter(found)) for source, found in seen.items() if len(found) == 1 and found <= _FLOATS}


def _touched(steps: Sequence[KernelStep | ExternStep]) -> Iterator[tuple[object, int, torch.dtype]]:
    """Each piece of memory with its bytes and what it is seen as, as often as something reads or writes it."""
    for step in steps:
        if isinstance(step, ExternStep):
            for place in (*step.node.reads, *step.node.writes):
                yield place.value.buffer.index, place.value.buffer.nbytes, place.layout.dtype
            continue
        for arg in step.args:
            if isinstance(arg, Pointer):
                nbytes = arg.source.nbytes if isinstance(arg.source, Temporary) else arg.source.buffer.nbytes
                yield _memory(arg), nbytes, arg.dtype


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
