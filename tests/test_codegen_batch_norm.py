"""Batch norm and its gradient against eager PyTorch, in every kernel form, and what shares a kernel with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import check, execute, kernels, record, typed
from torch import Tensor

from codegen.fuse import plan
from codegen.tuning import HOPPER, Tuning
from ir_nodes import Value, settings

LOOPED = Tuning(tile=64, persistent=16, looped=16)
SPLIT = Tuning(tile=64, persistent=64, looped=16, programs=16, split_rows=16, split_column=16, split_row=16, split_numel=64)
FORMS = {"persistent": HOPPER, "looped": LOOPED, "split": SPLIT}
forms = pytest.mark.parametrize("tuning", FORMS.values(), ids=FORMS.keys())
last = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])


def images(*size: int, channels_last: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2 + 3).to(dtype)
    return made.to(memory_format=torch.channels_last) if channels_last else made


def numbers(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.5


def statistics(count: int) -> list[Tensor]:
    """Weight, bias, running mean, running variance."""
    return [numbers(count, seed) for seed in range(1, 5)]


def train(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None) -> Any:
    return torch.ops.aten.native_batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5)


def backward(grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, mask: list[bool]) -> list[Tensor]:
    """Those gradients of input, weight and bias that ``mask`` asks for."""
    made = torch.ops.aten.native_batch_norm_backward(grad, x, weight, None, None, mean, scale, True, 1e-5, mask)
    return [one for one, wanted in zip(made, mask) if wanted]


def everything(*given: Tensor) -> list[Tensor]:
    return backward(*given, [True, True, True])  # type: ignore[call-arg, arg-type]


@last
@forms
def test_training_normalises_and_moves_the_running_statistics(tuning: Tuning, channels_last: bool) -> None:
    x = images(5, 7, 9, 11, channels_last=channels_last)
    check(train, x, *statistics(7), tuning=tuning, rtol=1e-4, atol=1e-5)


@last
@forms
def test_gradients(tuning: Tuning, channels_last: bool) -> None:
    x, grad = (images(5, 7, 9, 11, channels_last=channels_last, seed=seed) for seed in (0, 1))
    mean, scale = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    check(everything, grad, x, numbers(7, 3), mean, scale, tuning=tuning, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(37, 5), (6, 5, 13), (3, 5, 2, 3, 4), (1, 3, 4, 4), (40, 1, 1, 1)], ids=str)
def test_any_number_of_dimensions(size: tuple[int, ...]) -> None:
    x, grad = images(*size, channels_last=False), images(*size, channels_last=False, seed=1)
    check(train, x, *statistics(size[1]), rtol=1e-4, atol=1e-5)
    dims = [dim for dim in range(len(size)) if dim != 1]
    mean, scale = x.mean(dims), (x.var(dims, correction=0) + 1e-5).rsqrt()
    check(everything, grad, x, numbers(size[1], 3), mean, scale, rtol=1e-4, atol=1e-4)


@last
@pytest.mark.parametrize("tuning", [HOPPER, SPLIT], ids=["whole", "split"])
def test_numbers_of_16_bits_with_weights_of_32(tuning: Tuning, channels_last: bool) -> None:
    x, grad = (images(5, 7, 6, 10, channels_last=channels_last, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    check(train, x, *statistics(7), tuning=tuning, rtol=1e-2, atol=1e-2)
    mean, scale = x.float().mean((0, 2, 3)), (x.float().var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    check(everything, grad, x, numbers(7, 3), mean, scale, tuning=tuning, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tuning", [HOPPER, SPLIT], ids=["whole", "split"])
def test_what_may_be_missing(tuning: Tuning) -> None:
    x, grad = (images(5, 7, 6, 10, channels_last=True, seed=seed) for seed in (0, 1))
    weight, bias, mean, var = statistics(7)
    check(lambda x: train(x, None, None, None, None), x, tuning=tuning, rtol=1e-4, atol=1e-5)
    check(lambda x, mean, var: train(x, None, None, mean, var), x, mean, var, tuning=tuning, rtol=1e-4, atol=1e-5)
    check(lambda x, weight, bias: train(x, weight, bias, None, None), x, weight, bias, tuning=tuning, rtol=1e-4, atol=1e-5)
    for mask in ([True, False, False], [False, True, True]):
        check(lambda *given, mask=mask: backward(*given, mask), grad, x, weight, mean, var, tuning=tuning, rtol=1e-4, atol=1e-4)
    check(lambda grad, x, mean, var: backward(grad, x, None, mean, var, [True, False, False]), grad, x, mean, var, tuning=tuning,
          rtol=1e-4, atol=1e-4)  # fmt: skip


@last
def test_by_the_running_statistics(channels_last: bool) -> None:
    x, grad = (images(5, 7, 9, 11, channels_last=channels_last, seed=seed) for seed in (0, 1))
    weight, bias, mean, var = statistics(7)
    made = check(lambda *given: F.batch_norm(*given).relu(), x, mean, var, weight, bias, count=1, rtol=1e-4, atol=1e-5)
    assert len(kernels(made)[0].writes) == 1, "the statistics are only read"

    def gradients(grad: Tensor, x: Tensor) -> Any:
        saved = torch.empty(0)
        made = torch.ops.aten.native_batch_norm_backward
        return made(grad, x, weight, mean, var, saved, saved, False, 1e-5, [True, True, True])

    check(gradients, grad, x, rtol=1e-4, atol=1e-4)


@last
def test_the_variance_is_as_accurate_as_eagers(channels_last: bool) -> None:
    """Means far from zero, a channel that is constant, one whose first element lies far off."""
    x = images(8, 4, 20, 20, channels_last=channels_last)
    x[:, 1] += 3000
    x[:, 2] = 12.3
    x[0, 3, 0, 0] = 1e4
    recording, outs = record(lambda x: train(x, None, None, None, None), x)
    wanted = {index: data.clone() for index, data in recording.expected.items()}
    memory = execute(recording, plan(recording.graph, tuning=SPLIT))
    exact = x.double()
    dims = (0, 2, 3)
    mean, scale = exact.mean(dims), (exact.var(dims, correction=0) + 1e-5).rsqrt()
    found = {name: typed(memory[index], out) for name, out in zip(("out", "mean", "scale"), outs)
             for index in wanted if torch.equal(typed(wanted[index], out), out) and wanted[index].numel() == out.numel() * 4}
    torch.testing.assert_close(found["mean"].double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["scale"].double(), scale, rtol=1e-5, atol=0)


def test_not_a_number_and_infinity_reach_their_channel_only() -> None:
    x = images(6, 4, 5, 5, channels_last=True)
    x[1, 1, 2, 2], x[2, 3, 1, 1] = float("nan"), float("inf")
    recording, outs = record(lambda x: train(x, None, None, None, None)[0], x)
    memory = execute(recording, plan(recording.graph, tuning=SPLIT))
    found = next(typed(memory[index], outs[0]) for index in recording.expected if memory[index].numel() == x.numel() * 4
                 and index not in recording.inputs)
    assert found[:, (0, 2)].isfinite().all() and found[:, (1, 3)].isnan().all()


def test_a_constant_input() -> None:
    check(lambda: train(torch.full((4, 3, 2, 2), 2.0), None, None, None, None), rtol=1e-4, atol=1e-5)


@last
def test_forward_is_sums_their_combination_and_one_kernel_with_its_neighbours(channels_last: bool) -> None:
    def block(x: Tensor, shortcut: Tensor, *rest: Tensor) -> Tensor:
        return (train(x, *rest)[0] + shortcut).relu_()

    size = (8, 6, 40, 40)
    x, shortcut = (images(*size, channels_last=channels_last, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    made = check(block, x, shortcut, *statistics(6), count=3, rtol=2e-2, atol=2e-2)
    first, second, third = kernels(made)
    assert len(third.nodes) == 3 and len(third.writes) == 1
    assert sum(value.buffer.nbytes == x.numel() * 2 for value in first.reads) == 1, "one pass over the input"


@last
def test_backward_takes_the_activations_gradient_into_the_sums(channels_last: bool) -> None:
    def gradient(grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        return backward(torch.ops.aten.threshold_backward(grad, y, 0), x, weight, mean, var, [True, True, True])

    size = (8, 6, 40, 40)
    grad, y, x = (images(*size, channels_last=channels_last, seed=seed) - 3 * (seed == 1) for seed in range(3))
    made = check(gradient, grad, y, x, *statistics(6)[1:], count=3, rtol=1e-3, atol=1e-3)
    assert len(kernels(made)[0].nodes) == 2


def block(inplace: bool, shortcut: bool = False) -> Any:
    """Forward and backward of a norm and its activation, with a shortcut or without."""

    def program(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        given = [one.detach().requires_grad_() for one in (x, weight, bias)]
        normal = F.batch_norm(given[0], None, None, *given[1:], True, 0.1, 1e-5)
        if shortcut:
            normal = normal + grad.flip(0)
        y = F.relu(normal, inplace=inplace)
        return [y.detach(), *torch.autograd.grad(y, given, grad)]

    return program


@last
def test_backward_computes_the_activations_mask_from_the_norms_input(channels_last: bool) -> None:
    """Here nothing lies between forward and backward, so the result is stored by the kernel that takes the gradient's sums."""
    size = (8, 6, 40, 40)
    x, grad = (images(*size, channels_last=channels_last, seed=seed) - 3 for seed in (0, 1))
    made = check(block(channels_last), x, grad, *statistics(6)[:2], count=5, rtol=1e-3, atol=1e-3)
    steps = kernels(made)
    sums = next(step for step in steps if "backward" in step.kernel.name)
    large = [value for value in (*sums.reads, *sums.writes) if isinstance(value, Value) and value.buffer.nbytes == x.numel() * 4]
    assert len(large) == 3, "the gradient, the norm's input, the activation's result"
    assert not any(node.name == "threshold_backward" for step in steps for node in step.nodes)


def test_a_mask_is_not_computed_again_behind_a_shortcut_nor_where_recomputing_is_off() -> None:
    x, grad = (images(4, 6, 8, 8, channels_last=True, seed=seed) - 3 for seed in (0, 1))
    made = check(block(True, shortcut=True), x, grad, *statistics(6)[:2], rtol=1e-3, atol=1e-3)
    assert any(node.name == "threshold_backward" for step in kernels(made) for node in step.nodes)
    with settings.override(disable="recompute"):
        made = check(block(True), x, grad, *statistics(6)[:2], rtol=1e-3, atol=1e-3)
    assert any(node.name == "threshold_backward" for step in kernels(made) for node in step.nodes)


def test_a_mask_is_the_forwards_own_bit_by_bit_in_16_bits() -> None:
    x, grad = (images(4, 16, 8, 8, channels_last=True, dtype=torch.bfloat16, seed=seed) - 3 for seed in (0, 1))
    check(block(True), x, grad, *statistics(16)[:2], rtol=2e-2, atol=2e-2)


def test_a_residual_block_has_three_kernels_for_each_norm_and_way_and_one_for_the_sum_of_gradients() -> None:
    given = [images(4, 16, 24, 24, channels_last=True), *statistics(16)[:2], *statistics(16)[2:]]
    kernel = images(16, 16, 1, 1, channels_last=True) * 0.02

    def step(x: Tensor, grad: Tensor, kernel: Tensor, *numbers: Tensor) -> list[Tensor]:
        x, kernel, a, b, c, d = (one.detach().requires_grad_() for one in (x, kernel, *numbers))
        y = F.relu(F.batch_norm(F.conv2d(x, kernel), None, None, a, b, True), inplace=True)
        y = F.relu(F.batch_norm(F.conv2d(y, kernel), None, None, c, d, True) + x, inplace=True)
        return [y.detach(), *torch.autograd.grad(y, [x, kernel, a, b, c, d], grad)]

    made = check(step, given[0], torch.rand_like(given[0]), kernel, *given[1:], extern=4, rtol=1e-2, atol=1e-2)
    norms = [step for step in kernels(made) if "batch_norm" in step.kernel.name]
    others = [[node.name for node in step.nodes] for step in kernels(made) if step not in norms]
    assert len(norms) == 11, "the second norm's elements are stored by the kernel that takes their gradient's sums"
    assert others == [["add"], ["add"]], "of what x and what the kernel get from both uses"
