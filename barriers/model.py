"""What an order would cost, before it runs: memory and time. Imports `ir_nodes` only.

Memory as the engines plan it: a buffer is there from its first use to its last. Time on two lanes, computation and communication,
each of which runs one op after the other; a collective starts when its lane is free and what it needs is there, and only its
readers wait for it.
"""

from __future__ import annotations

from typing import Container, NamedTuple, Sequence

from ir_nodes import BufferKind, Graph, Node
from ir_nodes.estimate import Cost


class Span(NamedTuple):
    """One node on a lane, in seconds from the start. ``position``: in the graph's nodes."""

    position: int
    collective: bool
    start: float
    end: float


def touched(node: Node) -> dict[int, None]:
    """The buffers that ``node`` reads or writes."""
    found = {operand.value.buffer.index: None for operand in node.reads}
    for write in node.all_writes():
        found[write.value.buffer.index] = None
    return found


def last_uses(nodes: Sequence[Node]) -> dict[int, int]:
    """The position of each buffer's last use."""
    return {buffer: position for position, node in enumerate(nodes) for buffer in touched(node)}


def memory(graph: Graph, nodes: Sequence[Node], without: Container[int] = ()) -> list[int]:
    """Bytes held while each of ``nodes`` runs, in this order. What is alive when the recording ends stays; so do inputs alive.
    ``without``: buffers that take none."""
    last = last_uses(nodes)
    there = {buffer.index: buffer.kind is BufferKind.INPUT for buffer in graph.buffers}
    held = sum(buffer.nbytes for buffer in graph.buffers if buffer.kind is BufferKind.INPUT and buffer.index in last)
    found: list[int] = []
    for position, node in enumerate(nodes):
        gone = 0
        for index in touched(node):
            buffer = graph.buffers[index]
            if buffer.kind is BufferKind.GENERATOR or index in without:
                continue
            if not there[index]:
                there[index] = True
                held += buffer.nbytes
            if last[index] == position and not buffer.live:
                gone += buffer.nbytes
        found.append(held)
        held -= gone
    return found


def lanes(order: Sequence[int], before: list[list[int]], costs: Sequence[Cost]) -> list[Span]:
    """When each node would run; ``order`` are positions, as ``before`` and ``costs`` count them."""
    now = link = 0.0
    done = [0.0] * len(before)
    spans: list[Span] = []
    for position in order:
        cost = costs[position]
        ready = max((done[other] for other in before[position]), default=0.0)
        if cost.waits:
            done[position] = ready
            continue
        if cost.collective:
            start = max(link, now, ready)
            link = done[position] = start + cost.seconds
        else:
            start = max(now, ready)
            now = done[position] = start + cost.seconds
        spans.append(Span(position, cost.collective, start, done[position]))
    return spans


def overlap(spans: Sequence[Span]) -> tuple[float, float, float]:
    """Seconds of computation, of communication, and of communication while nothing computes."""
    computing = [(span.start, span.end) for span in spans if not span.collective]
    total = sum(end - start for start, end in computing)
    talking = sum(span.end - span.start for span in spans if span.collective)
    hidden, index = 0.0, 0
    for span in spans:
        if not span.collective:
            continue
        while index < len(computing) and computing[index][1] <= span.start:
            index += 1
        for start, end in computing[index:]:
            if start >= span.end:
                break
            hidden += min(end, span.end) - max(start, span.start)
    return total, talking, max(talking - hidden, 0.0)
