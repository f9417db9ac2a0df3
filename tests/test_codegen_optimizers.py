"""Fused optimizers and gradient clipping: numbers against eager's kernels, and how few launches they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import check, externs, kernels, record

from codegen.fuse import plan

SIZES: tuple[tuple[int, ...], ...] = ((5,), (3, 4), (16, 16), (64,), (1,), (300,))
NUMBERS = {"lr": 1e-3, "weight_decay": 0.01}
ADAM = {**NUMBERS, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {**NUMBERS, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}


def lists(count: int, dtype: torch.dtype = torch.float32, sizes: tuple[tuple[int, ...], ...] = SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(size, generator=generator) + 0.1).to(dtype) for _ in range(count) for size in sizes]


def split(tensors: tuple[torch.Tensor, ...], parts: int) -> list[list[torch.Tensor]]:
    count = len(tensors) // parts
    return [list(tensors[at : at + count]) for at in range(0, parts * count, count)]


def adam(*tensors: torch.Tensor, op: Any = torch._fused_adamw_, step: float = 3.0, **changes: Any) -> tuple[torch.Tensor, ...]:
    arguments = ADAM | changes
    parts = split(tensors, 5 if arguments["amsgrad"] else 4)
    steps = [torch.full((), step) for _ in parts[0]]
    op(*parts[:4], parts[4] if arguments["amsgrad"] else [], steps, **arguments)
    return tensors


def sgd(*tensors: torch.Tensor, **changes: Any) -> tuple[torch.Tensor, ...]:
    arguments = SGD | changes
    parts = split(tensors, 3 if arguments["momentum"] else 2)
    torch._fused_sgd_(*parts[:2], parts[2] if arguments["momentum"] else [], **arguments)
    return tensors


ADAMS: dict[str, dict[str, Any]] = {
    "adamw": {}, "adam": {"op": torch._fused_adam_}, "amsgrad": {"amsgrad": True}, "maximize": {"maximize": True},
    "no decay": {"weight_decay": 0.0, "op": torch._fused_adam_}, "first step": {"step": 1.0},
    "scaled": {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)},
    "skipped": {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(1.0)},
}  # fmt: skip
SGDS: dict[str, dict[str, Any]] = {
    "momentum": {}, "plain": {"momentum": 0.0}, "nesterov": {"nesterov": True}, "first step": {"is_first_step": True},
    "dampened": {"dampening": 0.3, "maximize": True}, "no decay": {"weight_decay": 0.0},
    "skipped": {"found_inf": torch.tensor(1.0)},
}  # fmt: skip


@pytest.mark.parametrize("changes", ADAMS.values(), ids=ADAMS.keys())
def test_fused_adam_equals_eager_in_one_launch(changes: dict[str, Any]) -> None:
    tensors = lists(5 if changes.get("amsgrad") else 4)
    check(lambda *given: adam(*given, **changes), *tensors, count=1, combos=True)


@pytest.mark.parametrize("changes", SGDS.values(), ids=SGDS.keys())
def test_fused_sgd_equals_eager_in_one_launch(changes: dict[str, Any]) -> None:
    tensors = lists(2 if changes.get("momentum") == 0 else 3)
    check(lambda *given: sgd(*given, **changes), *tensors, count=1, combos=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(adam, *lists(4, dtype), count=1, combos=True, rtol=2e-2 if dtype is torch.bfloat16 else 1e-9, atol=1e-5)


def test_fused_adam_is_cuda_s_formula_in_float32() -> None:
    """What CUDA's kernel computes: betas in float32, one rounding for each multiplication and addition of a blend."""
    given = [tensor.clone() for tensor in lists(4)]
    made = check(adam, *lists(4), combos=True)
    (text,) = {step.kernel.source for step in kernels(made)}
    assert "tl.fma" in text and "div_rn" in text and "sqrt_rn" in text and "libdevice.pow" in text
    assert all(tensor.dtype is torch.float32 for tensor in given)


def test_gradients_that_are_not_scaled_are_not_written() -> None:
    for changes, writes in (({}, 3), ({"grad_scale": torch.tensor(2.0)}, 4)):
        recording, _ = record(lambda *given, c=changes: adam(*given, **c), *lists(4, sizes=((64,),)))
        (step,) = [step for step in kernels(plan(recording.graph)) if len(step.nodes) == 1 and "fused" in step.nodes[0].target]
        assert len(step.writes) == writes


def test_gradients_made_in_the_graph_are_kept() -> None:
    def program(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parameters, sources, firsts, seconds = split(tensors, 4)
        grads = [source * 2 for source in sources]
        adam(*parameters, *grads, *firsts, *seconds)
        return (*parameters, *grads, *firsts, *seconds)

    check(program, *lists(4), count=1, combos=True)


def test_a_learning_rate_in_a_tensor_and_empty_parameters() -> None:
    check(lambda *given: adam(*given, lr=torch.tensor(1e-2)), *lists(4, sizes=((7,), (0,), (12,))), count=1, combos=True)


def test_parameters_that_share_memory_are_left_to_aten() -> None:
    def program(flat: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        adam(flat[:8], flat[8:], *tensors)
        return flat

    recording, _ = record(program, torch.ones(16), *lists(3, sizes=((8,), (8,))))
    assert "share memory" in next(step.reason for step in externs(plan(recording.graph)) if "fused" in step.node.target)


def test_gradients_that_share_memory_are_read() -> None:
    """As those of biases that were joined: BEiT's of queries and values."""
    def program(grads: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parameters, firsts, seconds = split(tensors, 3)
        adam(*parameters, *(grads * 2).view(3, 8)[::2], *firsts, *seconds)
        return tensors

    check(program, torch.rand(24), *lists(3, sizes=((8,), (8,))), combos=True)


@pytest.mark.parametrize(("stride", "why"), [((8, 3, 1), None), ((1, 1, 4), "lies otherwise in memory")])
def test_strides_of_single_elements_mean_nothing(stride: tuple[int, ...], why: str | None) -> None:
    def program(memory: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parameter, first, second = tensors
        adam(parameter, memory.as_strided((4, 1, 8), stride), first, second)
        return tensors

    tensors = torch.rand(32), *lists(3, sizes=((4, 1, 8),))
    recording, _ = record(program, *tensors)
    reasons = [step.reason for step in externs(plan(recording.graph)) if "fused" in step.node.target]
    assert reasons == [] if why is None else why in reasons[0]
    if why is None:
        check(program, *tensors, combos=True)


@pytest.mark.parametrize("order", [2, 1])
def test_norms_of_a_list(order: int) -> None:
    check(lambda *given: torch._foreach_norm(list(given), order), *lists(1), (torch.rand(70_000) - 0.5), combos=True)


def test_clipping_by_the_global_norm() -> None:
    def clipped(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parameters, grads, firsts, seconds = split(tensors, 4)
        norms = torch._foreach_norm(grads, 2)
        total = torch.linalg.vector_norm(torch.stack(norms), 2)
        torch._foreach_mul_(grads, (1.0 / (total + 1e-6)).clamp(max=1.0))
        adam(*parameters, *grads, *firsts, *seconds)
        return tensors

    made = check(clipped, *lists(4, sizes=((5,), (3, 4), (64,), (300,), (16, 16))), extern=None, combos=True)
    names = [step.kernel.name.split("_")[0] for step in kernels(made)]
    assert names == ["combo", "reduce", "combo"], [step.kernel.name for step in kernels(made)]


@pytest.mark.parametrize("odd", [None, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_unscaling_finds_what_is_not_finite(odd: float | None, dtype: torch.dtype) -> None:
    def program(found: torch.Tensor, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found, torch.full((), 0.25))
        return (found, *grads)

    grads = lists(1, dtype, (*SIZES, (0,), (40_000,)))
    if odd is not None:
        grads[2][3, 4] = odd
    check(program, torch.zeros(1), *grads, combos=True)


def test_large_parameters_take_the_powers_of_their_step_counts_once() -> None:
    graph = record(adam, *lists(4, sizes=((256, 256), (8,))))[0].graph
    powers = [step.nodes for step in kernels(plan(graph)) if "libdevice.pow" in step.kernel.source]
    wholes = [step for step in kernels(plan(graph)) if step.flat == 256 * 256]
    assert len(powers) == 2 and len(wholes) == 1 and "pow" not in wholes[0].kernel.source
    for changes in ADAMS.values():
        count = 5 if changes.get("amsgrad") else 4
        check(lambda *given, more=changes: adam(*given, **more), *lists(count, sizes=((256, 256), (8,))), combos=True)
