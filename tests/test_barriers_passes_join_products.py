"""Products of one matrix by several are one product, and products of attention's gradients are one each; numbers stay near."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import record
from torch import Tensor

from barriers.passes.dead import eliminate_dead
from barriers.passes.join_gradients import join_gradients
from barriers.passes.join_products import join_products
from ir_nodes import Graph, settings
from ir_nodes.reference import run
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify

BF16 = torch.bfloat16
Program = Callable[..., Any]


def cast(x: Tensor) -> Tensor:
    """As autocast records it."""
    return torch.empty_like(x, dtype=BF16).copy_(x)


def given(*sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=draws) / 4 for size in sizes]


INPUTS = ((16, 24), (32, 24), (32,), (16, 24), (16,), (32, 24), (32,))


def three(x: Tensor, *rest: Tensor) -> list[Tensor]:
    x = cast(x)
    return [F.linear(x, cast(w), cast(b)).view(2, 8, -1, 4).transpose(1, 2).neg() for w, b in zip(rest[::2], rest[1::2])]


def plain(x: Tensor, *rest: Tensor) -> list[Tensor]:
    x = cast(x)
    return [F.linear(x, cast(w)).neg() for w in rest[::2]]


def again(x: Tensor, *rest: Tensor) -> list[Tensor]:
    weights = [cast(w) for w in rest[::2]]
    return [F.linear(one, w).neg() for one in (cast(x), cast(x + 1)) for w in weights]


def checked(program: Program, *inputs: Tensor) -> tuple[Graph, str]:
    """The graph after both passes, which leaves what it left before but for rounding, and what was told."""
    recording, _ = record(program, *inputs)
    remarks = Remarks()
    eliminate_dead(recording.graph)
    join_products(recording.graph, remarks)
    verify(recording.graph, "join_products")
    join_gradients(recording.graph, remarks)
    verify(recording.graph, "join_gradients")
    made = run(recording.graph, recording.inputs, recording.scalars)
    for index, wanted in recording.expected.items():
        if not torch.equal(made[index], wanted):  # the programs' inputs are unchanged, what they give is in bfloat16
            ours, theirs = (one.view(BF16).float() for one in (made[index], wanted))
            assert float((ours - theirs).norm()) <= 2e-2 * float(theirs.norm()), (ours, theirs)
    return recording.graph, "\n".join(f"{remark.done} {remark.why}" for remark, _ in remarks.all())


@pytest.mark.parametrize(("program", "before", "after"), [(three, 3, 1), (plain, 3, 1), (again, 6, 2)])
def test_one_product_makes_all(program: Program, before: int, after: int) -> None:
    graph, told = checked(program, *given(*INPUTS))
    names = [node.name for node in graph.nodes]
    assert sum(name in ("mm", "addmm") for name in names) == after, names
    assert names.count("cat") == (2 if program is three else 1), "a matrix that two products share is written once"
    assert "False" not in told


def held(x: Tensor, *rest: Tensor) -> list[Tensor]:
    x = cast(x)
    return [F.linear(x, cast(w)) for w in rest[::2]]


def written(x: Tensor, *rest: Tensor) -> list[Tensor]:
    x = cast(x)
    return [F.linear(x, cast(w)).mul_(2).neg() for w in rest[::2]]


def read_before(x: Tensor, *rest: Tensor) -> list[Tensor]:
    x, weights = cast(x), [cast(w) for w in rest[::2]]
    return [weights[1].neg(), *(F.linear(x, w).neg() for w in weights)]


def flat(x: Tensor, *rest: Tensor) -> list[Tensor]:
    x = cast(x)
    return [F.linear(x, cast(w)).flatten().neg() for w in rest[::2]]


def chained(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> list[Tensor]:
    x = cast(x)
    first = F.linear(x, cast(w)).neg()
    return [first, F.linear(x, cast(first[:8, :24] + rest[0][:8])).neg()]


@pytest.mark.parametrize(("program", "why"), [
    (held, "a result is held"), (written, "something else is written"), (read_before, "reads a copy of a matrix before"),
    (flat, "elements in an order"), (chained, "made after the first")])  # fmt: skip
def test_others_stay_for_a_reason_that_is_told(program: Program, why: str) -> None:
    graph, told = checked(program, *given(*INPUTS))
    assert why in told and "True" not in told, told
    assert not any(node.name == "cat" for node in graph.nodes)


def attention(x: Tensor, upper: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Gradients as autograd makes them: of weights and biases in float32 after another op, of the input added to a residual's."""
    x, copies = x.detach().requires_grad_(), [cast(one).requires_grad_() for one in weights]
    low = cast(x)
    with torch.enable_grad():
        q, k, v = (F.linear(low, w, b).view(2, 32, 2, 16).transpose(1, 2) for w, b in zip(copies[::2], copies[1::2]))
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(cast(upper), q, k, v, out[0], out[1], 0.0, False)
    rows = [one.transpose(1, 2).reshape(64, 32) for one in made]
    total = x.neg()
    for one, w in zip(reversed(rows), reversed(copies[::2])):
        total = torch.add(total, torch.empty(64, 32).copy_(one @ w), out=total)
    return (cast(total.mul(2)), *(cast(one.t() @ low).neg() for one in rows), *(one.sum(0, True).neg() for one in rows))


@pytest.mark.parametrize("ours", [True, False])
def test_gradients_of_attention_lie_side_by_side(ours: bool) -> None:
    inputs = given((64, 32), (2, 2, 32, 16), *[(32, 32), (32,)] * 3)
    with settings.override(attention="triton" if ours else "eager"), torch.no_grad():
        graph, told = checked(attention, *inputs)
    names = [node.name for node in graph.nodes]
    assert told.count("True") == 2 and [names.count(name) for name in ("addmm", "mm", "sum")] == [1, 2, 1], (told, names)
    assert sum(name == "add" for name in names) == 1, "one sum adds the product to the residual's gradient"
