"""Products apply the ReLU behind them where nobody could tell, and leave the same bits."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from graphs import record
from torch import Tensor

from barriers.passes.epilogues import TOGETHER, join_relus
from codegen.cuda_graph import blocked_call
from codegen.extern import emit_call
from ir_nodes import Graph
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify

WEIGHT, BIAS = torch.randn(16, 24), torch.randn(16)


def joined(program: Callable[..., Any], *inputs: Tensor) -> tuple[Graph, str]:
    """The graph after the pass, and what was told."""
    graph, remarks = record(program, *inputs)[0].graph, Remarks()
    join_relus(graph, remarks)
    verify(graph)
    return graph, "\n".join(f"{remark}" for remark, _ in remarks.all())


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.addmm(bias, x, weight.t()))


def in_place(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t()).relu_()


def three_dimensions(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.addmm(bias, x, weight.t()).view(2, 4, 16)) + 1


def out_of_place(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.addmm(bias, x, weight.t(), out=torch.empty(8, 16, dtype=x.dtype)))


def scaled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.addmm(bias, x, weight.t(), alpha=2))


JOINED = [scaled, layer, in_place, three_dimensions, out_of_place]


@pytest.mark.parametrize("program", JOINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_applies_its_relu(program: Callable[..., Any], dtype: torch.dtype) -> None:
    inputs = [one.to(dtype) for one in (torch.randn(8, 24), WEIGHT, BIAS)]
    graph, told = joined(program, *inputs)
    assert [node.target for node in graph.nodes][:1] == [TOGETHER] and "cuBLAS applies the ReLU" in told
    assert not any(node.name in ("relu", "relu_") for node in graph.nodes)
    (product,) = [node for node in graph.nodes if node.target == TOGETHER]
    step = emit_call(product)
    assert not step.blocked and not blocked_call(product) and step.early and not step.python


def held(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.addmm(bias, x, weight.t())
    return made, torch.relu(made)


def read_twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    made = torch.addmm(bias, x, weight.t())
    return torch.relu(made) + made.sigmoid()


def a_part(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.addmm(bias, x, weight.t())[:4])


def into_memory(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.addmm(torch.zeros(8, 16), x, weight.t()))


@pytest.mark.parametrize("program, reason", [
    (held, "the product is held"), (a_part, "another part or layout"),
    (into_memory, "the bias is no row"), (read_twice, "")])  # fmt: skip
def test_refusals(program: Callable[..., Any], reason: str) -> None:
    graph, told = joined(program, torch.randn(8, 24), WEIGHT, BIAS)
    assert reason in told and bool(told) == bool(reason)
    assert not any(node.target == TOGETHER for node in graph.nodes)


def test_sizes_that_cublas_leaves_to_another_kernel() -> None:
    _, told = joined(layer, torch.randn(8, 23), WEIGHT[:, :23], BIAS)
    assert "no multiple of 16 bytes" in told
