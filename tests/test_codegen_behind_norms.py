"""What a norm's backward computes anew: all that lies between the norm and the gradient, where that reads fewer bytes."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels
from torch import Tensor

from codegen import grouped_channels
from codegen.kernel import KernelStep, Plan
from ir_nodes import Value, settings

SIZE = (4, 16, 24, 24)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "relu in place": lambda x: F.relu(x, inplace=True), "silu": F.silu,
    "silu in place": lambda x: F.silu(x, inplace=True), "hardswish": F.hardswish, "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "leaky relu": lambda x: F.leaky_relu(x, 0.1), "elu": F.elu,
}  # fmt: skip
acts = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
NORMS: dict[str, Callable[..., Tensor]] = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True), "group": lambda x, w, b: F.group_norm(x, 4, w, b),
    "group without": lambda x, w, b: F.group_norm(x, 4) * w.mean() + b.mean(),
}  # fmt: skip


def images(channels_last: bool, dtype: torch.dtype = torch.float32, seed: int = 0, size: tuple[int, ...] = SIZE) -> Tensor:
    made = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2 + 0.3).to(dtype)
    return made.to(memory_format=torch.channels_last) if channels_last else made


def numbers() -> list[Tensor]:
    return [torch.rand(SIZE[1], generator=torch.Generator().manual_seed(seed)) + 0.5 * (seed - 1) for seed in (1, 2)]


def step(norm: Callable[..., Tensor], act: Callable[[Tensor], Tensor], cast: bool = False) -> Callable[..., Any]:
    """Forward and backward of a norm and an activation between convolutions, whose weights' gradients are not asked for."""

    def program(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, kernel: Tensor) -> list[Tensor]:
        given = [one.detach().requires_grad_() for one in (x, weight, bias)]
        normal = norm(given[0].float() if cast else given[0], *given[1:])
        y = F.conv2d(act(normal).to(x.dtype), kernel)
        return list(torch.autograd.grad(y, given, grad))

    return program


def large(made: Plan, name: str) -> list[tuple[str, int, int]]:
    """Kernels of the backward called ``name``: how many values as large as an image of 2 bytes an element they read and write."""
    least = torch.Size(SIZE).numel() * 2

    def count(values: Any) -> int:
        return len({value for value in values if isinstance(value, Value) and value.buffer.nbytes >= least})

    def found(step: KernelStep) -> tuple[str, int, int]:
        return step.kernel.name, count(step.reads), count(step.writes)

    return [found(step) for step in kernels(made) if name in step.kernel.name and count(step.reads)]


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_channels, "MANY", 1)


@acts
@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["rows", "channels_last"])
def test_gradients_equal_eagers(norm: str, act: Callable[[Tensor], Tensor], channels_last: bool) -> None:
    x, grad = (images(channels_last, seed=seed, size=(2, 16, 12, 16)) for seed in (0, 1))
    kernel = torch.randn(16, 16, 1, 1, generator=torch.Generator().manual_seed(5)) / 4
    check(step(NORMS[norm], act), x, grad, *numbers(), kernel, extern=2, rtol=2e-3, atol=2e-3)


@acts
@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_both_kernels_read_the_gradient_and_the_norms_input_only(norm: str, act: Callable[[Tensor], Tensor]) -> None:
    x, grad = (images(True, torch.bfloat16, seed) for seed in (0, 1))
    given = (x, grad, *numbers(), torch.eye(16).reshape(16, 16, 1, 1).bfloat16())
    made = check(step(NORMS[norm], act, cast=norm == "group"), *given, extern=2, rtol=5e-2, atol=5e-2)
    sums, elements = large(made, "norm_backward")
    assert sums[1:] == (2, 0) and elements[1:] == (2, 1), "the gradient before the convolution and x"
    forward = [one for one in large(made, "norm") if "backward" not in one[0]]
    assert sum(writes for _, _, writes in forward) == 1, "what the convolution reads, not what the activation is given"


def test_what_backward_reads_otherwise_is_written() -> None:
    x, grad = (images(True, torch.bfloat16, seed) for seed in (0, 1))
    given = (x, grad, *numbers(), torch.eye(16).reshape(16, 16, 1, 1).bfloat16())
    with settings.override(disable="recompute"):
        made = check(step(NORMS["batch"], F.silu), *given, extern=2, rtol=5e-2, atol=5e-2)
    (sums, _) = large(made, "norm_backward")
    assert sums[1:] == (3, 1)


def test_what_scales_channels_of_samples_is_read_with_the_gradient() -> None:
    """As squeeze and excitation do: one large operand and a small one."""

    def program(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> list[Tensor]:
        given = [one.detach().requires_grad_() for one in (x, weight, bias)]
        y = F.silu(NORMS["batch"](*given)) * scale
        return list(torch.autograd.grad(y, given, grad))

    x, grad = (images(True, torch.bfloat16, seed) for seed in (0, 1))
    scale = torch.rand(SIZE[0], SIZE[1], 1, 1).bfloat16()
    made = check(program, x, grad, *numbers(), scale, rtol=5e-2, atol=5e-2)
    assert [one[1:] for one in large(made, "norm_backward")] == [(2, 0), (2, 1)]


def test_nothing_is_computed_anew_of_what_others_read_or_of_more_operands() -> None:
    def program(x: Tensor, grad: Tensor, other: Tensor, weight: Tensor, bias: Tensor, both: bool) -> list[Tensor]:
        given = [one.detach().requires_grad_() for one in (x, weight, bias)]
        normal = NORMS["batch"](*given)
        shifted = (normal + other).detach().requires_grad_() if both else normal + other
        y = F.relu(shifted)
        if both:
            (before,) = torch.autograd.grad(y, shifted, grad)
            return [before, *torch.autograd.grad(normal, given, before)]
        return list(torch.autograd.grad(y, given, grad))

    x, grad, other = (images(True, seed=seed) for seed in (0, 1, 2))
    for both in (False, True):
        made = check(lambda *given, both=both: program(*given, both), x, grad, other, *numbers(), rtol=1e-3, atol=1e-3)
        names = [node.name for step in kernels(made) for node in step.nodes]
        assert "threshold_backward" in names, both


def test_an_input_that_is_overwritten_in_between_is_not_read_again() -> None:
    def program(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        weight, bias = weight.clone(), bias.clone()
        mean, scale = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
        normal, mean, scale = torch.ops.aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
        y = F.relu(normal)
        bias.fill_(-9.0)  # the forward used the old one
        passed = torch.ops.aten.threshold_backward(grad, y, 0)
        return [y, *torch.ops.aten.native_batch_norm_backward(passed, x, weight, None, None, mean, scale, True, 1e-5, [True] * 3)]

    x, grad = (images(True, seed=seed) for seed in (0, 1))
    check(program, x, grad, *numbers(), rtol=1e-3, atol=1e-3)


def test_an_activation_is_computed_anew_where_its_gradient_is_a_sum_of_many() -> None:
    """Which is written once; what the activation was given need not be."""

    def program(x: Tensor, weight: Tensor, bias: Tensor, *grads: Tensor) -> list[Tensor]:
        given = [one.detach().requires_grad_() for one in (x, weight, bias)]
        y = F.silu(NORMS["batch"](*given))
        return list(torch.autograd.grad(y, given, sum(grads[1:], grads[0])))

    x, *grads = (images(True, torch.bfloat16, seed) for seed in range(5))
    made = check(program, x, *numbers(), *grads, rtol=5e-2, atol=5e-2)
    sums, elements = large(made, "norm_backward")
    assert elements[1:] == (2, 1) and not any("silu" in name for name, *_ in large(made, "backward") if "norm" not in name)
    forward = [one for one in large(made, "norm") if "backward" not in one[0]]
    assert sum(writes for _, _, writes in forward) == 0, "nobody needs what the norm gave"


def test_the_norms_result_is_also_read_the_other_way() -> None:
    """Of a square, turned: that element is another than the one at hand."""

    def program(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        normal, mean, scale = torch.ops.aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
        passed = torch.ops.aten.threshold_backward(grad * normal.t(), normal, 0)
        return list(torch.ops.aten.native_batch_norm_backward(passed, x, weight, None, None, mean, scale, True, 1e-5, [True] * 3))

    x, grad = (images(False, seed=seed)[0, 0, :16, :16].contiguous() for seed in (0, 1))
    check(program, x, grad, *numbers(), rtol=1e-3, atol=1e-3)
