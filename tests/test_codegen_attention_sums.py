"""Sums of attention's gradients, for biases, of what kernels leave for each block of rows: numbers, the plan, refusals."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import children
import pytest
import torch
from attentions import CUDNN, FLASH, NAMES, Case, bits_of
from graphs import CACHE, compile_all, execute, externs, kernels, typed, uses_of

from barriers.pipeline import run_passes
from codegen import attention
from codegen.attention_source import KEYS, QUERIES, with_sums, without_drops
from codegen.attention_sums import SUMMED, flat, sums_of
from codegen.engine import Context
from codegen.fuse import plan
from codegen.kernel import KernelStep, Plan
from codegen.memory_plan import MemoryPlan, plan_memory
from ir_nodes import Access, Graph, Layout, estimate, reference, settings
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify
from lazy_backend import debug
from tests.device import ON_GPU

SMALL = (2, 3, 128, 128, 64)
INTERPRETED = pytest.mark.skipif(
    ON_GPU, reason="the interpreter runs kernels that are made for it; a GPU's: test_lazy_backend_attention.py")


def summed(graph: Graph, remarks: Remarks | None = None) -> Plan:
    """As the engine does it: gradients are joined first."""
    attention.with_joined(graph)
    attention.with_sums(graph, remarks)
    assert not [line for line in verify(graph, "with_sums") if "lazysched_own" in line]
    return attention.with_kernels(plan(graph), graph, remarks)


def planned(graph: Graph, made: Plan) -> MemoryPlan:
    """Where everything lies while a CUDA graph is captured."""
    return plan_memory(graph, uses_of(made), [one.nbytes for one in made.temporaries], donate=False)


def found(case: Case, memory: dict[int, torch.Tensor], name: str) -> torch.Tensor:
    return typed(memory[case.access[name].buffer.index], case.tensors[name])


def assert_rounded_once(made: torch.Tensor, gradient: torch.Tensor) -> None:
    """No further from the sum in float64 than rounding to ``made``'s dtype is, and than float32 is where summands cancel: keys'
    gradients do."""
    over = tuple(range(gradient.dim() - 1))
    wanted, summands = gradient.double().sum(over), gradient.double().abs().sum(over)
    kinds = torch.finfo(made.dtype)
    apart = wanted.abs().clamp_min(kinds.smallest_normal).log2().floor().exp2() * kinds.eps
    assert ((made.flatten().double() - wanted).abs() <= apart / 2 + 2e-7 * summands).all()


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.transpose(1, 2).flatten(2)


PLAIN = {
    "all three": (Case(), "qkv"), "none drops": (Case(p=None), "qkv"), "two": (Case(SMALL, p=None), "qv"),
    "queries": (Case(SMALL, p=None), "q"), "values": (Case(SMALL), "v"), "other keys": (Case((2, 2, 128, 192, 64), False), "qkv"),
    "float16, a scale": (Case((2, 2, 64, 64, 64), p=None, scale=0.3, dtype=torch.float16), "qkv"),
    "flash": (Case((1, 5, 192, 192, 64), target=FLASH), "qk"), "one head": (Case((3, 1, 64, 64, 64), p=None), "kv"),
    "two backwards": (Case((2, 2, 64, 64, 64), p=None, backwards=2), "qkv"),
}  # fmt: skip


@INTERPRETED
@pytest.mark.parametrize(("case", "of"), PLAIN.values(), ids=PLAIN)
def test_sums_are_those_of_rounded_gradients_rounded_once(case: Case, of: str) -> None:
    """Whatever dtype they have, and whether a batch's rows are summed at once or not."""
    case = replace(case, tensors={}, access={})
    recording, remarks = case.recording(), Remarks()
    batch, heads, queries, keys, width = case.sizes
    gradients = [f"d{letter}{number}" for letter in of for number in range(case.backwards)]
    names = {name: [case.add_sum(recording, name)] for name in gradients}
    shape = (batch, queries if of[0] == "q" else keys, heads * width)
    names[gradients[0]] += [case.add_sum(recording, gradients[0], "apart", shape, (1, 0), False),
                            case.add_sum(recording, gradients[0], "wide", dims=(-2,), dtype=torch.float32)]
    made = summed(recording.graph, remarks)
    compile_all(made)
    assert not externs(made) and not reading(made, case, gradients)
    assert not [step for step in kernels(made) if step.nodes[0].name == "copy_"], "what sums rounds, too"
    assert [(str(remark), count) for remark, count in remarks.all() if remark.optimisation == "attention_sums"] == [
        (f"{case.target[6:]}_backward_sums: they sum blocks of gradients whose sums biases need", case.backwards)]
    wanted = case.reference(bits_of(case, made, recording) if case.p is not None else 1.0)
    for places in (None, planned(recording.graph, made)):
        memory = execute(recording, made, places)
        for gradient, sums in names.items():
            for name in sums:
                total, rows = found(case, memory, name), rows_of(wanted[gradient])
                total_of = rows.sum((0, 1))
                assert (total.flatten().double() - total_of).norm() < 0.012 * rows.norm() + 0.003 * total_of.norm()
                assert_rounded_once(total, rows_of(found(case, memory, gradient)))


def reading(made: Plan, case: Case, names: list[str]) -> list[KernelStep]:
    """The launches that read one of these tensors."""
    buffers = {case.access[name].buffer for name in names}
    return [step for step in kernels(made) if any(getattr(value, "buffer", None) in buffers for value in step.reads)]


JOINT = {
    "causal": Case(cat="qkv"), "none drops": Case((1, 3, 128, 128, 64), cat="qkv", p=None, dtype=torch.float16),
    "flash": Case((2, 2, 64, 64, 64), cat="qkv", p=None, causal=False, target=FLASH),
    "two gradients": Case((2, 1, 64, 64, 64), cat="qkv", backwards=2),
}  # fmt: skip


@INTERPRETED
@pytest.mark.parametrize("case", JOINT.values(), ids=JOINT)
def test_sums_of_gradients_that_lie_side_by_side(case: Case) -> None:
    recording = case.recording()
    made = summed(recording.graph)
    compile_all(made)
    assert [node.name for node in recording.graph.nodes if "backward" in node.name] == (
        [f"{case.target[6:]}_backward_joined_sums"] * case.backwards)
    readers = reading(made, case, [f"joined{number}" for number in range(case.backwards)])
    assert {node.name for step in readers for node in step.nodes} == {"neg"}
    for places in (None, planned(recording.graph, made)):
        memory = execute(recording, made, places)
        for number in range(case.backwards):
            assert_rounded_once(found(case, memory, f"bias{number}"), -found(case, memory, f"negated{number}"))


@INTERPRETED
def test_a_sum_into_a_part_of_a_tensor_keeps_the_rest() -> None:
    case = Case((1, 2, 64, 64, 64), p=None)
    recording = case.recording()
    bucket = Access(recording.graph.add_buffer(3 * 256, live=True), Layout.contiguous(case.dtype, (384,)), "w")
    recording.graph.record("aten::fill_.Scalar", [bucket, 7.0])
    case.access["bucket"], case.tensors["bucket"] = bucket, torch.empty(384, dtype=case.dtype)
    part = replace(bucket, layout=Layout(case.dtype, (128,), (1,), 128))
    whole = replace(case.access["dq0"], layout=Layout.contiguous(case.dtype, (64, 128)), mode="r")
    recording.graph.record("aten::sum.IntList_out", [whole, [0], False, None, part])
    memory = execute(recording, summed(recording.graph))
    left, middle, right = found(case, memory, "bucket").view(3, 128)
    assert torch.all(left == 7) and torch.all(right == 7)
    assert_rounded_once(middle, rows_of(found(case, memory, "dq0")))


ORDER = Layout(torch.bfloat16, (2, 192, 128), (24576, 1, 192))
REFUSED: dict[str, dict[str, Any]] = {
    "over other dimensions": {"dims": (1,)}, "over other dimensions than": {"dims": (0, 1), "keepdim": False},
    "over other": {"shape": SMALL[:1] + (128, 192), "dims": (0,)}, "has another dtype": {"dtype": torch.float64},
    "another dtype": {"dtype": torch.float16}, "in another order": {"layout": ORDER, "dims": (0, 1)},
    "a part of": {"layout": Layout(torch.bfloat16, (128, 192), (192, 1))},
    "or its elements in another order": {"layout": Layout(torch.bfloat16, (2, 3, 128, 64), (24576, 64, 192, 1)), "dims": (0, 2)},
}  # fmt: skip


@INTERPRETED
@pytest.mark.parametrize("reason", REFUSED)
def test_others_read_the_gradient_for_a_reason_that_is_told(reason: str) -> None:
    case = Case(SMALL, p=None)
    recording, remarks = case.recording(), Remarks()
    name = case.add_sum(recording, "dk0", **REFUSED[reason])
    before = recording.graph.describe()
    made = summed(recording.graph, remarks)
    assert recording.graph.describe() == before
    (why,) = [remark for remark, _ in remarks.all() if remark.optimisation == "attention_sums"]
    assert not why.done and reason in why.why
    memory = execute(recording, made)
    node = recording.graph.nodes[-1]
    operand = node.reads[0].layout
    seen = reference.window(memory[case.access["dk0"].buffer.index], operand).double().sum(node.args[1], node.args[2])
    torch.testing.assert_close(found(case, memory, name).double(), seen, rtol=1e-2, atol=1e-2)


def test_rows_with_gaps_between_them_are_no_run_of_rows() -> None:
    rows = Layout(torch.bfloat16, (2, 128, 192), (2 * 128 * 192, 192, 1))
    assert flat(rows) == rows and flat(replace(rows, stride=(128 * 192, 192, 1))).size == (256, 192)
    assert flat(replace(rows, size=(1, 128, 192))).size == (128, 192)


def test_a_refused_sum_stays_beside_one_that_is_taken() -> None:
    case = Case(SMALL, p=None)
    recording, remarks = case.recording(), Remarks()
    case.add_sum(recording, "dk0", "rows", dims=(1,))
    case.add_sum(recording, "dk0")
    attention.with_sums(recording.graph, remarks)
    graph = recording.graph
    verify(graph, "with_sums")
    assert [node.name for node in graph.nodes] == [CUDNN[6:], f"{CUDNN[6:]}_backward_sums", "sum", "sum", "copy_"]
    dk = case.access["dk0"].buffer
    assert [node.reads[0].value.buffer is dk for node in graph.nodes[2:4]] == [True, False]
    assert [one is None for one in sums_of(graph.nodes[1])] == [True, False, True], "nobody sums the others"


def test_there_is_nothing_more_to_sum_and_as_much_is_computed() -> None:
    recording = Case(cat="qkv").recording()
    graph = recording.graph
    flops = estimate.operations(graph.nodes[1])
    summed(graph)
    assert estimate.operations(graph.nodes[1]) == flops > 0
    before = graph.describe()
    attention.with_sums(graph)
    assert graph.describe() == before


def test_kernels_stay_what_they_are_where_nobody_sums() -> None:
    case, other = Case(p=None), Case(p=None)
    plain, summing = case.recording(), other.recording()
    other.add_sum(summing, "dv0")
    attention.with_sums(plain.graph)
    made = {step.kernel.name: step.kernel for step in kernels(attention.with_kernels(plan(plain.graph), plain.graph))}
    assert not any("partial" in kernel.source for kernel in made.values())
    sources = {step.kernel.name: step.kernel.source for step in kernels(summed(summing.graph))}
    assert "dv_partial" in sources[NAMES[3]] and "dk_partial" not in sources[NAMES[3]]
    title = f'"""{CUDNN}_backward"""'
    assert sources[NAMES[2]] == made[NAMES[2]].source.replace(title, f'"""{SUMMED[f"{CUDNN}_backward"]}"""')
    assert "assume" not in sources[NAMES[2]]


@pytest.mark.parametrize("text", [QUERIES, without_drops(QUERIES), KEYS, without_drops(KEYS)])
def test_each_gradient_has_one_place_where_it_is_stored(text: str) -> None:
    names = ("dk", "dv") if "dv" in text else ("dq",)
    for name in names:
        found = with_sums(text, name)
        assert found.count(f"{name}_partial") == 1 and found.count("tl.store(") == text.count("tl.store(") + 1


@pytest.mark.parametrize("case", [Case((2, 3, 100, 100, 64)), Case((2, 3, 128, 128, 32)), Case(mismatch=True)])
def test_sums_for_aten_stay_what_they_are(case: Case) -> None:
    recording, remarks = case.recording(), Remarks()
    case.add_sum(recording, "dk0")
    before = recording.graph.describe()
    attention.with_sums(recording.graph, remarks)
    assert recording.graph.describe() == before and not remarks.all()


ASKED: dict[str, tuple[dict[str, Any], tuple[int, int], bool]] = {
    "asked": ({"attention": "triton"}, (9, 0), True), "unasked": ({}, (9, 0), False),
    "an older GPU": ({"attention": "triton"}, (8, 0), False),
    "off": ({"attention": "triton", "disable": frozenset({"attention_sums"})}, (9, 0), False),
    "all off": ({"attention": "triton", "disable": frozenset({"attention"})}, (9, 0), False),
}  # fmt: skip


@pytest.mark.parametrize(("values", "capability", "sums"), ASKED.values(), ids=ASKED)
def test_nothing_is_summed_unless_asked(values: dict[str, Any], capability: tuple[int, int], sums: bool,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    case = Case(SMALL, p=None)
    recording = case.recording()
    case.add_sum(recording, "dk0")
    before = recording.graph.describe()
    with settings.override(**values):
        attention.give_more(recording.graph, Context(True, 0, CACHE, numbers=recording.scalars))
    assert (recording.graph.describe() != before) == sums


def of_products() -> None:
    """In a process of its own, which never runs what it records: a CPU has no such kernels."""
    x, *rest = (torch.randn(*size, dtype=torch.bfloat16).to("lazysched").requires_grad_()
                for size in ((2, 128, 192), (576, 192), (576,), (192, 192), (192,), (192, 192), (192, 192), (192,)))
    weight, bias, *apart = rest
    parts = torch.nn.functional.linear(x, weight, bias).split(192, 2)
    made = [torch.nn.functional.linear(x, apart[0], apart[1]), torch.nn.functional.linear(x, apart[2]),
            torch.nn.functional.linear(x, *apart[3:])]  # as where keys have no bias
    for three, count, of in ((parts, 1, (x, weight, bias)), (made, 2, (x, *apart))):
        q, k, v = (part.view(2, 128, 3, 64).transpose(1, 2) for part in three)
        out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
        total = out.transpose(1, 2).reshape(x.shape).square().sum()
        graph = run_passes(debug.graph(torch.autograd.grad(total, of, retain_graph=True)), check=True)[0]
        before = {node for node in graph.nodes if node.name == "sum"}
        planned = summed(graph)
        (backward,) = [node for node in graph.nodes if node.target in SUMMED.values()]
        mine = {write.value for write in sums_of(backward) if write is not None}
        assert sum(node.reads[0].value in mine for node in before) == count
        assert len([one for one in sums_of(backward) if one is not None]) == (3 if count == 1 else 2)
        assert not [step for step in externs(planned) if step.node.name == "sum"]
    os._exit(0)


def test_it_is_what_autograd_records_for_biases() -> None:
    children.call(of_products)
