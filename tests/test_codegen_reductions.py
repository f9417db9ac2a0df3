"""Reductions, softmax, normalisation and cross entropy against eager PyTorch, in every kernel form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record
from graphs import drawn as data

from codegen.fuse import plan
from codegen.tuning import HOPPER, INTERPRETER, Tuning

LOOPED = Tuning(tile=64, persistent=16, looped=16)
SPLIT = Tuning(tile=64, persistent=64, looped=16, programs=16, split_rows=16, split_column=16, split_row=16, split_numel=64,
               at_once=0)
FORMS = {"persistent": HOPPER, "looped": LOOPED, "split": SPLIT, "a block each": replace(SPLIT, at_once=8),
         "interpreter": INTERPRETER}
forms = pytest.mark.parametrize("tuning", FORMS.values(), ids=FORMS.keys())


@forms
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
def test_sum_over_any_dimensions(dims: tuple[int, ...], tuning: Tuning) -> None:
    check(lambda x: x.sum(dims), data(9, 21, 35), tuning=tuning, rtol=1e-4, atol=1e-5)


REDUCTIONS: list[tuple[str, Callable[..., Any], tuple[torch.dtype, ...]]] = [
    ("sum", lambda x: (x.sum(), x.sum(0, keepdim=True), x.sum(1)), (torch.bfloat16, torch.float64, torch.int64, torch.bool)),
    ("sum to float", lambda x: x.sum(1, dtype=torch.float32), (torch.int32, torch.bfloat16)),
    ("mean", lambda x: (x.mean(), x.mean(0), x.mean(-1, keepdim=True)), (torch.float32, torch.bfloat16, torch.float64)),
    ("amax", lambda x: (x.amax(), x.amax(0), x.amax(1)), (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)),
    ("amin", lambda x: (x.amin(), x.amin(0), x.amin(1)), (torch.float32, torch.int64, torch.bool)),
    ("max", lambda x: (x.max(), x.min()), (torch.float32, torch.int32)),
    ("any", lambda x: (x.any(), x.any(0), x.any(1)), (torch.float32, torch.bool)),
    ("count", lambda x: (torch.count_nonzero(x), torch.count_nonzero(x, 1)), (torch.float32, torch.int32, torch.bool)),
    ("all", lambda x: (x.all(), x.all(0), x.all(1)), (torch.float32, torch.bool)),
    ("norm", lambda x: (torch.linalg.vector_norm(x), torch.linalg.vector_norm(x, 1, 0)), (torch.float32, torch.bfloat16)),
    ("norms", lambda x: tuple(torch.linalg.vector_norm(x, order, 1) for order in (0, 3, -1)), (torch.float32, torch.bfloat16)),
    ("prod", lambda x: ((x * 0.5 + 1).prod(1), x[:9].prod(0), (x * 0.1 + 1).prod()), (torch.float32, torch.float64)),
    ("prod of integers", lambda x: (x[:9].clamp(-2, 3).prod(0), x[:, :9].clamp(-2, 3).prod(1, True)),
     (torch.int32, torch.bfloat16)),
    ("prod of truths", lambda x: (x.prod(0), x[:3].prod(1)), (torch.bool,)),
    ("nansum", lambda x: (x.log().nansum(), x.log().nansum(0), x.log().nansum(1)), (torch.float32, torch.float64)),
]


@pytest.mark.parametrize(
    ("program", "dtype"),
    [pytest.param(program, dtype, id=f"{name}-{str(dtype)[6:]}") for name, program, dtypes in REDUCTIONS for dtype in dtypes],
)
@pytest.mark.parametrize("tuning", [HOPPER, SPLIT], ids=["whole", "split"])
def test_reduction_equals_eager(program: Callable[..., Any], dtype: torch.dtype, tuning: Tuning) -> None:
    check(program, data(33, 70, dtype=dtype), tuning=tuning, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-2
          if dtype is torch.bfloat16 else 1e-5)


@forms
def test_nan_and_infinity_reach_the_results(tuning: Tuning) -> None:
    x = data(7, 40)
    x[0, 3], x[1, 5], x[2, 7], x[2, 8], x[3] = float("nan"), float("inf"), float("inf"), float("-inf"), float("-inf")
    check(lambda x: (x.amax(1), x.amin(1), x.sum(1), x.amax(0), x.softmax(1)), x, tuning=tuning)


@pytest.mark.parametrize("size", [(1, 1), (1, 70), (70, 1), (1, 40, 1)], ids=str)
def test_dimensions_of_size_one(size: tuple[int, ...]) -> None:
    check(lambda x: (x.sum(0), x.sum(-1), x.softmax(-1), x.softmax(0), x.sum()), data(*size))


def test_strided_and_broadcast_inputs() -> None:
    x = data(6, 8, 10)
    check(lambda x: (x.permute(2, 0, 1).sum(1), x[:, ::2].sum(2), x[:, :1].expand(6, 8, 10).sum(1), x.transpose(0, 2).sum()), x)


def test_a_reduced_constant_counts_every_element() -> None:
    check(lambda x: (x.new_ones(5, 7) * 2).sum(1) + x, data(5))


@forms
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_softmax_and_gradients_along_any_dimension(dim: int, tuning: Tuning) -> None:
    def program(x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        soft, log = torch.softmax(x, dim), torch.log_softmax(x, dim)
        backward = torch.ops.aten
        return [soft, log, backward._softmax_backward_data(g, soft, dim, x.dtype),
                backward._log_softmax_backward_data(g, log, dim, x.dtype)]

    check(program, data(5, 18, 33), data(5, 18, 33, seed=1), tuning=tuning, rtol=1e-4, atol=1e-5)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_in_half_precision(dtype: torch.dtype, tuning: Tuning) -> None:
    check(lambda x: torch.softmax(x, -1), data(5, 70, dtype=dtype), count=1, tuning=tuning)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    out, mean, scale = torch.ops.aten.native_layer_norm(x, weight.shape, weight, bias, 1e-5)
    return [out, mean, scale, *torch.ops.aten.native_layer_norm_backward(
        grad, x, weight.shape, mean, scale, weight, bias, [True, True, True])]


@forms
@pytest.mark.parametrize("shape", [(70,), (7, 10)], ids=str)
def test_layer_norm_and_gradients(shape: tuple[int, ...], tuning: Tuning) -> None:
    x, weight, bias, grad = data(11, 3, *shape), data(*shape, seed=1), data(*shape, seed=2), data(11, 3, *shape, seed=3)
    check(layer_norm, x, weight, bias, grad, tuning=tuning, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, True], [True, True, False]], ids=str)
def test_layer_norm_without_parameters_or_some_gradients(mask: list[bool]) -> None:
    def program(x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        out, mean, scale = torch.ops.aten.native_layer_norm(x, (40,), None, None, 1e-5)
        weight = x.new_ones(40)
        grads = torch.ops.aten.native_layer_norm_backward(grad, x, (40,), mean, scale, weight, weight, mask)
        return [out, *(g for g in grads if g is not None and g.numel())]

    check(program, data(9, 40), data(9, 40, seed=1), rtol=1e-3, atol=1e-4)


def cross_entropy(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(x, target, weight, ignore_index=-100, reduction=reduction)
    (grad,) = torch.autograd.grad(loss, x, torch.ones_like(loss).cumsum(0) if reduction == "none" else None)
    return [loss.detach(), grad]


@forms
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_and_gradient(reduction: str, weighted: bool, tuning: Tuning) -> None:
    target = torch.randint(0, 70, (33,), generator=torch.Generator().manual_seed(1))
    target[5] = target[9] = -100
    weight = data(70, seed=2).abs() + 0.1 if weighted else None
    check(lambda x: cross_entropy(x, target, weight, reduction), data(33, 70), tuning=tuning, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("extent", "dtype"), [(1_000, torch.float32), (1_001, torch.bfloat16), (50_257, torch.bfloat16)])
def test_losses_of_rows_that_a_mask_weighs(extent: int, dtype: torch.dtype) -> None:
    """As for answers behind prompts: the rows' losses and the gradient are one kernel, and float32 logits are nowhere."""
    target, mask = torch.arange(32) * 30, torch.tensor([0, 1, 1, 0, 1, 1, 1, 1]).float().repeat(4)
    target[3] = -100

    def program(x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        losses = F.cross_entropy(x.float(), target, reduction="none")
        (grad,) = torch.autograd.grad((losses * mask).sum() / mask.sum(), x)
        return [losses.detach(), grad]

    made = check(program, data(32, extent).to(dtype), mask, rtol=1e-4 if dtype is torch.float32 else 2e-2, atol=1e-5,
                 tuning=replace(HOPPER, few=6, programs=2))
    (kernel,) = [step.kernel for step in kernels(made) if "log_softmax" in step.kernel.name]
    assert "nll_loss_forward_nll_loss_backward" in kernel.name
    assert all(step.kernel is kernel or math.prod(step.grid) == 1 for step in kernels(made))


@forms
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(3, 11, 5, 6), (4, 70, 9)], ids=["pixels", "tokens"])
def test_cross_entropy_of_images_and_of_tokens(shape: tuple[int, ...], reduction: str, tuning: Tuning) -> None:
    """Whose classes are the second dimension of several."""
    rest = (shape[0], *shape[2:])
    target = torch.randint(0, shape[1], rest, generator=torch.Generator().manual_seed(1))
    target[1, 2], target[0, 0] = -100, shape[1] - 1
    weight = data(shape[1], seed=2).abs() + 0.1
    check(lambda x: cross_entropy(x, target, weight, reduction), data(*shape), tuning=tuning, rtol=1e-4, atol=1e-5)
    last = data(*shape).contiguous(memory_format=torch.channels_last) if len(shape) == 4 else data(*rest, shape[1]).movedim(-1, 1)
    check(lambda x: cross_entropy(x, target, None, reduction), last, tuning=tuning, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alike", [
    lambda x: x[:, :1], lambda x: x[:, :1].expand(-1, 7), lambda x: x.sum(1, keepdim=True).expand(-1, 7), torch.zeros_like,
], ids=["one class", "seen seven times", "a sum", "zeros"])  # fmt: skip
def test_losses_of_classes_that_are_all_alike(alike: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What a loss picks of each row is no element of the row then, and is nowhere in memory before the kernel ends."""
    target = torch.tensor([0, -100, 0, 0])
    check(lambda x: F.cross_entropy(alike(x), target, reduction="none"), data(4, 7))
    check(lambda x: [F.log_softmax(alike(x), 1), F.nll_loss(alike(x) * 2, target)], data(4, 7))
    check(lambda x: cross_entropy(alike(x), target, None, "mean"), data(4, 7))


def test_what_stands_for_the_sum_of_weights_without_a_sum() -> None:
    target = torch.tensor([3, -100, 0, 6])
    aten = torch.ops.aten
    check(lambda x: list(aten.nll_loss_forward(x, target, None, 0, -100)), data(4, 7))
    check(lambda x, weight: list(aten.nll_loss_forward(x.bfloat16(), target, weight, 0, -100)), data(4, 7), data(7).bfloat16())


def test_nll_loss_alone_gathers_from_memory() -> None:
    target = torch.tensor([3, -100, 0, 6])
    made = check(lambda x: F.nll_loss(x, target), data(4, 7))
    assert "other=0" in made.steps[0].kernel.source


@pytest.mark.parametrize("tuning", [LOOPED, SPLIT], ids=["looped", "split"])
def test_full_space_results_beside_a_reduction(tuning: Tuning) -> None:
    check(lambda x, y: ((x * y).relu(), (x * y).relu().sum(0), (x * y).relu().sum(0) * 2), data(50, 40), data(50, 40, seed=1),
          tuning=tuning, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["persistent", "looped"])
def test_normalising_in_place_reads_before_it_writes(tuning: Tuning) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.sub_(x.mean(1, keepdim=True))
        x.div_((x * x).mean(1, keepdim=True).sqrt())
        return x

    check(program, data(6, 70), count=1, tuning=tuning, rtol=1e-4, atol=1e-5)


def test_a_split_reduction_whose_result_meets_an_operand_of_its_summands() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = x * y
        return scaled, scaled.sum() + y

    check(program, data(50, 8), data(1), tuning=SPLIT, rtol=1e-4, atol=1e-5)


def test_empty_tensors_are_left_to_aten() -> None:
    made = check(lambda x: (x * 2, x.sum(0)), torch.randn(0, 3), extern=2)
    assert {step.reason for step in made.steps} == {"an empty tensor"}


def test_an_update_joins_a_split_reduction_though_part_of_it_needs_no_result() -> None:
    split = Tuning(split_numel=64, split_column=8, split_rows=8, programs=8)

    def program(x: torch.Tensor, p: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
        grad = x.sum(0)
        p.mul_(0.9)  # weight decay
        m.lerp_(grad, 0.1)
        p.addcdiv_(m, grad * grad + 1, value=-0.1)
        return [grad, p, m]

    made = check(program, torch.rand(40, 24), torch.rand(24), torch.rand(24), count=2, tuning=split)
    assert len(kernels(made)[1].writes) == 3


@pytest.mark.parametrize(("program", "length", "dtype", "programs"), [
    (torch.sum, 1 << 22, torch.float32, 1024),
    (torch.sum, (1 << 22) - 5, torch.float32, 1024),
    (torch.sum, 1 << 25, torch.float32, 512),
    (torch.sum, 1 << 22, torch.bfloat16, 512),
    (lambda x: (x[: 1 << 22] * x[1 << 22 :]).sum(), 1 << 23, torch.float32, 512),
], ids=["a block each", "off boundaries", "too many blocks", "narrow", "two operands"])  # fmt: skip
def test_programs_that_share_a_long_sum_take_a_block_each_or_walk(program: Callable[..., Any], length: int, dtype: torch.dtype,
                                                                  programs: int) -> None:
    recording, _ = record(program, data(length, dtype=dtype))
    first, second = kernels(plan(recording.graph, tuning=HOPPER))
    assert (first.grid[0], second.grid[0]) == (programs, 1)
