"""Which nodes would share a kernel: what codegen tells passes before any kernel is made. Imports `ir_nodes.graph` and
`ir_nodes.node` only."""

from __future__ import annotations

from typing import Callable, Container, NamedTuple, Sequence

from ir_nodes.graph import Graph
from ir_nodes.node import Node, Value

WINDOWS = frozenset(("cat", "stack", "constant_pad_nd", "slice_backward", "select_backward"))
"""Ops that put what they read into parts of something larger."""


class Kernel(NamedTuple):
    """``nodes`` that one kernel would run, or, where they are not ``fused``, the engine's own call; ``stores``: which of their
    values it would leave in memory; ``pulled``: which of the nodes it runs for parts of what others make (`with_pulled`)."""

    nodes: tuple[Node, ...]
    fused: bool
    stores: tuple[Value, ...]
    pulled: tuple[Node, ...] = ()


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


def with_pulled(graph: Graph, kernels: Kernels) -> list[Kernel]:
    """The kernels with the nodes as well that none is there for, as all who read them are in one and compute them there: what
    concatenations, pads and gradients of slices are made of."""
    home, added = homes(kernels), dict[int, dict[Node, None]]()
    for node in reversed(graph.nodes):
        users = [user for write in node.writes for user in write.value.users] if node not in home else []
        places = {home.get(user, -1) for user in users}
        if len(places) != 1 or (place := places.pop()) < 0 or not kernels[place].fused:
            continue
        pulled = added.setdefault(place, {})
        if any(is_window(user) or user in pulled for user in users):
            home[node] = place
            pulled[node] = None
    found = [tuple(reversed(added.get(place, {}))) for place in range(len(kernels))]
    return [kernel._replace(nodes=(*pulled, *kernel.nodes), pulled=pulled) for kernel, pulled in zip(kernels, found)]


def is_window(node: Node) -> bool:
    """Does it put its operands, or what it writes, into parts of something larger?"""
    inplace = any(write.base is not None and not write.layout.covers(write.value.buffer.nbytes) for write in node.writes)
    return inplace or node.name in WINDOWS


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
