"""Small graphs with segments, built op by op. Imports torch, `ir_nodes` and `barriers` only."""

from __future__ import annotations

from typing import Sequence

import torch

from barriers.hooks import ScheduleHook
from barriers.order import Ordered, order_segments
from barriers.recorded import Ask
from barriers.wishes import Moves, Wish
from ir_nodes import Access, BufferKind, Frame, Graph, Layout, SegmentCall
from ir_nodes.verify import verify


class Toy:
    """Builds a graph op by op; `end` marks everything recorded since the last mark as one segment."""

    def __init__(self, *inputs: str, floats: int = 4) -> None:
        self.graph = Graph()
        self.layout = Layout.contiguous(torch.float32, (floats,))
        self.buffers = {name: self.graph.add_buffer(4 * floats, BufferKind.INPUT, live=True) for name in inputs}
        self._marked = 0

    def op(self, out: str, *reads: str, line: int = 0, live: bool = True) -> None:
        """``out`` = the sine or maximum of ``reads``; an ``out`` that exists is written in place."""
        target = self._access(out, self.layout, live)
        sources = [Access(self.buffers[name], self.layout) for name in reads]
        frame = Frame("model.py", line, "forward")
        self.graph.record("aten::sin.out" if len(sources) == 1 else "aten::maximum.out", [*sources, target], [], [], frame)

    def shrink(self, out: str, read: str) -> None:
        """``out`` = the largest element of ``read``."""
        target = self._access(out, Layout.contiguous(torch.float32, ()), True)
        self.graph.record("aten::amax.out", [Access(self.buffers[read], self.layout), (), False, target])

    def talk(self, out: str, read: str) -> None:
        """``out`` = the sum of all ranks' ``read``."""
        access = self._access(out, self.layout, False)
        self.graph.record("_c10d_functional::all_reduce", [Access(self.buffers[read], self.layout), "sum", "0"], [access])

    def _access(self, out: str, layout: Layout, live: bool) -> Access:
        if out not in self.buffers:
            self.buffers[out] = self.graph.add_buffer(layout.nbytes, live=live)
        return Access(self.buffers[out], layout, "w")

    def end(self, name: str, call: int = 0, backward: bool = False) -> None:
        segment = SegmentCall(name, backward, call)
        for node in self.graph.nodes[self._marked :]:
            node.segment = segment
        self._marked = len(self.graph.nodes)

    def order(self, *wishes: Wish, hooks: Sequence[Ask] = ()) -> list[str]:
        """The segments of the nodes after ordering, "-" for none."""
        asked = [ScheduleHook(hook, number) for number, hook in enumerate(hooks)]
        self.report: Ordered = order_segments(self.graph, wishes, asked)
        verify(self.graph)
        return [str(node.segment) if node.segment else "-" for node in self.graph.nodes]


def three() -> Toy:
    toy = Toy("x")
    for name in ("a", "b", "c"):
        toy.op(f"{name}1", "x")
        toy.op(f"{name}2", f"{name}1")
        toy.end(name)
    return toy


def line_of(*steps: tuple[str, str, str]) -> Toy:
    """A toy of single ops: (segment or "", result, what it reads)."""
    toy = Toy("x")
    for segment, out, read in steps:
        toy.op(out, read)
        toy.graph.nodes[-1].segment = SegmentCall(segment) if segment else None
    return toy


def chain(nodes: int, segments: int) -> tuple[Graph, list[Wish]]:
    """Segments of equal length; each reads what the one two before it made. The odd ones are to run in the pairs' place."""
    toy = Toy("x")
    for number in range(segments):
        toy.op(f"s{number}.0", f"s{number - 2}.0" if number > 1 else "x")
        for step in range(1, nodes // segments):
            toy.op(f"s{number}.{step}", f"s{number}.{step - 1}")
        toy.end(f"s{number}")
    return toy.graph, [Wish(f"s{number + 1}", f"s{number}", Moves.EARLIER) for number in range(0, segments - 1, 2)]
