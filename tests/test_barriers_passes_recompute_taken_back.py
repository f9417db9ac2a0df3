"""Copies that recomputation takes back: what they stood for is there."""

from __future__ import annotations

import torch
from graphs import record

from barriers.passes import recompute
from barriers.passes.cse import merge_common
from barriers.passes.dead import eliminate_dead
from barriers.passes.fold import forward_copies
from barriers.passes.recompute import recompute_cheap
from benchmarks.compositions import Composition
from codegen.partition import partition
from ir_nodes import Graph
from ir_nodes.kernels import Kernel
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify


def test_copies_that_join_nothing_are_taken_back_and_then_those_that_move_more() -> None:
    """What the first stood for had been dropped, so that what read it was left with nothing."""
    compositions = [Composition(seed, (1024, 128, 4), 1 << 21) for seed in (2053, 2067)]
    given = [one.inputs("cpu") for one in compositions]

    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [*compositions[0](inputs[: len(given[0])]), *compositions[1](inputs[len(given[0]) :])]

    recording, _ = record(program, *given[0], *given[1])
    graph, remarks = eliminate_dead(merge_common(forward_copies(recording.graph))), Remarks()
    known = set(graph.nodes)

    def apart(graph: Graph) -> list[Kernel]:
        """The first copy is a kernel of its own, and so is each node of kernels that have got none."""
        found, copies = partition(graph), [node for node in graph.nodes if node not in known]
        out: list[Kernel] = []
        for kernel in found:
            alone = kernel.nodes if copies and not set(copies) & set(kernel.nodes) else copies[:1]
            parts = [(node,) for node in kernel.nodes if node in alone]
            rest = tuple(node for node in kernel.nodes if node not in alone)
            out += [kernel._replace(nodes=nodes) for nodes in (*parts, rest) if nodes]
        return out

    verify(recompute_cheap(graph, apart, remarks))
    assert {recompute.JOINS_NOTHING, recompute.MOVES_MORE} <= {remark.why for remark, _ in remarks.all()}
