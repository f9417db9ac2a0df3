"""Which nodes would share a kernel: what codegen tells passes before any kernel is made. Imports `ir_nodes.graph` and
`ir_nodes.node` only."""

from __future__ import annotations

from typing import Callable, Container, NamedTuple, Sequence

from ir_nodes.graph import Graph
from ir_nodes.node import Node, Value


class Kernel(NamedTuple):
    """``nodes`` that one kernel would run, or, where they are not ``fused``, the engine's own call; ``stores``: which of their
    values it would leave in memory."""

    nodes: tuple[Node, ...]
    fused: bool
    stores: tuple[Value, ...]


Kernels = Sequence[Kernel]
Partition = Callable[[Graph], Kernels]
"""Gives the kernels that a graph would become."""


def homes(kernels: Kernels) -> dict[Node, int]:
    """The kernel of each node, -1 for one that is in several."""
    home: dict[Node, int] = {}
    for number, kernel in enumerate(kernels):
        for node in kernel.nodes:
            home[node] = -1 if node in home else number
    return home


def unstored(graph: Graph, kernels: Kernels) -> set[int]:
    """Buffers whose values would never leave a kernel, or would be computed again by everyone who reads them."""
    written = {write.value.buffer.index for node in graph.nodes for write in node.all_writes()}
    return written - {value.buffer.index for kernel in kernels for value in kernel.stores}


def traffic(graph: Graph, kernels: Kernels, alive: Container[Node] | None = None) -> int:
    """Bytes that these kernels read and write; what one of them makes for itself alone does not count, nor what only nodes read
    that are not ``alive``."""
    outputs = dict.fromkeys(graph.outputs())
    total = 0
    for kernel in kernels:
        inside = set(kernel.nodes)
        seen = {read.value: min(read.layout.nbytes, read.value.buffer.nbytes) for node in kernel.nodes for read in node.reads
                if read.value.producer not in inside}
        made = {write.value: write.layout.nbytes for node in kernel.nodes for write in node.writes if write.value in outputs
                or any(user not in inside and (alive is None or user in alive) for user in write.value.users)}
        total += sum(seen.values()) + sum(made.values())
    return total
