"""Copies between what convolutions work on and what the program sees, for `barriers.passes.channels_last`. Imports `ir_nodes` and
`barriers` parts only.

ATen, too, would copy a weight in rows for a channels_last input, but at each of its three uses, and a result that was promised in
rows, but in a kernel of its own. As nodes these copies are made once, and share kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterable

from barriers.passes.conv_bias import CONVOLUTION
from barriers.passes.permuted import is_channels_last, last_strides, makes_last
from ir_nodes import Graph, Layout, Node, Operand, Write
from ir_nodes.kernels import Partition
from ir_nodes.rewrite import copy, new_value, reread

GROUP_NORMS = ("native_group_norm", "native_group_norm_backward")
"""Generated kernels read and write these in any layout, ATen's only in rows."""


def back_to_rows(graph: Graph, nodes: Iterable[Node]) -> None:
    """Let those of ``nodes`` that ATen can compute in rows only read and leave copies in rows. For nodes that ATen has to run
    although kernels were meant to."""
    wanted = set(_relaid_norms(nodes))
    graph.nodes = [one for node in graph.nodes for one in (_between_rows(graph, node) if node in wanted else [node])]


def run_by_aten(graph: Graph, partition: Partition) -> list[Node]:
    """Norms over groups in channels_last memory that no kernel computes, such as long ones where `long_norms` is switched off."""
    norms = _relaid_norms(graph.nodes)
    fused = {node for kernel in partition(graph) if kernel.fused for node in kernel.nodes} if norms else ()
    return [node for node in norms if node not in fused]


def _relaid_norms(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.relaid and node.name in GROUP_NORMS]


def _between_rows(graph: Graph, node: Node) -> list[Node]:
    """``node``, which has rows now, between copies."""
    into, instead = list[Node](), dict[Operand, Operand]()
    for operand in dict.fromkeys(node.reads):
        if not operand.layout.is_contiguous:
            layout = rows(operand.layout)
            value = new_value(graph, layout.nbytes)
            into.append(copy(node, operand, Write(value, layout, None, False)))
            instead[operand] = Operand(value, layout)
    reread(node, lambda operand: instead.get(operand, operand))
    return [*into, node, *leave(graph, node, lambda write: None if write.layout.is_contiguous else rows(write.layout))]


def leave(graph: Graph, node: Node, layout_of: Callable[[Write], Layout | None]) -> list[Node]:
    """Let ``node`` leave its results as ``layout_of`` says, None: as is promised. Returns the nodes that copy the others."""
    made: list[Node] = []
    writes = list(node.writes)
    for place, write in enumerate(writes):
        layout = layout_of(write)
        if layout is not None:
            value = new_value(graph, layout.nbytes, node)
            writes[place] = Write(value, layout, None, False)
            made.append(copy(node, Operand(value, layout), write))
    node.writes = tuple(writes)
    return made


def bridge(graph: Graph, convolutions: Iterable[Node]) -> None:
    """Give ``convolutions`` channels_last copies of what came into the graph in rows, and let copies leave in rows what is
    promised so. Linear in nodes."""
    chosen, nodes = dict.fromkeys(convolutions), []
    copies: dict[Operand, Operand] = {}
    for node in graph.nodes:
        if node not in chosen:
            nodes.append(node)
            continue
        nodes += [*operands_for(graph, node, copies), node, *results_of(graph, node)]
    graph.nodes = nodes


def operands_for(graph: Graph, node: Node, copies: dict[Operand, Operand]) -> list[Node]:
    """Let ``node`` read copies, those of ``copies`` first. Returns the nodes that make new ones."""
    made: list[Node] = []
    instead: dict[Operand, Operand] = {}
    source, weight = (0, 1) if node.target == CONVOLUTION else (1, 2)
    told = any(makes_last(node.args[place].layout) for place in (source, weight))
    for place, operand in enumerate(node.args):
        if not isinstance(operand, Operand) or len(operand.layout.size) != 4 or operand.value.producer is not None:
            continue
        if is_channels_last(operand.layout) and (told or place != weight):
            continue
        if operand not in copies:
            layout = last(operand.layout)
            value = new_value(graph, layout.nbytes)
            made.append(copy(node, operand, Write(value, layout, None, False)))
            copies[operand] = Operand(value, layout)
        instead[operand] = copies[operand]
        node.relaid = True
    reread(node, lambda operand: instead.get(operand, operand))
    return made


def results_of(graph: Graph, node: Node) -> list[Node]:
    """Let ``node`` leave results that are promised in rows as it makes them. Returns the nodes that copy them."""
    def layout_of(write: Write) -> Layout | None:
        whole = write.base is None and len(write.layout.size) == 4 and write.layout.covers(write.value.buffer.nbytes)
        return last(write.layout) if whole and not is_channels_last(write.layout) else None

    made = leave(graph, node, layout_of)
    node.relaid |= bool(made)
    return made


def rows(layout: Layout) -> Layout:
    """A whole tensor in rows of the same size and dtype."""
    return Layout.contiguous(layout.dtype, layout.size)


def last(layout: Layout) -> Layout:
    """A whole channels_last tensor of the same size and dtype."""
    return replace(layout, stride=last_strides(layout.size), offset=0)
