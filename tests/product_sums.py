"""Sums of matrix products before and after the pass that adds them up in place. Imports torch, `graphs`, the pass, `ir_nodes`."""

from __future__ import annotations

from typing import Any, Callable

import torch
from graphs import record, typed
from torch import Tensor

from barriers.passes.product_sums import sum_products
from ir_nodes import Graph
from ir_nodes.reference import run
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify

Program = Callable[..., Any]
DTYPES = [torch.bfloat16, torch.float16]


def factors(count: int, dtype: torch.dtype = torch.bfloat16, rows: int = 16, inner: int = 24, columns: int = 8) -> list[Tensor]:
    """So many pairs of factors, one after the other."""
    draws = torch.Generator().manual_seed(count)
    return [torch.randn(*size, generator=draws).to(dtype) for _ in range(count) for size in ((rows, inner), (inner, columns))]


def summed(program: Program, *inputs: Tensor, change: Callable[[Graph], None] = lambda graph: None) -> tuple[Graph, str]:
    """The graph after the pass, and what was told."""
    graph, remarks = record(program, *inputs)[0].graph, Remarks()
    change(graph)
    sum_products(graph, remarks)
    verify(graph)
    return graph, "\n".join(f"{remark.done} {remark}" for remark, _ in remarks.all())


def nearer(program: Program, *inputs: Tensor) -> list[str]:
    """The ops after the pass, which has to keep their order and to bring the program's one result nearer to the truth."""
    recording, (eager,) = record(program, *inputs)
    order = [node.index for node in sum_products(recording.graph).nodes]
    verify(recording.graph)
    (value,) = recording.graph.outputs()
    made = typed(run(recording.graph, recording.inputs, recording.scalars)[value.buffer.index], eager)
    truth = program(*(one.double() for one in inputs))
    off, before = (float((one.double() - truth).norm() / truth.norm()) for one in (made, eager))
    assert off < before and off < 8 * torch.finfo(eager.dtype).eps and order == sorted(order), (off, before, order)
    return [node.name for node in recording.graph.nodes]
