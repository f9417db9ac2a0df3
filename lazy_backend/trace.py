"""Turns a recording of the native core into an `ir_nodes.Graph`. Imports torch, `ir_nodes` and `schema` only."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol, Sequence

import torch

from ir_nodes import Access, BufferKind, Frame, Graph, Layout, ScalarInput, SegmentCall
from ir_nodes.node import Arg, Buffer
from ir_nodes.ops import written_mode
from lazy_backend.schema import ArgKind


class Recording(Protocol):
    """What the native core shows of a recording: plain tuples, see csrc/bind.cpp."""

    live: list[int]  # of each buffer: is it held, or asked for?
    held: list[int]  # segments that wait for the schedule, while only these buffers are needed
    needed: list[int]
    refused: set[int]  # instructions that no CUDA graph could hold when this ran before

    def instrs(self) -> list[tuple[str, int, int, int, int, int, str, int, int, int]]: ...
    def args(self) -> list[tuple[int, int, int, Any]]: ...
    def operands(self) -> list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int, bool]]: ...
    def buffers(self) -> list[tuple[int, int, bool, int]]: ...
    def scalars(self) -> list[int | float | bool | complex]: ...
    def bytes(self, buffer: int) -> torch.Tensor | None: ...
    def forget(self, buffer: int) -> None: ...
    def keep(self, instrs: Sequence[int]) -> None: ...
    def set_scalar(self, index: int, value: float) -> None: ...


_BUFFER_KINDS = (BufferKind.INPUT, BufferKind.FRESH, BufferKind.GENERATOR)
_TENSORS = (ArgKind.TENSOR_LIST, ArgKind.OPT_TENSOR_LIST)
_NUMBERS = (ArgKind.SCALAR_LIST, ArgKind.FLOAT_LIST)


def to_graph(recording: Recording, segments: Sequence[SegmentCall | None] = ()) -> Graph:
    """The recording in single-assignment form. Nodes keep the index of their instruction and the user's line.

    ``segments``: what the core's segment numbers mean.
    """
    graph = Graph()
    for nbytes, kind, live, _ in recording.buffers():
        graph.add_buffer(nbytes, _BUFFER_KINDS[kind], live)
    kinds = [type(number).__name__ for number in recording.scalars()]
    for kind in kinds:
        graph.add_scalar(kind)
    reader = ArgReader(graph, recording.args(), recording.operands(), kinds)
    instrs = recording.instrs()
    frames = forward_frames(instrs)
    for index, (target, first, count, outs, n_outs, generator, place, _, backward, segment) in enumerate(instrs):
        args = [reader.argument(target, position, first + position) for position in range(count)]
        fresh = [reader.access(operand, "w") for operand in range(outs, outs + n_outs)]
        effects = [] if generator < 0 else [state_access(graph.buffers[generator])]
        node = graph.record(target, args, fresh, effects, parse_frame(place) or frames.get(backward), index)
        node.segment = segments[segment] if segment else None
    return graph


@dataclass(frozen=True, slots=True)
class ArgReader:
    """Reads recorded arguments by their place in the recording."""

    graph: Graph
    args: list[tuple[int, int, int, Any]]
    operands: list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int, bool]]
    scalar_kinds: list[str]

    def argument(self, target: str, position: int, index: int) -> Arg:
        """Argument ``position`` of ``target``; ``index`` is its place among all arguments."""
        kind, first, count, value = self.args[index]
        if kind == ArgKind.TENSOR:
            return self.access(first, written_mode(target, position))
        if kind in _TENSORS:
            return tuple(self.access(operand, written_mode(target, position)) for operand in range(first, first + count))
        if kind == ArgKind.HOST_SCALAR and value is torch.float64:
            return ScalarInput(first, "double")
        if kind in (ArgKind.SCALAR, ArgKind.HOST_SCALAR):
            return self.scalar(first)
        if kind in _NUMBERS:
            return tuple(self.scalar(number) for number in range(first, first + count))
        return value if kind == ArgKind.CONST else None

    def access(self, index: int, mode: str) -> Access | None:
        buffer, dtype, size, stride, offset, flipped = self.operands[index]
        return None if buffer < 0 else Access(self.graph.buffers[buffer], Layout(dtype, size, stride, offset, flipped), mode)

    def scalar(self, index: int) -> ScalarInput:
        return ScalarInput(index, self.scalar_kinds[index])


def forward_frames(instrs: list[tuple[Any, ...]]) -> dict[int, Frame]:
    """The line of each forward op by autograd sequence number: an op that backward records has no Python frame of its own."""
    frames: dict[int, Frame] = {}
    for *_, place, sequence, backward, _ in instrs:
        frame = parse_frame(place)
        if backward < 0 < sequence and frame is not None:  # the first op that follows a node's making is that node's own
            frames.setdefault(sequence - 1, Frame(frame.file, frame.line, f"{frame.function} (its backward)"))
    return frames


@functools.lru_cache(4096)  # at every barrier, most of which are where others were
def parse_frame(place: str) -> Frame | None:
    """A frame from the core's "file:line in function"; None for ""."""
    if not place:
        return None
    head, _, function = place.rpartition(" in ")
    file, _, line = head.rpartition(":")
    return Frame(file, int(line), function)


def state_access(buffer: Buffer) -> Access:
    return Access(buffer, Layout(torch.uint8, (buffer.nbytes,), (1,)), "rw")
