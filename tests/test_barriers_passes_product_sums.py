"""Products add up to one another's results where nobody could tell but by last bits, which are nearer to the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import record, typed
from product_sums import DTYPES, Program, factors, nearer, summed
from torch import Tensor

from barriers.passes.product_sums import ONTO, sum_products
from barriers.pipeline import ordered_passes
from codegen.cuda_graph import blocked_call
from codegen.extern import emit_call
from ir_nodes import Graph, SegmentCall, settings
from ir_nodes.estimate import operations
from ir_nodes.reference import run
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify


def two(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a @ b + c @ d).neg()


def held_sum(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a @ b + c @ d


def in_place(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a @ b).add_(c @ d)


def onto_the_later(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    first = a @ b
    return (c @ d).add_(first)


def into_the_later(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    first, second = a @ b, c @ d
    return torch.add(first, second, out=second).neg()


def seen_in_three_dimensions(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return ((a @ b).unflatten(0, (2, -1)) + (c @ d).unflatten(0, (2, -1))).neg()


def scaled(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.add(a @ b, c @ d, alpha=-0.5)


def scales_the_earlier(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    first = a @ b
    return torch.add(c @ d, first, alpha=3)


def into_given_memory(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    made = torch.empty(len(a), len(b[0]), dtype=a.dtype)
    return torch.mm(a, b, out=made).add_(torch.mm(c, d, out=torch.empty_like(made)))


def three(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    return a @ b + c @ d + e @ f


def three_as_autograd(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    total = (a @ b).unflatten(0, (2, -1)) + (c @ d).unflatten(0, (2, -1))
    return torch.add(total, (e @ f).unflatten(0, (2, -1)), out=total).neg()


def then_written_to(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    total = a @ b + c @ d
    seen = total.sum()
    return seen, total.mul_(2).add_(e @ f)


JOINED: list[tuple[Program, int]] = [
    (two, 2), (held_sum, 2), (in_place, 2), (onto_the_later, 2), (into_the_later, 2), (seen_in_three_dimensions, 2), (scaled, 2),
    (scales_the_earlier, 2), (into_given_memory, 2), (three, 3), (three_as_autograd, 3)]  # fmt: skip


@pytest.mark.parametrize(("program", "count"), JOINED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_add_up_nearer_to_the_truth(program: Program, count: int, dtype: torch.dtype) -> None:
    inputs = factors(count, dtype, rows=256, columns=64)
    names = nearer(program, *inputs)
    assert names[:count] == ["mm", *["addmm_"] * (count - 1)] and not {"add", "add_"} & set(names)


def test_what_is_written_to_the_sum_later_comes_later() -> None:
    inputs = factors(3)
    recording, wanted = record(then_written_to, *inputs)
    remarks = Remarks()
    sum_products(recording.graph, remarks)
    verify(recording.graph)
    assert [node.name for node in recording.graph.nodes] == ["mm", "addmm_", "sum", "mul_", "mm", "add_"]
    values = run(recording.graph, recording.inputs, recording.scalars)
    for value, one in zip(sorted(recording.graph.outputs(), key=lambda value: value.buffer.nbytes), wanted):
        torch.testing.assert_close(typed(values[value.buffer.index], one), one, rtol=2e-2, atol=0.1)
    assert [(remark.done, remark.what) for remark, _ in remarks.all()] == [(True, "mm and mm and add"), (False, "mm and add_")]


def test_it_is_told_and_called_without_python() -> None:
    graph, told = summed(two, *factors(2))
    assert told == "True mm and mm and add: the later product adds to what the earlier one has left"
    first, second, *_ = graph.nodes
    step = emit_call(second)
    assert second.target == ONTO and not step.blocked and not blocked_call(second) and step.early and not step.python
    assert operations(second) == operations(first) == 2 * 16 * 24 * 8


def read_twice(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    made = c @ d
    return (a @ b + made) * made


def product_held(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    made = c @ d
    return made, a @ b + made


def another_shape(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a @ b + c[:1] @ d


def another_dtype(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a @ b + c.half() @ d.half()


def other_order(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a @ b)[:8].t() + (c @ d)[:8]


def a_part(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a @ b)[8:] + (c @ d)[8:]


def to_itself(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    made = a @ b
    return made + made


def of_one_another(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    made = a @ b
    return made + c[:, :16] @ made


def with_a_kernels(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a @ b + c[:, :8].exp()


def over_others(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.add(a @ b, c @ d, out=a.new_zeros(16, 8))


def late_then_early(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    early = a @ b
    return early + (c @ d + c @ (d * 2))


REFUSED: dict[str, tuple[Program, str]] = {
    "read twice": (read_twice, "somebody else reads a part"), "held": (product_held, "a part of the sum is held"),
    "another shape": (another_shape, "differ in shape"), "another dtype": (another_dtype, "not in 16 bits throughout"),
    "another order": (other_order, "lies there in another order"), "a part": (a_part, "a part of its memory"),
    "to itself": (to_itself, "somebody else reads a part"), "of one another": (of_one_another, "somebody else reads a part"),
    "another kernel's": (with_a_kernels, "is no product's result"),
    "memory in use": (over_others, "memory that was there before"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    program, reason = REFUSED[name]
    graph, told = summed(program, *factors(2))
    assert reason in told and told.startswith("False") and not any(node.target == ONTO for node in graph.nodes)


def test_float32_and_sizes_that_products_round_up_stay() -> None:
    assert "not in 16 bits throughout" in summed(two, *factors(2, torch.float32))[1]
    assert "no multiple of 16 bytes" in summed(two, *factors(2, inner=20))[1]
    assert "no multiple of 16 bytes" in summed(two, *factors(2, columns=12))[1]


def test_a_product_that_came_before_a_sum_stays_apart() -> None:
    graph, told = summed(late_then_early, *factors(2))
    assert [node.name for node in graph.nodes].count("addmm_") == 1
    assert "False mm and addmm_ and add: the later product is already added to another" in told


def test_other_segments_and_stages_stay_apart() -> None:
    def segment(graph: Graph) -> None:
        graph.nodes[1].segment = SegmentCall("other")

    def stage(graph: Graph) -> None:
        graph.nodes[2].stage = 1

    for change in (segment, stage):
        assert "different segments" in summed(held_sum, *factors(2), change=change)[1]

    def loose(graph: Graph) -> None:
        graph.nodes[0].segment = graph.nodes[1].segment = SegmentCall("layer", backward=True)

    assert summed(held_sum, *factors(2), change=loose)[1].startswith("True"), "a sum of gradients belongs to no segment"


@pytest.mark.parametrize("changes", [{}, {"autotune": False}, {"templates": True}, {"disable": {"product_sums"}},
                                     {"replays": False}, {"reorders": False}, {"partition": None}], ids=str)
def test_it_is_done_only_where_last_bits_are_free_and_steps_replay(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"replays": True, "reorders": True, "partition": lambda graph: []}
    given.update((name, changes[name]) for name in given if name in changes)
    with settings.override(**{"autotune": True, **{name: value for name, value in changes.items() if name not in given}}):
        graph = record(two, *factors(2))[0].graph
        for step in ordered_passes(**given):
            if step.__name__ == "product_sums":
                step(graph)
    assert any(node.target == ONTO for node in graph.nodes) is not bool(changes)
