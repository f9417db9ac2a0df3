"""Turns a recording of the native core into an `ir_nodes.Graph`. Imports torch and `ir_nodes` only."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ir_nodes import Access, BufferKind, Frame, Graph, Layout, ScalarInput
from ir_nodes.node import Arg, Buffer
from ir_nodes.ops import written_mode


class Recording(Protocol):
    """What the native core shows of a recording: plain tuples, see `TraceView` in csrc/bind.cpp."""

    def instrs(self) -> list[tuple[Any, ...]]: ...
    def buffers(self) -> list[tuple[int, str, bool]]: ...
    def scalars(self) -> list[int | float | bool | complex]: ...


def to_graph(recording: Recording) -> Graph:
    """The recording in single-assignment form. Nodes keep the index of their instruction and the user's line."""
    graph = Graph()
    for nbytes, kind, live in recording.buffers():
        graph.add_buffer(nbytes, BufferKind(kind), live)
    for number in recording.scalars():
        graph.add_scalar(type(number).__name__)
    instrs = recording.instrs()
    frames = forward_frames(instrs)
    for index, (target, args, outs, generator, place, _, backward) in enumerate(instrs):
        read_args = [read_arg(graph, target, position, arg) for position, arg in enumerate(args)]
        fresh = [None if out is None else access(graph, out, "w") for out in outs]
        effects = [] if generator < 0 else [state_access(graph.buffers[generator])]
        graph.record(target, read_args, fresh, effects, parse_frame(place) or frames.get(backward), index)
    return graph


def forward_frames(instrs: list[tuple[Any, ...]]) -> dict[int, Frame]:
    """The line of each forward op by autograd sequence number: an op that backward records has no Python frame of its own."""
    frames: dict[int, Frame] = {}
    for *_, place, sequence, backward in instrs:
        frame = parse_frame(place)
        if backward < 0 and frame is not None:
            frames[sequence - 1] = Frame(frame.file, frame.line, f"{frame.function} (its backward)")
    return frames


def parse_frame(place: str) -> Frame | None:
    """A frame from the core's "file:line in function"; None for ""."""
    if not place:
        return None
    head, _, function = place.rpartition(" in ")
    file, _, line = head.rpartition(":")
    return Frame(file, int(line), function)


def read_arg(graph: Graph, target: str, position: int, arg: tuple[Any, ...] | None) -> Arg:
    if arg is None:
        return None
    match arg[0]:
        case "t":
            return access(graph, arg, written_mode(target, position) if arg[6] != "r" else "r")
        case "l":
            return tuple(read_arg(graph, target, position, item) for item in arg[1])
        case "s":
            return ScalarInput(arg[1], arg[2])
        case _:
            return arg[1]


def access(graph: Graph, operand: tuple[Any, ...], mode: str) -> Access:
    _, buffer, dtype, size, stride, offset, _, flipped = operand
    return Access(graph.buffers[buffer], Layout(dtype, size, stride, offset, flipped), mode)


def state_access(buffer: Buffer) -> Access:
    return Access(buffer, Layout(torch.uint8, (buffer.nbytes,), (1,)), "rw")
