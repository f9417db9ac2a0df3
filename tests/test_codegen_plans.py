"""Whole plans: random programs and a transformer block against eager, and how much work planning is."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from counting import calls_of
from graphs import check, kernels, record
from hypothesis import example, given, settings
from programs import Step, inputs, interpret, steps

from codegen import alike, lowered
from codegen.emit import emit_group
from codegen.fuse import plan
from codegen.group import Group
from codegen.instructions import Part
from codegen.kernel import ExternStep, KernelStep, Plan, Pointer
from codegen.lower import lower
from codegen.partition import partition
from codegen.tuning import HOPPER, Tuning
from ir_nodes import Access, BufferKind, Graph, Layout, Node
from ir_nodes.rewrite import redirect

LOOPED = Tuning(tile=64, persistent=16, looped=16)


def whole(graph: Graph, dtype: torch.dtype, size: tuple[int, ...], kind: BufferKind, live: bool = False) -> Access:
    layout = Layout.contiguous(dtype, size)
    return Access(graph.add_buffer(layout.nbytes, kind, live), layout)


def chain(length: int) -> Graph:
    """A residual network of ``length`` nodes: elementwise steps, some of them ATen's, on buffers of two sizes."""
    graph = Graph()
    state = whole(graph, torch.float32, (64, 32), BufferKind.INPUT)
    square = whole(graph, torch.float32, (32, 32), BufferKind.INPUT)
    skip = state
    for index in range(length):
        out = whole(graph, torch.float32, (64, 32), BufferKind.FRESH, index == length - 1)
        target = Access(out.buffer, out.layout, "w")
        if index % 7 == 3:
            graph.record("aten::mm.out", [state, square, target])
        elif index % 7 == 5:
            graph.record("aten::add.out", [state, skip, graph.add_scalar(), target])
            skip = out
        else:
            graph.record("aten::mul.out", [state, graph.add_scalar(), target])
        state = out
    return graph


def test_planning_is_linear() -> None:
    plan(chain(50))
    few, many = (calls_of(partial(plan, graph)) for graph in (chain(200), chain(800)))
    assert many < 4.4 * few


def listed(length: int) -> Graph:
    """Three ops of an optimizer over ``length`` parameters."""
    graph = Graph()
    weights = [whole(graph, torch.float32, (64, 32), BufferKind.INPUT, True) for _ in range(length)]
    gradients = [whole(graph, torch.float32, (64, 32), BufferKind.INPUT) for _ in range(length)]
    for _ in range(3):
        targets = tuple(Access(weight.buffer, weight.layout, "rw") for weight in weights)
        graph.record("aten::_foreach_add_.List", [targets, tuple(gradients), graph.add_scalar()])
    return graph


def test_planning_lists_of_tensors_is_linear() -> None:
    plan(listed(20))
    few, many = (calls_of(partial(plan, graph)) for graph in (listed(50), listed(250)))
    assert many < 5.5 * few


def test_a_node_is_lowered_once_for_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Counter[Node] = Counter()

    def counted(node: Node, *rest: Any) -> list[Part]:
        times[node] += 1
        return lower(node, *rest)

    monkeypatch.setattr(lowered, "lower", counted)
    graph, known = chain(70), lowered.Lowered()
    before, made = partition(graph, lowered=known), plan(graph, lowered=known)
    again = sorted({node.name for node, count in times.items() if count > 1})
    count = len(times)
    assert (count, again) == (70, ["mm"]), "only what no kernel is made of is asked again"
    same = before == partition(graph) and texts(made) == texts(plan(graph))
    assert same, "what is remembered changes nothing"


def test_a_node_that_a_pass_has_changed_is_lowered_anew() -> None:
    graph, known = chain(20), lowered.Lowered()
    before = texts(plan(graph, lowered=known))
    node, other = graph.nodes[9], graph.nodes[2].writes[0].value
    redirect(node, {node.reads[0].value: other})
    assert texts(plan(graph, lowered=known)) == texts(plan(graph)) != before


def test_groups_that_are_alike_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Group] = []

    def counted(group: Group, *rest: Any) -> list[KernelStep]:
        written.append(group)
        return emit_group(group, *rest)

    monkeypatch.setattr(alike, "emit_group", counted)
    few, many = (len(plan(chain(length)).steps) and len(written) for length in (70, 700))
    assert few == many - few, "no more kernels for ten times the layers"


def texts(made: Plan) -> list[str]:
    """What each step is, without the identity of its parts."""
    return [text(step) for step in made.steps]


def text(one: object) -> str:
    """A step, or what its fields hold, by name."""
    if isinstance(one, tuple):
        return f"({', '.join(map(text, one))})"
    if isinstance(one, (KernelStep, ExternStep, Pointer)):
        return text(tuple(getattr(one, field.name) for field in fields(one) if field.name != "retile"))
    return str(one)


def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Layers that are alike: reductions by row and by column, numbers, and rows that are picked."""
    for weight in weights:
        x = torch.softmax(x * weight + 0.7, -1) + x.sum(0) * 0.3 + x[torch.arange(len(x)) % 3]
    return x


def noisy(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return layers(*(torch.native_dropout(layers(x, weight), 0.5, True)[0] for weight in weights))


@pytest.mark.parametrize("size", [(33, 20), (4100, 64)], ids=["whole", "split"])
def test_steps_of_alike_groups_are_those_that_each_would_get(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    recording, _ = record(noisy, torch.randn(size), *(torch.randn(size[1]) for _ in range(4)))
    tuning = replace(HOPPER, philox_blocks=1056)
    shared = plan(recording.graph, tuning=tuning)
    monkeypatch.setattr(alike.Structure, "of", staticmethod(lambda group, outside: alike.Structure(object(), ())))
    apart = plan(recording.graph, tuning=tuning)
    assert texts(shared) == texts(apart)
    assert shared.temporaries == apart.temporaries and shared.needs == apart.needs
    for one, two in zip(kernels(shared), kernels(apart)):
        for changes in ("lane=4", "pointwise_block=512") if one.retile is not None and two.retile is not None else ():
            left, right = one.retile(changes), two.retile(changes)
            assert (left is None) is (right is None) and (left is None or right is None or text(left) == text(right))


@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["hopper", "looped"])
def test_alike_layers_equal_eager(tuning: Tuning) -> None:
    check(layers, torch.randn(33, 20), *(torch.randn(20) for _ in range(3)), extern=None, tuning=tuning)


@settings(max_examples=25, deadline=None)
@given(program=steps(barriers=False))
@example(program=[("in_place", 257, 1, 0), ("drop", 0, 0, 0), ("unary", 0, 0, 0), ("in_place", 162, 0, 498),
                  ("in_place", 52, 0, 0), ("binary", 1, 1, 0)])  # overwritten by what its only reader computes for itself
def test_random_programs_equal_eager(program: list[Step]) -> None:
    check(lambda *given: interpret(program, list(given)), *inputs("cpu"), extern=None, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["hopper", "looped"])
def test_a_transformer_block_forward_and_backward(tuning: Tuning) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        layer(x).square().mean().backward()
        return [parameter.grad for parameter in layer.parameters()]

    check(program, torch.randn(2, 5, 16), extern=None, tuning=tuning, rtol=1e-3, atol=1e-4)
