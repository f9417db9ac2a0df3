"""What a back end is, and the aten one. Imports `ir_nodes`, `codegen.executable`, `codegen.extern` and `codegen.lowered` only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

from codegen.executable import Emit
from codegen.extern import emit_call
from codegen.lowered import Lowered
from ir_nodes import Graph, Node
from ir_nodes.estimate import Rates, cost
from ir_nodes.remarks import Remarks


class EngineError(RuntimeError):
    """An engine can't serve a graph. The text names the kernel or folder and the cause."""


class Unmade(EngineError):
    """Kernels can't be made. ``nodes``: what they would have computed."""

    def __init__(self, nodes: Sequence[Node], text: str) -> None:
        super().__init__(text)
        self.nodes = nodes


@dataclass(frozen=True, slots=True)
class Context:
    """What an engine is told: where it runs, where it may keep files."""

    cuda: bool
    device: int
    kernel_dir: Path
    show: Callable[[str], None] | None = None  # told each generated source, under a debug level
    numbers: Sequence[Any] = ()  # the graph's number inputs in the recording that is compiled; they may differ in any other
    lowered: Lowered | None = None  # what passes over the graph have found out of its nodes
    remarks: Remarks | None = None  # are told what was done and refused
    redraws: bool = False  # the program may draw the same numbers again, in another recording
    replays: bool = False  # steps run as CUDA graphs, so that what only Python can call costs nothing once it is captured
    measures: bool = True  # what LAZYSCHED_AUTOTUNE and its like ask for is measured, not only remembered


Generated = tuple[list[Emit], list[int]]
"""The steps of a program and the bytes of each temporary that they share."""


@dataclass(frozen=True, slots=True)
class BackEnd:
    """The interface of an engine; what ``fuse`` gives is its own, and only its other functions look into it.

    ``can_fuse``: why two nodes, the second after the first, can't share a kernel, "" where they can. ``fuse``: a graph as a plan
    of what runs together. ``generate``: steps for that plan, compiled. ``estimate``: the seconds that the plan takes.
    """

    can_fuse: Callable[[Node, Node, Context], str]
    fuse: Callable[[Graph, Context], Any]
    generate: Callable[[Graph, Any, Context], Generated]
    estimate: Callable[[Any, Rates], float]

    def __call__(self, graph: Graph, context: Context) -> Generated:
        """The steps for ``graph``. Raises EngineError."""
        return self.generate(graph, self.fuse(graph, context), context)


def _calls(graph: Graph, nodes: Sequence[Node], context: Context) -> Generated:
    return [emit_call(node) for node in nodes], []


def one_by_one(nodes: Sequence[Node], rates: Rates) -> float:
    """Seconds that ``nodes`` take as ATen calls."""
    return sum(cost(node, rates).seconds for node in nodes)


# Each node is one ATen call, in graph order: right on any device, and what others fall back to.
aten = BackEnd(
    can_fuse=lambda first, second, context: "ATen runs one op at a time",
    fuse=lambda graph, context: graph.nodes,
    generate=_calls,
    estimate=one_by_one,
)
