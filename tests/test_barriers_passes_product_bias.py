"""Small float32 products leave their biases to kernels, where cuBLAS would find a slow kernel for both."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from graphs import compare, externs, kernels, record
from torch import Tensor

from barriers.passes.product_bias import part_biases
from barriers.pipeline import ordered_passes
from codegen.cuda_graph import blocked_call
from codegen.extern import emit_call
from codegen.fuse import plan
from codegen.kernel import Plan
from codegen.tuning import INTERPRETER
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify


def parted(program: Callable[..., Any], *inputs: Tensor) -> tuple[Plan, str]:
    """What is run after the pass, whose results are those of eager mode, and what was told."""
    (recording, outs), remarks = record(program, *inputs), Remarks()
    part_biases(recording.graph, remarks)
    verify(recording.graph)
    made = plan(recording.graph, tuning=INTERPRETER)
    compare(recording, made, [*outs, *inputs], 1e-5, 1e-5)
    return made, "\n".join(f"{remark}" for remark, _ in remarks.all())


def factors(rows: int, summands: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    made = torch.randn(rows, summands), torch.randn(columns, summands) / summands**0.5, torch.randn(columns)
    return tuple(one.to(dtype) for one in made)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.addmm(bias, x, weight.t()))


def held(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.nn.functional.linear(x, weight, bias)
    return made, torch.tanh(made)


def into_memory(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t(), out=torch.ones(len(x), len(weight)).sin_()).exp()


@pytest.mark.parametrize("program", [layer, held, into_memory])
@pytest.mark.parametrize("sizes", [(32, 64, 256), (32, 1024, 64), (64, 23, 256)], ids=str)
def test_a_kernel_adds_the_bias_of_a_small_product(program: Callable[..., Any], sizes: tuple[int, int, int]) -> None:
    made, told = parted(program, *factors(*sizes))
    (product,) = externs(made)
    assert product.node.target == "aten::mm.out" and "kernel of what follows" in told
    assert sum("aten::add.out" in [node.target for node in step.nodes] for step in kernels(made)) == 1, "with what follows"
    step = emit_call(product.node)
    assert not step.blocked and not blocked_call(product.node) and step.early and not step.python


@pytest.mark.parametrize("sizes", [(256, 64, 256), (1024, 39, 128), (2048, 768, 768)], ids=str)
def test_cublas_adds_the_bias_of_a_large_product(sizes: tuple[int, int, int]) -> None:
    made, told = parted(layer, *factors(*sizes))
    assert [step.node.target for step in externs(made)] == ["aten::addmm"] and "so many" in told


def test_cublas_adds_biases_well_in_other_dtypes() -> None:
    recording = record(layer, *factors(32, 64, 256, torch.bfloat16))[0]
    assert [node.target for node in part_biases(recording.graph).nodes][0] == "aten::addmm"
    matmul = torch.backends.cuda.matmul
    with torch.backends.__allow_nonbracketed_mutation():  # also where PyTorch's own test suites, in this process, have locked it
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        try:
            assert "TF32" in parted(layer, *factors(32, 64, 256))[1]
        finally:
            matmul.fp32_precision = before


@pytest.mark.parametrize("program", [
    lambda x, weight, bias: torch.addmm(bias, x, weight.t(), alpha=2),
    lambda x, weight, bias: torch.addmm(bias, x, weight.t(), beta=0.5),
    lambda x, weight, bias: torch.addmm(bias.expand(32, 256) * 2, x, weight.t()),
], ids=["alpha", "beta", "matrix"])  # fmt: skip
def test_what_is_no_plain_row_stays(program: Callable[..., Any]) -> None:
    made, told = parted(program, *factors(32, 64, 256))
    assert [step.node.target for step in externs(made)] == ["aten::addmm"] and "no row" in told


@pytest.mark.parametrize("changes", [{}, {"gpu": False}, {"replays": False}, {"partition": None}], ids=str)
def test_it_is_for_steps_that_replay_on_a_gpu(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"replays": True, "gpu": True, "partition": lambda graph: [], **changes}
    graph = record(layer, *factors(32, 64, 256))[0].graph
    for step in ordered_passes(**given):
        if step.__name__ == "product_bias":
            graph = step(graph)
    assert any(node.target == "aten::mm.out" for node in graph.nodes) is not bool(changes)
