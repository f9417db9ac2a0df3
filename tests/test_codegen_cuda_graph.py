"""Which steps may replay as CUDA graphs, and what a graph has to know of the slots around it. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import lazy_backend
from codegen import cuda_graph
from codegen.cuda_graph import Stretch, stretches
from codegen.extern import emit_call
from codegen.memory_plan import MemoryPlan, plan_memory
from codegen.step_use import StepUse
from ir_nodes import BufferKind, Graph, Layout, Node
from ir_nodes.node import ScalarInput, Value, Write
from lazy_backend.explain import optimised


@dataclass
class Fake:
    """A step that reads and writes some buffers."""

    use: StepUse
    writes: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = ()
    blocked: str = ""
    calls: bool = True
    python: bool = False
    segments: tuple[str, ...] = field(default=())


def graph(kinds: str, nbytes: int = 64, live: str = "") -> Graph:
    """Buffers by letter: i input, f fresh. ``live``: which of them stay, by position."""
    made = Graph()
    for position, kind in enumerate(kinds):
        made.add_buffer(nbytes, BufferKind.INPUT if kind == "i" else BufferKind.FRESH, str(position) in live)
    return made


def cut(steps: list[Fake], on: Graph) -> tuple[list[Stretch], MemoryPlan]:
    plan = plan_memory(on, [step.use for step in steps])
    spans, position = [], 0
    for index in range(len(steps)):
        length = len(plan.allocs[index]) + 1 + len(plan.frees[index])
        spans.append((position, position + length))
        position += length
    return stretches(steps, spans, plan, on), plan


def chain(length: int, **fields: object) -> list[Fake]:
    """Step k reads buffer k and writes buffer k + 1."""
    return [Fake(StepUse((k, k + 1)), (k + 1,), **fields) for k in range(length)]  # type: ignore[arg-type]


def test_results_lie_side_by_side_and_none_in_another() -> None:
    steps = chain(5)
    steps[2] = Fake(StepUse((2, 3)), (3,), calls=False)
    (stretch,), plan = cut(steps, graph("ifffff", nbytes=700, live="345"))
    under, nbytes = stretch.block
    spans = sorted((start, start + plan.sizes[slot]) for start, slot in zip(stretch.offsets, stretch.makes))
    assert len(spans) == 3 and under == -1 and nbytes >= spans[-1][1] and spans[0][0] == 0
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))


def test_a_program_of_launches_is_one_stretch() -> None:
    (stretch,), _ = cut(chain(5), graph("ifffff", live="05"))
    assert (stretch.first, stretch.reads, stretch.makes, stretch.frees) == (0, (0,), (5,), ())
    assert stretch.movable == (1,)


def test_a_graph_of_a_single_step_holds_what_would_run_python() -> None:
    changed, chosen = Node(0, "aten::cudnn_convolution_relu", (), (), ()), Node(0, "aten::zero_", (), (), ())
    assert emit_call(changed).python and not emit_call(chosen).python
    steps = [Fake(StepUse((0, 1)), (1,), (changed,), python=True)]
    assert len(cut(steps, graph("if", live="1"))[0]) == 1
    steps[0].python = False  # the native core calls it, or launches a kernel of it
    assert not cut(steps, graph("if", live="1"))[0]


@pytest.mark.parametrize("nbytes, length, copied", [(16 << 20, 4, 1), (17 << 20, 4, 0), (17 << 20, 5, 1)])
def test_what_is_copied_costs_less_than_the_launches_that_a_graph_saves(nbytes: int, length: int, copied: int) -> None:
    (stretch,), _ = cut(chain(length), graph("i" + "f" * length, nbytes, live=str(length)))
    assert stretch.movable == (copied,)


def test_an_input_that_dies_is_emptied_by_the_graph() -> None:
    (stretch,), _ = cut(chain(5), graph("ifffff", live="5"))
    assert stretch.frees == (0,)


def test_what_blocks_parts_a_program() -> None:
    steps = chain(9)
    steps[4].blocked = "aten::bernoulli_ draws random numbers"
    (first, second), plan = cut(steps, graph("ifffffffff", live="9"))
    assert first.makes == (4,) and second.reads == (5,)  # what the call between them reads and writes
    assert first.last <= second.first and plan.slots == 10


@pytest.mark.parametrize(("live", "blocked", "reader", "inside"), [
    ("9", None, 8, True),
    ("9", 6, 5, True),
    ("93", None, 8, False),
    ("9", 6, 8, False),
], ids=["one stretch", "what parts comes later", "a later recording reads the seed", "its backward is in another stretch"])
def test_attention_is_captured_with_its_backward_or_not_at_all(live: str, blocked: int | None, reader: int, inside: bool) -> None:
    """Buffer 3 holds its seed, which lies in the host's memory where it was not captured."""
    made = graph("ifffffffff", live=live)
    writes = tuple(Write(Value(made.buffers[index], 1), None, Layout(torch.int64, (), (), 0), False) for index in (1, 2, 3, 4))
    node = Node(0, "aten::_scaled_dot_product_efficient_attention", (), (), writes, (), (0, 1, 2, 3))
    steps = chain(9)
    steps[0] = Fake(StepUse((0,), (1, 2, 3, 4)), (1, 2, 3, 4), (node,))
    steps[reader] = Fake(StepUse((reader, reader + 1, 3)), (reader + 1,))
    if blocked is not None:
        steps[blocked].blocked = "it runs Python"
    found, _ = cut(steps, made)
    assert len(found) == 1 and (found[0].first == 0) is inside


def test_short_stretches_are_left_alone() -> None:
    assert cut(chain(3), graph("ifff", live="3"))[0] == []


def test_a_stretch_ends_where_a_segment_does() -> None:
    steps = chain(4, segments=("a",)) + [Fake(StepUse((4 + k, 5 + k)), (5 + k,), segments=("b",)) for k in range(4)]
    assert len(cut(steps, graph("iffffffff", live="8"))[0]) == 2


def test_memory_that_is_written_must_not_move() -> None:
    steps = chain(4) + [Fake(StepUse((0, 4)), (0,))]
    (stretch,), _ = cut(steps, graph("iffff", live="04"))
    assert stretch.movable == (0,)


def test_large_results_that_would_stay_refuse_the_graph() -> None:
    steps = chain(9)
    steps[4].blocked = "it runs Python"
    assert len(cut(steps, graph("ifffffffff", live="9", nbytes=1 << 20))[0]) == 2
    (only,), _ = cut(steps, graph("ifffffffff", live="9", nbytes=1 << 27))
    assert only.makes == (9,)  # the user's result; the first stretch's would be held for nobody


def test_numbers_of_calls_belong_to_the_graph_and_those_of_kernels_do_not() -> None:
    node = Node(0, "aten::mul", (ScalarInput(3, "float"), (ScalarInput(4, "int"),)), (), ())
    called = [Fake(step.use, step.writes, (node,)) for step in chain(4)]
    launched = [Fake(step.use, step.writes, (node,), calls=False) for step in chain(4)]
    assert cut(called, graph("iffff", live="4"))[0][0].numbers == (3, 4)
    assert cut(launched, graph("iffff", live="4"))[0][0].numbers == ()


def test_random_ops_that_no_graph_can_hold_are_told() -> None:
    x = torch.randn(64, 64, device="lazysched")
    lazy_backend.mark_step()
    drawing = {n.name: cuda_graph.blocked_call(n) for n in optimised([torch.bernoulli(x.sigmoid()), torch.poisson(x.exp())]).nodes
               if n.effects}
    assert "draws random numbers" in drawing["poisson"] and drawing["bernoulli_"] == ""


def test_explain_tells_what_may_replay() -> None:
    x = torch.randn(64, 64, device="lazysched")
    lazy_backend.mark_step()
    report = str(lazy_backend.explain([torch.poisson((x @ x @ x @ x @ x).sigmoid())]))
    (line,) = [line for line in report.splitlines() if line.startswith("CUDA graphs: ")]
    assert "1 graph" in line and "draws random numbers" in line
