"""Gradients of attention that kernels put side by side where autograd would concatenate them: numbers, the plan, refusals."""

from __future__ import annotations

import os

import children
import pytest
import torch
from attentions import CUDNN, FLASH, NAMES, Case, bits_of
from graphs import compile_all, execute, externs, kernels, typed, uses_of

from barriers.pipeline import run_passes
from codegen import attention
from codegen.attention_joined import JOINED, gradients_of
from codegen.fuse import plan
from codegen.kernel import Plan
from codegen.memory_plan import plan_memory
from ir_nodes import Graph, estimate, ops
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify
from lazy_backend import debug
from tests.device import ON_GPU


def joined(graph: Graph, remarks: Remarks | None = None) -> Plan:
    attention.with_joined(graph, remarks)
    verify(graph, "with_joined")
    return attention.with_kernels(plan(graph), graph, remarks)


CASES = {
    "causal": Case(cat="qkv"), "none drops": Case((1, 3, 64, 64, 64), cat="qkv", p=None, dtype=torch.float16),
    "flash": Case((2, 2, 64, 64, 64), cat="qkv", p=None, causal=False, target=FLASH),
    "two gradients": Case((1, 1, 64, 64, 64), cat="qkv", backwards=2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.skipif(ON_GPU, reason="the interpreter runs kernels that are made for it; a GPU's: test_lazy_backend_attention.py")
def test_gradients_lie_side_by_side(case: Case) -> None:
    recording, remarks = case.recording(), Remarks()
    made = joined(recording.graph, remarks)
    draws = case.p is not None
    assert [step.kernel.name for step in kernels(made)][: 2 + draws] == [*NAMES[:draws], *NAMES[1:3]]
    assert not externs(made) and not any(node.name == "cat" for step in kernels(made) for node in step.nodes)
    assert sum(count for remark, count in remarks.all() if remark.done and "where autograd would" in remark.why) == case.backwards
    compile_all(made)
    kept = bits_of(case, made, recording) if draws else 1.0
    for places in (None, plan_memory(recording.graph, uses_of(made), [one.nbytes for one in made.temporaries], donate=False)):
        memory = execute(recording, made, places)
        wanted = case.reference(kept)
        for number in range(case.backwards):
            whole = torch.cat([wanted[f"d{name}{number}"].transpose(1, 2).flatten(2) for name in "qkv"], 2)
            negated = typed(memory[case.access[f"negated{number}"].buffer.index], case.tensors[f"negated{number}"])
            bias = typed(memory[case.access[f"bias{number}"].buffer.index], case.tensors[f"bias{number}"])
            assert (negated.double() + whole).norm() <= 0.012 * whole.norm()
            torch.testing.assert_close(bias.double(), -negated.double().sum((0, 1)), rtol=1e-2, atol=5e-2)


def test_the_concatenation_and_its_memory_are_gone() -> None:
    case = Case(cat="qkv")
    graph = case.recording().graph
    flops = estimate.operations(graph.nodes[1])
    attention.with_joined(graph)
    assert estimate.operations(graph.nodes[1]) == flops > 0
    assert [node.name for node in graph.nodes] == [CUDNN[6:], f"{CUDNN[6:]}_backward_joined", "neg", "sum"]
    backward = graph.nodes[1]
    buffers = [case.access[f"d{name}0"].buffer for name in "qkv"]
    assert not any(value.users or value.producer for buffer in buffers for value in graph.values[buffer.index])
    assert {write.value for write in gradients_of(backward) if write} == {backward.writes[0].value}
    attention.with_joined(graph)
    assert graph.nodes[1] is backward, "there is nothing more to join"


def of_one_product() -> None:
    """In a process of its own, which never runs what it records: a CPU has no such kernels."""
    x, weight, bias = (torch.randn(*size, dtype=torch.bfloat16).to("lazysched").requires_grad_()
                       for size in ((2, 128, 192), (576, 192), (576,)))
    q, k, v = (part.view(2, 128, 3, 64).transpose(1, 2) for part in torch.nn.functional.linear(x, weight, bias).split(192, 2))
    for number, made in enumerate((torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True),
                                   torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.1, True))):
        out = made[0].transpose(1, 2).reshape(x.shape).square().sum()
        graph = run_passes(debug.graph(torch.autograd.grad(out, (x, weight, bias), retain_graph=True)), check=True)[0]
        before = [node.name for node in graph.nodes]
        names = [step.kernel.name for step in kernels(joined(graph))]
        assert "cat" in before and not any(node.name == "cat" for node in graph.nodes)
        assert [name for name in names if name in NAMES[2:]] == [*NAMES[2:]]
        assert names.count(NAMES[0]) == number, "for a share of 0 nothing is drawn"
    os._exit(0)


def test_it_is_what_autograd_records_for_one_product() -> None:
    children.call(of_one_product)


REFUSED = {
    "something else, or in another order": Case(cat="kqv"), "or in another order": Case(cat="qkvq"),
    "somebody else": Case(cat="qkv", held="dq0"), "somebody else needs": Case(cat="qkv", held="joined0"),
    "the last of three": Case(cat="qkv", dim=1),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_others_are_concatenated_for_a_reason_that_is_told(reason: str) -> None:
    recording, remarks = REFUSED[reason].recording(), Remarks()
    before = recording.graph.describe()
    attention.with_joined(recording.graph, remarks)
    assert recording.graph.describe() == before
    ((remark, _),) = remarks.all()
    assert not remark.done and reason in remark.why


@pytest.mark.parametrize("case", [Case((2, 3, 100, 100, 64), cat="qkv"), Case((2, 3, 128, 128, 32), cat="qkv")])
def test_nothing_is_joined_for_aten(case: Case) -> None:
    graph, remarks = case.recording().graph, Remarks()
    before = graph.describe()
    attention.with_joined(graph, remarks)
    assert graph.describe() == before and not remarks.all()


@pytest.mark.parametrize(("target", "ours"), JOINED.items(), ids=["cudnn", "flash"])
def test_the_op_is_one_that_any_engine_can_call(target: str, ours: str) -> None:
    """It takes what the backward takes, and gives what the concatenation gave."""
    assert [arg.name for arg in ops.schema(ours).arguments] == [arg.name for arg in ops.schema(target).arguments]
    assert ops.info(ours).kind == ops.info(target).kind == "attention"
    q = torch.empty(2, 128, 3, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    given = {"grad_out": q, "query": q, "key": q, "value": q, "out": q, "dropout_p": 0.0, "is_causal": True,
             "max_q": 128, "max_k": 128}
    sums = torch.empty(2, 3, 128, 1, device="meta")
    args = [given.get(arg.name, sums) for arg in ops.schema(ours).arguments if not arg.kwarg_only]
    assert ops.overload(ours)(*args).shape == (2, 128, 3 * 3 * 64)
