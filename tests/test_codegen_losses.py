"""Losses of two tensors and their gradients as kernels, against eager PyTorch. Imports torch and codegen."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, drawn, execute, externs, kernels, record
from torch import Tensor

from codegen.fuse import plan
from ir_nodes import settings

aten = torch.ops.aten
REDUCTIONS = ("none", "mean", "sum")
Loss = Callable[..., Tensor]

LOSSES: dict[str, Loss] = {
    "mse": F.mse_loss,
    "smooth_l1": lambda x, y, **rest: F.smooth_l1_loss(x, y, beta=0.7, **rest),
    "huber": lambda x, y, **rest: F.huber_loss(x, y, delta=0.7, **rest),
    "logits": F.binary_cross_entropy_with_logits,
    "entropy": lambda x, y, **rest: F.binary_cross_entropy(x.sigmoid(), y, **rest),
}


def with_gradient(loss: Loss, **rest: Any) -> Callable[..., list[Tensor]]:
    """A program that leaves the loss and its gradient with respect to its first argument."""

    def program(x: Tensor, *others: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = loss(leaf, *others, **rest)
        (grad,) = torch.autograd.grad(out, leaf, torch.full_like(out, 1.5))
        return [out.detach(), grad]

    return program


def operands(dtype: torch.dtype = torch.float32, *size: int) -> tuple[Tensor, Tensor]:
    shape = size or (5, 37)
    return drawn(*shape, dtype=dtype), drawn(*shape, seed=1).sigmoid().to(dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_aten(name: str, reduction: str) -> None:
    check(with_gradient(LOSSES[name], reduction=reduction), *operands())


@pytest.mark.parametrize("name", LOSSES)
def test_16_bits(name: str) -> None:
    """ATen rounds every step to 16 bits, a kernel only the loss."""
    for reduction in REDUCTIONS if name == "mse" else REDUCTIONS[:2]:
        check(with_gradient(LOSSES[name], reduction=reduction), *operands(torch.bfloat16), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", LOSSES)
def test_float64(name: str) -> None:
    check(with_gradient(LOSSES[name], reduction="mean"), *operands(torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mse", "smooth_l1", "huber"])
def test_infinities_and_nan(name: str) -> None:
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, 1e30, -1e30, 0.7, 1.0])
    x, y = special.repeat(8).clone(), special.repeat_interleave(8).clone()
    check(with_gradient(LOSSES[name], reduction="none"), x, y)


def test_logits_that_are_not_finite_or_large() -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 90.0, -90.0, 1e30])
    for y in (0.0, 1.0, 0.25):
        check(with_gradient(LOSSES["logits"], reduction="none"), x, torch.full_like(x, y))


def test_a_loss_that_overflows_16_bits_is_infinite_before_it_is_summed() -> None:
    x = torch.zeros(64, dtype=torch.float16)
    x[3] = 300.0
    program = with_gradient(F.mse_loss)
    assert program(x, torch.zeros_like(x))[0].isinf()
    check(program, x, torch.zeros_like(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_entropy_where_probabilities_are_0_and_1(dtype: torch.dtype) -> None:
    x, y = torch.tensor([0.0, 0, 1, 1, 0.5], dtype=dtype), torch.tensor([0.0, 1, 0, 1, 1], dtype=dtype)
    check(with_gradient(F.binary_cross_entropy, reduction="none"), x, y, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("wrong", [1.5, -0.5, float("nan")])
@pytest.mark.parametrize("which", ["input", "target"])
def test_what_is_no_probability_stops_the_kernel(which: str, wrong: float) -> None:
    x, y = drawn(40).sigmoid(), drawn(40, seed=1).sigmoid()
    recording, _ = record(lambda x, y: F.binary_cross_entropy(x, y), x, y)
    made = plan(recording.graph)
    assert not externs(made)
    broken = (x if which == "input" else y).clone()
    place = next(index for index, held in recording.inputs.items() if torch.equal(held.view(torch.float32), broken))
    broken[7] = wrong
    recording.inputs[place] = broken.view(torch.uint8)
    with pytest.raises(RuntimeError, match=f"all elements of {which} should be between 0 and 1"):
        execute(recording, made)
    with settings.override(check_indices=False):
        execute(recording, plan(recording.graph))


@pytest.mark.parametrize("name", LOSSES)
def test_strides_and_broadcast_targets(name: str) -> None:
    x, y = drawn(37, 5).t(), drawn(1, 37, seed=1).sigmoid().expand(5, 37)
    check(with_gradient(LOSSES[name], reduction="mean"), x, y)


@pytest.mark.parametrize("name", ["mse", "smooth_l1", "huber"])
def test_shapes_that_aten_broadcasts_itself(name: str) -> None:
    """Past `torch.nn.functional`, which broadcasts first."""
    loss = getattr(aten, f"{name}_loss")
    x, y = drawn(5, 1), drawn(3, 1, 7, seed=1)
    for reduction in range(3):
        check(lambda x, y, reduction=reduction: loss(x, y, reduction), x, y)
    check(lambda x, y: loss(x, y, 1), torch.tensor(2.0), torch.tensor(0.5))


@pytest.mark.parametrize("name", ["mse", "smooth_l1", "huber"])
def test_operands_of_two_dtypes(name: str) -> None:
    loss = getattr(aten, f"{name}_loss")
    for reduction in range(2):
        check(lambda x, y, reduction=reduction: loss(x, y, reduction), drawn(5, 37, dtype=torch.bfloat16), drawn(5, 37, seed=1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights(reduction: str) -> None:
    x, y = operands()
    weight, positive = drawn(37, seed=2).abs(), drawn(37, seed=3).abs()
    check(with_gradient(lambda x, y, w, p: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=p, reduction=reduction)),
          x, y, weight, positive)
    check(with_gradient(lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y, w, reduction=reduction)), x, y, weight)


def test_a_beta_of_zero_is_the_absolute_difference() -> None:
    x, y = operands()
    check(lambda x, y: (aten.smooth_l1_loss(x, y, 1, 0.0), aten.smooth_l1_loss(x, y, 0, 0.0)), x, y)


def test_results_that_are_given() -> None:
    x, y = operands()
    check(lambda x, y: aten.mse_loss.out(x, y, 1, out=torch.empty(())), x, y)
    check(lambda x, y: aten.huber_loss.out(x, y, 0, 1.0, out=torch.empty(5, 37)), x, y)
    check(lambda x, y: aten.mse_loss_backward.grad_input(torch.ones(()), x, y, 1, grad_input=torch.empty(5, 37)), x, y)


def test_what_has_no_kernel_says_why() -> None:
    x, y = operands()
    made = plan(record(lambda x, y: F.binary_cross_entropy_with_logits(x, y), x, y.double())[0].graph)
    assert [step.reason for step in externs(made)] == ["a binary cross entropy of operands of several dtypes"]


def last_layer(name: str) -> Callable[[Tensor, Tensor], list[Tensor]]:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        loss = LOSSES[name](leaf.tanh() * 2, y)
        (grad,) = torch.autograd.grad(loss, leaf)
        return [loss.detach(), grad]

    return program


@pytest.mark.parametrize("name", ["mse", "smooth_l1", "huber", "logits", "entropy"])
def test_the_last_activation_the_loss_and_its_gradient_are_one_kernel(name: str) -> None:
    check(last_layer(name), *operands(torch.float32, 64, 96), count=1)


def test_a_large_loss_takes_a_second_kernel_that_adds_the_parts_of_its_sum() -> None:
    x, y = operands(torch.float32, 1024, 1024)
    made = plan(record(last_layer("mse"), x, y)[0].graph)
    assert not externs(made)
    first, _ = kernels(made)
    assert {"tanh", "mse_loss", "mse_loss_backward", "tanh_backward"} <= {node.name for node in first.nodes}
