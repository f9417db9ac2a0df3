"""Ops over lists of tensors: numbers, and how an optimizer's lists become one kernel per parameter."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from graphs import check, externs, kernels, record

from codegen.fuse import plan


def lists(count: int) -> list[torch.Tensor]:
    """``count`` lists of three tensors (5,), (3, 4) and (2, 3, 2), flat."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(size, generator=generator) + 0.1 for _ in range(count) for size in ((5,), (3, 4), (2, 3, 2))]


CASES: dict[str, Callable[..., Any]] = {
    "add scalar": lambda a, b, c: torch._foreach_add(a, 0.5),
    "add list": lambda a, b, c: torch._foreach_add(a, b, alpha=2.0),
    "sub numbers": lambda a, b, c: torch._foreach_sub_(a, [0.1, 0.2, 0.3]),
    "mul tensor": lambda a, b, c: torch._foreach_mul_(a, c[0][0]),
    "div numbers": lambda a, b, c: torch._foreach_div(a, [1.5, 2.5, 3.5]),
    "lerp": lambda a, b, c: torch._foreach_lerp_(a, b, 0.1),
    "lerp list": lambda a, b, c: torch._foreach_lerp_(a, b, c),
    "addcmul": lambda a, b, c: torch._foreach_addcmul_(a, b, c, 0.5),
    "addcdiv numbers": lambda a, b, c: torch._foreach_addcdiv_(a, b, c, [0.5, 0.25, 2.0]),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(a),
    "reciprocal": lambda a, b, c: torch._foreach_reciprocal_(a),
    "clamp_max": lambda a, b, c: torch._foreach_clamp_max_(a, 0.5),
    "clamp_min list": lambda a, b, c: torch._foreach_clamp_min_(a, b),
    "maximum": lambda a, b, c: torch._foreach_maximum_(a, b),
    "pow": lambda a, b, c: torch._foreach_pow(a, 2),
    "copy": lambda a, b, c: torch._foreach_copy_(a, b),
    "zero": lambda a, b, c: torch._foreach_zero_(a),
}


@pytest.mark.parametrize("how", CASES.values(), ids=CASES.keys())
def test_each_element_equals_eager(how: Callable[..., Any]) -> None:
    def program(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(how(tensors[:3], tensors[3:6], tensors[6:]) or tensors[:3])

    check(program, *lists(3))


def adamw(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parameters, grads, firsts, seconds = (tensors[i : i + 3] for i in range(0, 12, 3))
    torch._foreach_mul_(parameters, 1 - 1e-3)
    torch._foreach_lerp_(firsts, grads, 0.1)
    torch._foreach_mul_(seconds, 0.999)
    torch._foreach_addcmul_(seconds, grads, grads, 0.001)
    roots = torch._foreach_sqrt(seconds)
    torch._foreach_div_(roots, [0.5, 0.5, 0.5])
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(parameters, firsts, roots, [-1e-3, -1e-3, -1e-3])
    return tensors


def test_adamw_over_lists_is_one_kernel_per_parameter() -> None:
    made = check(adamw, *lists(4), count=3)
    assert [len(step.writes) for step in kernels(made)] == [3, 3, 3]


def test_a_gradient_made_in_the_graph_goes_straight_into_the_update() -> None:
    def program(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = [tensor * 2 for tensor in tensors[3:6]]
        adamw(*tensors[:3], *grads, *tensors[6:])
        return (*tensors[:3], *tensors[6:])

    check(program, *lists(4), count=3)


def test_lists_that_alias_are_left_to_aten() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        torch._foreach_add_([a, b], [b, a])
        return [a, b]

    recording, _ = record(program, torch.ones(3), torch.ones(3))
    (step,) = externs(plan(recording.graph))
    assert step.reason == "a list whose tensors share memory"
