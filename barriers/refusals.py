"""Why an order cannot be, as sentences for the user. Imports `ir_nodes` and `barriers.dependencies` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from barriers.dependencies import needs, older_values
from ir_nodes import BufferKind, Frame, Graph, Node, SegmentCall


@dataclass(frozen=True, slots=True)
class Refusal:
    """A wish that data flow forbids, or grants only in part; ``reason`` is a sentence for the user."""

    earlier: SegmentCall
    later: SegmentCall
    reason: str
    partly: bool = False

    def __str__(self) -> str:
        return f"wanted {self.earlier} before {self.later}, but {self.reason}"


def data_flow(
    graph: Graph, before: list[list[int]], a: SegmentCall, b: SegmentCall, start: int, own: set[int], waits: Callable[[int], bool]
) -> str:
    """Which tensor makes ``a`` wait for ``b``: ``start`` is a node of ``a`` that waits, ``own`` are the nodes of ``b``."""
    while not own.intersection(before[start]):
        start = next(other for other in before[start] if waits(other))
    consumer = graph.nodes[start]
    makers = {graph.nodes[other] for other in own}
    maker, value, how = next(found for found in needs(consumer, older_values(graph)) if found[0] in makers)
    if value.buffer.kind is BufferKind.GENERATOR:
        places = f"{at(maker.frame)} and{at(consumer.frame)}"
        return f"both draw random numbers from one generator{places}, and draws keep the program's order, so that numbers do too"
    tensor = describe(value.buffer.nbytes, maker)
    if how == "needs":
        reader = f"{consumer.name}{at(consumer.frame)}"
        return f"{a} needs {tensor} made{at(maker.frame)} by {b} ({reader} reads it)"
    return f"{a} overwrites{at(consumer.frame)} memory ({tensor}) that {b} uses{at(maker.frame)}"


def describe(nbytes: int, maker: Node) -> str:
    layout = maker.writes[0].layout if maker.writes else None
    shape = f"{str(layout.dtype).removeprefix('torch.')}{list(layout.size)}" if layout else f"{nbytes} bytes"
    return f"`{maker.name}` {shape}"


def at(frame: Frame | None) -> str:
    return f" at {frame}" if frame else ""
