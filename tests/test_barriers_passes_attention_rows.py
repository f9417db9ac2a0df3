"""cuDNN's backward of attention reads gradients that lie as its result does: plans that PyTorch keeps do not know otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attentions import CUDNN, FLASH, Case
from graphs import kernels

import lazy_backend  # noqa: F401, registers the device
from barriers.passes.attention_rows import GRADIENT, RESULT, lay_gradients
from barriers.pipeline import ordered_passes, run_passes
from codegen.fuse import plan
from ir_nodes import Graph, Layout, Node, ops
from ir_nodes.node import Operand
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import reread
from ir_nodes.verify import verify
from tests.device import DEVICE, ON_GPU

BACKWARD = f"{CUDNN}_backward"


def recorded(layout: Layout | None = None, **case: object) -> tuple[Graph, list[Node]]:
    """A graph and its backwards, whose gradients lie as ``layout``."""
    graph = Case(**case).recording().graph  # type: ignore[arg-type]
    nodes = [node for node in graph.nodes if node.target.endswith("_backward")]
    for node in nodes if layout is not None else []:
        given = node.args[GRADIENT]
        reread(node, lambda operand, given=given: Operand(operand.value, layout) if operand == given else operand)  # type: ignore[misc]
    return graph, nodes


ROWS = Layout.contiguous(torch.bfloat16, (2, 3, 128, 64))
"""Heads one after the other; the result has them side by side."""


def test_the_places_are_those_of_the_schema() -> None:
    names = [argument.name for argument in ops.schema(BACKWARD).arguments]
    assert names[GRADIENT] == "grad_out" and names[RESULT] == "out"


def test_a_gradient_that_lies_as_the_result_is_read_where_it_is() -> None:
    graph, _ = recorded()
    before, remarks = graph.describe(), Remarks()
    assert lay_gradients(graph, remarks).describe() == before and not remarks.all()


@pytest.mark.parametrize("layout", [ROWS, replace(ROWS, stride=(0, 0, 0, 0)), replace(ROWS, stride=(24576, 64, 192, 0))], ids=str)
def test_one_that_lies_otherwise_is_copied(layout: Layout) -> None:
    graph, (node,) = recorded(layout)
    source, remarks = node.args[GRADIENT], Remarks()
    lay_gradients(graph, remarks)
    verify(graph, "lay_gradients")
    made, read = graph.nodes[graph.nodes.index(node) - 1], node.args[GRADIENT]
    assert made.name == "copy_" and made.reads == (source,) and isinstance(read, Operand)
    assert read.layout == node.args[RESULT].layout and read.value is made.writes[0].value and node.relaid  # type: ignore[union-attr]
    assert not made.as_recorded and node.as_recorded == (node.instr >= 0)
    ((remark, _),) = remarks.all()
    assert remark.done and "lies as the result" in remark.why
    (step,) = kernels(plan(graph))
    assert step.nodes == (made,), "a kernel copies, ATen attends"
    count = len(graph.nodes)
    assert len(lay_gradients(graph).nodes) == count, "once is enough"


def test_dimensions_of_one_element_lie_anyhow() -> None:
    graph, _ = recorded(replace(ROWS, size=(2, 1, 128, 64), stride=(8192, 77, 64, 1)), sizes=(2, 1, 128, 128, 64))
    assert len(lay_gradients(graph).nodes) == len(recorded(sizes=(2, 1, 128, 128, 64))[0].nodes)


def test_each_backward_has_a_copy_and_other_kernels_need_none() -> None:
    graph, nodes = recorded(ROWS, backwards=2)
    assert len(nodes) == 2 and [node.name for node in lay_gradients(graph).nodes].count("copy_") == 2
    graph, _ = recorded(ROWS, target=FLASH)
    assert not any(node.name == "copy_" for node in lay_gradients(graph).nodes)


@pytest.mark.parametrize("gpu", [True, False])
def test_no_later_pass_takes_the_copy_away(gpu: bool) -> None:
    graph, (node,) = recorded(ROWS)
    graph, _ = run_passes(graph, ordered_passes(gpu=gpu), check=True)
    assert (node.args[GRADIENT].layout == node.args[RESULT].layout) is gpu, "a CPU has no such plans"  # type: ignore[union-attr]


@pytest.mark.skipif(not ON_GPU, reason="only a GPU has cuDNN's plans")
def test_gradients_that_lie_one_way_and_the_other_are_both_read_rightly() -> None:
    """The second is read by the plan that was kept for the first, whose other operands lie alike."""
    whole = torch.randn(2, 128, 3, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide, narrow = torch.randn(2, 2, 128, 3, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16().unbind()

    def gradients(whole: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = (one.transpose(1, 2).detach().requires_grad_() for one in whole.unbind(2))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return list(torch.autograd.grad(out, (q, k, v), grad))

    for _ in range(2):
        here = whole.to(DEVICE)
        for grad, lies in ((wide, lambda one: one[:, :, 1]), (narrow, lambda one: one[:, :, 1].contiguous())):
            made = gradients(here, lies(grad.to(DEVICE)).transpose(1, 2))
            for found, wanted in zip(made, gradients(whole.double(), lies(grad.double()).transpose(1, 2))):
                assert (found.cpu().double() - wanted).norm() < 0.02 * wanted.norm()
