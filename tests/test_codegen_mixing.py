"""Rows and columns of one input in one pass, and values that are computed again instead of being kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, values_named

from codegen.tuning import Tuning
from ir_nodes.node import Value

SMALL = Tuning(split_numel=64, mixed_rows=8, mixed_tile=64, cores=2, split_column=8, split_rows=8, programs=8)
PEELED = Tuning(persistent=16, looped=16, online=16, tile=64, peeled=16, pointwise_block=32)


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_norm_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, s: torch.Tensor) -> Any:
    return torch.ops.aten.native_layer_norm_backward(g, x, [x.shape[-1]], m, s, w, w, [True, True, True])


SIZES = pytest.mark.parametrize("size", [(33, 24), (64, 32), (70, 17)], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@SIZES
def test_layer_norm_gradients_are_one_pass_and_a_small_kernel(size: tuple[int, int]) -> None:
    inputs = [data(*size), data(*size, seed=1), data(size[1]), data(size[0], 1), data(size[0], 1, seed=2)]
    made = check(layer_norm_backward, *inputs, count=2, tuning=SMALL, rtol=1e-4, atol=1e-4)
    assert sum("for r in" in step.kernel.source for step in kernels(made)) == 1


@SIZES
def test_updates_of_scale_and_shift_are_work_of_the_small_kernel(size: tuple[int, int]) -> None:
    """Also what they do before they need the columns' sums, as weight decay does."""
    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        g, x, w, m, s, moment, bias = inputs
        dx, dw, db = layer_norm_backward(g, x, w, m, s)
        moment.mul_(0.9).add_(dw, alpha=0.1)
        return [dx, moment, w.mul_(0.99).sub_(moment), bias.mul_(0.99).sub_(db)]

    rows = [data(*size), data(*size, seed=1)]
    inputs = [*rows, data(size[1]), data(size[0], 1), data(size[0], 1, seed=2), data(size[1], seed=3), data(size[1], seed=4)]
    made = check(program, *inputs, count=2, tuning=SMALL, rtol=1e-4, atol=1e-4)
    assert sum("for r in" in step.kernel.source for step in kernels(made)) == 1


@SIZES
@DTYPES
def test_rows_and_columns_of_one_input(size: tuple[int, int], dtype: torch.dtype) -> None:
    near = {"rtol": 2e-2, "atol": 2e-1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    x, y = data(*size, dtype=dtype), data(*size, dtype=dtype, seed=1)
    check(lambda x: (x.sum(0), x.sum(1)), x, count=2, tuning=SMALL, **near)
    check(lambda x: (x.amax(0) * 2, (x * 2).mean(1), x.relu()), x, count=2, tuning=SMALL, **near)
    check(lambda x, y: (x.softmax(1), (x * y).sum(0).float() + 1), x, y, count=2, tuning=SMALL, **near)


@SIZES
def test_sums_of_columns_meet_numbers_that_follow_from_the_column(size: tuple[int, int]) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [(x * y).softmax(1), (x * y).sum(0) * 0.5 + torch.linspace(-1, 1, size[1])]

    check(program, data(*size), data(*size, seed=1), count=2, tuning=SMALL, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [2, 3, 5, 8, 9, 127])
def test_short_rows_have_blocks_of_their_own_length(columns: int) -> None:
    """Not of as many more as lie between a 16-byte boundary and a row's start: they are not read in vectors from there on."""
    def program(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        scale = (x.square().mean(1, keepdim=True) + 0.1).rsqrt()
        return [x * scale * w, (x * scale).sum(0)]

    made = check(program, data(70, columns), data(columns, seed=1), count=2, tuning=SMALL, rtol=1e-5, atol=1e-5)
    kernel = kernels(made)[0].kernel
    assert dict(kernel.constexprs)["B1"] == 1 << (columns - 1).bit_length()
    assert (f"m1 = i1 < {columns}\n" in kernel.source) == (columns <= 8)


@SIZES
@DTYPES
def test_programs_may_walk_several_rows(size: tuple[int, int], dtype: torch.dtype) -> None:
    """They load ahead, and know once what all rows share."""
    walking = Tuning(walks=8, mixed_rows=8, mixed_tile=64, cores=2)
    columns = size[1:]

    def program(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [F.layer_norm(x + y, columns, w), (x + y).softmax(-1), x.sum(1)]

    made = check(program, data(*size, dtype=dtype), data(*size, dtype=dtype, seed=1), data(*columns, dtype=dtype, seed=2),
                 tuning=walking, rtol=2e-2, atol=2e-2)
    assert all("for r in tl.range(begin, end, B0" in step.kernel.source for step in kernels(made))


def test_what_is_decayed_before_its_gradient_is_known_stays_in_the_small_kernel() -> None:
    """AdamW multiplies weights and moments first; there are more of them than one kernel takes operands."""
    aten = torch.ops.aten

    def program(grad: torch.Tensor, x: torch.Tensor, rest: torch.Tensor, *state: torch.Tensor) -> list[torch.Tensor]:
        _, mean, scale = aten.native_layer_norm(x, [24], state[0], state[1], 1e-5)
        dx, dw, db = aten.native_layer_norm_backward(grad, x, [24], mean, scale, state[0], state[1], [True, True, True])
        total = rest + dx
        gradients = [dw, db, total.sum(0)]
        for index, one in enumerate(gradients):
            weight, first, second = state[index], state[index + 3], state[index + 6]
            weight.mul_(0.99)
            first.lerp_(one, 0.1)
            second.mul_(0.999).addcmul_(one, one, value=0.001)
            weight.addcdiv_(first, second.sqrt().add_(1e-3), value=-0.01)
        return [total, *state]

    state = [torch.rand(24) + 0.5 for _ in range(9)]
    made = check(program, data(64, 24), data(64, 24, seed=1), data(64, 24, seed=2), *state, rtol=1e-3, atol=1e-3, tuning=SMALL)
    names = [step.kernel.name for step in kernels(made)]
    assert len(names) == 2, f"one pass over rows and columns, a small kernel: {names}"


def test_a_row_that_needs_the_columns_is_another_pass() -> None:
    made = check(lambda x: (x - x.mean(0)).sum(1), data(64, 32), tuning=SMALL, rtol=1e-4, atol=1e-4)
    assert len(kernels(made)) == 3


@DTYPES
@pytest.mark.parametrize("columns", [71, 128])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_keeps_no_wide_logits(dtype: torch.dtype, columns: int, reduction: str) -> None:
    target = torch.randint(0, columns, (9,), generator=torch.Generator().manual_seed(0))
    target[2] = -100

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x.float(), target, reduction=reduction)
        (grad,) = torch.autograd.grad(loss, x)
        return [loss.detach(), grad]

    for tuning in (Tuning(), PEELED):
        made = check(program, data(9, columns, dtype=dtype), tuning=tuning)
        written = [value.buffer.nbytes for step in kernels(made) for value in step.writes if hasattr(value, "buffer")]
        assert max(written) <= 9 * columns * dtype.itemsize
        assert values_named(made)


@DTYPES
@pytest.mark.parametrize("columns", [71, 128])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_bias_before_a_loss_is_summed_where_the_gradient_is_made(dtype: torch.dtype, columns: int, rounded: bool) -> None:
    """The gradient of log-softmax sums rows with one element each, which needs no pass; its columns are another sum."""
    target = torch.randint(0, columns, (70,), generator=torch.Generator().manual_seed(0))
    target[2] = -100

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = F.nll_loss(torch.log_softmax(x, 1).float() if rounded else torch.log_softmax(x.float(), 1), target)
        (grad,) = torch.autograd.grad(loss, x)
        return [loss.detach(), grad, grad.sum(0)]

    near = {"rtol": 2e-2, "atol": 2e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    made = check(program, data(70, columns, dtype=dtype), tuning=SMALL.changed("mixed_row=8"), count=4, **near)
    both = kernels(made)[-2]
    assert "for r in" in both.kernel.source and "tl.reduce" in both.kernel.source
    assert sum(isinstance(value, Value) for value in both.writes) == 1


@DTYPES
@pytest.mark.parametrize("columns", [35, 70, 129, 256])
def test_rows_off_16_byte_boundaries(dtype: torch.dtype, columns: int) -> None:
    near = {"rtol": 1e-2, "atol": 1e-2}
    x, y, w = data(5, columns, dtype=dtype), data(5, columns, dtype=dtype, seed=1), data(columns, dtype=dtype, seed=2)
    check(lambda x, w, y: F.gelu(x + w) + y, x, w, y, tuning=PEELED, count=1, **near)
    check(lambda x, w: x.mul_(w), x, w, tuning=PEELED, count=1, **near)
    check(lambda x, w: x[1:, 1:] * w[1:], x, w, tuning=PEELED, count=1, **near)
    check(lambda x: (x.softmax(-1), x.log_softmax(-1), x[1:, 3:].softmax(-1)), x, tuning=PEELED, **near)
    check(lambda x, w: F.layer_norm(x, (columns,), w, w), x, w, tuning=PEELED, **near)


@DTYPES
@pytest.mark.parametrize("size", [(133, 35), (150, 17)], ids=str)
def test_columns_of_rows_off_16_byte_boundaries(dtype: torch.dtype, size: tuple[int, int]) -> None:
    near = {"rtol": 2e-2, "atol": 2e-1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    tuning = Tuning(split_numel=64, mixed_rows=8, mixed_tile=64, cores=16, split_column=8, split_rows=4, programs=64,
                    column_width=16, column_tile=64, covered=16)

    def gelu_backward(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = torch.ops.aten.gelu_backward(g, x)
        return inner, inner.sum(0)

    g, x = data(*size, dtype=dtype), data(*size, dtype=dtype, seed=1)
    for made in (check(gelu_backward, g, x, count=2, tuning=tuning, **near),
                 check(lambda x: (x.sum(0), x.sum(1)), x, count=2, tuning=tuning, **near)):
        assert "base + at" in kernels(made)[0].kernel.source
    assert "base" not in kernels(check(lambda x: x.sum(0), data(150, 32), tuning=tuning))[0].kernel.source


@DTYPES
@pytest.mark.parametrize("columns", [35, 127, 129])
def test_one_row_a_program_off_16_byte_boundaries(dtype: torch.dtype, columns: int) -> None:
    near = {"rtol": 2e-2, "atol": 2e-2}
    tuning = Tuning(tile=16, covered=16)
    x, y, w = data(5, columns, dtype=dtype), data(5, columns, dtype=dtype, seed=1), data(columns, dtype=dtype, seed=2)
    made = check(lambda x: x.softmax(-1), x, count=1, tuning=tuning, **near)
    assert "base + at" in kernels(made)[0].kernel.source
    check(lambda x, y, w: (x + y, F.layer_norm(x + y, (columns,), w, w)), x, y, w, count=1, tuning=tuning, **near)
    check(lambda x, y: x.add_(y).softmax(-1), x, y, count=1, tuning=tuning, **near)
    check(lambda x: (x[1:, 2:].softmax(-1), x.sum(-1)), x, tuning=tuning, **near)


def test_rows_without_a_finite_number() -> None:
    x = torch.full((4, 201), float("-inf"))
    x[0, 5], x[1, 7], x[2, 3] = 1.0, float("nan"), float("inf")
    check(lambda x: (x.softmax(-1), x.amax(-1), x.log_softmax(-1)), x, tuning=PEELED)


def test_what_all_rows_load_under_a_condition_of_the_row_stays_in_the_walk() -> None:
    """A class token before the patches is one row's operand."""
    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        token, patches, w, b, g = inputs
        x = torch.cat((token.expand(6, 1, 24), patches), 1)
        y, mean, scale = torch.native_layer_norm(x, [24], w, b, 1e-5)
        return [y, *torch.ops.aten.native_layer_norm_backward(g, x, [24], mean, scale, w, b, [True, True, True])]

    inputs = data(1, 1, 24), data(6, 7, 24, seed=1), data(24), data(24, seed=2), data(6, 8, 24, seed=3)
    made = check(program, *inputs, tuning=SMALL, rtol=1e-4, atol=1e-4)
    assert any("for r in" in step.kernel.source for step in kernels(made))
