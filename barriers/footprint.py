"""Bytes held at each place of an order, and whether more would fit below their peak. Imports `ir_nodes` and `barriers.model`."""

from __future__ import annotations

from barriers.model import last_uses, touched
from ir_nodes import BufferKind, Graph

SHORT = 16
"""A buffer that lives for fewer nodes most likely never reaches memory, for its ops share a kernel."""


class Footprint:
    """What the buffers of ``graph`` that live long hold over time, as a tree of maxima: questions take O(log n)."""

    def __init__(self, graph: Graph) -> None:
        self.size = 1 << max(len(graph.nodes) - 1, 0).bit_length()
        self.most = [0] * (2 * self.size)  # of the part of time below each knot, without what is held in all of a part above
        self.extra = [0] * (2 * self.size)  # held in all of the knot's part
        steps = [0] * (self.size + 1)
        for buffer, (start, end) in spans(graph).items():
            if end - start >= SHORT:
                steps[start] += graph.buffers[buffer].nbytes
                steps[end + 1] -= graph.buffers[buffer].nbytes
        held = 0
        for place in range(self.size):
            held += steps[place]
            self.most[self.size + place] = held
        for knot in range(self.size - 1, 0, -1):
            self.most[knot] = max(self.most[2 * knot], self.most[2 * knot + 1])

    @property
    def peak(self) -> int:
        return self.most[1]

    def highest(self, first: int, last: int) -> int:
        """The most that is held from place ``first`` to ``last``."""
        return self._highest(first, last, 1, 0, self.size - 1)

    def _highest(self, first: int, last: int, knot: int, low: int, high: int) -> int:
        if first <= low and high <= last:
            return self.most[knot]
        middle, found = (low + high) // 2, 0
        if first <= middle:
            found = self._highest(first, last, 2 * knot, low, middle)
        if last > middle:
            found = max(found, self._highest(first, last, 2 * knot + 1, middle + 1, high))
        return found + self.extra[knot]

    def hold(self, first: int, last: int, nbytes: int) -> None:
        """``nbytes`` more are held from place ``first`` to ``last``."""
        self._hold(first, last, nbytes, 1, 0, self.size - 1)

    def _hold(self, first: int, last: int, nbytes: int, knot: int, low: int, high: int) -> None:
        if first <= low and high <= last:
            self.most[knot] += nbytes
            self.extra[knot] += nbytes
            return
        middle = (low + high) // 2
        if first <= middle:
            self._hold(first, last, nbytes, 2 * knot, low, middle)
        if last > middle:
            self._hold(first, last, nbytes, 2 * knot + 1, middle + 1, high)
        self.most[knot] = max(self.most[2 * knot], self.most[2 * knot + 1]) + self.extra[knot]


def spans(graph: Graph) -> dict[int, tuple[int, int]]:
    """From where to where each buffer that a node touches is held. What is alive at the end stays, inputs are there at once."""
    first: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for index in touched(node):
            first.setdefault(index, position)
    found: dict[int, tuple[int, int]] = {}
    for index, last in last_uses(graph.nodes).items():
        buffer = graph.buffers[index]
        if buffer.kind is not BufferKind.GENERATOR:
            found[index] = (0 if buffer.kind is BufferKind.INPUT else first[index], len(graph.nodes) - 1 if buffer.live else last)
    return found
