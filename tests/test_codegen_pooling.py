"""Max pooling and its gradient against eager PyTorch, and what shares a kernel with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import check, kernels
from torch import Tensor

from codegen.tuning import HOPPER, Tuning

SPLIT = Tuning(tile=64, persistent=64, looped=16, programs=16, split_rows=16, split_column=16, split_row=16, split_numel=64)
WINDOWS = {  # kernel, stride, padding, dilation, ceil_mode
    "resnet": ([3, 3], [2, 2], [1, 1], [1, 1], False),
    "apart": ([2, 2], [3, 3], [0, 0], [1, 1], True),
    "uneven": ([3, 2], [1, 2], [1, 0], [2, 1], True),
    "of one column": ([3, 1], [1, 1], [1, 0], [1, 1], False),
    "default stride": ([2, 3], [], [0, 1], [1, 1], False),
}
last = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])


def images(*size: int, channels_last: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Half of the elements are zero, as behind an activation: windows have ties."""
    made = torch.randn(size, generator=torch.Generator().manual_seed(seed)).relu().to(dtype)
    return made.to(memory_format=torch.channels_last) if channels_last else made


@last
@pytest.mark.parametrize("name", WINDOWS)
def test_forward_and_backward_equal_eager(name: str, channels_last: bool) -> None:
    windows, pool = WINDOWS[name], torch.ops.aten.max_pool2d_with_indices
    dtype = torch.bfloat16 if name == "resnet" else torch.float32
    x = images(2, 18, 11, 13, channels_last=channels_last, dtype=dtype)
    check(lambda x: pool(x, *windows), x, count=1)
    y, indices = pool(x, *windows)
    grad = torch.randn_like(y)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    check(lambda *given: backward(given[0], given[1], *windows, given[2]), grad, x, indices, count=1)


BOXES = {  # as `WINDOWS`
    "three": ([3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1], False),
    "two": ([2, 2, 2], [], [0, 0, 0], [1, 1, 1], True),
    "uneven": ([1, 3, 2], [1, 2, 1], [0, 1, 1], [1, 2, 1], False),
}


@last
@pytest.mark.parametrize("name", BOXES)
def test_boxes(name: str, channels_last: bool) -> None:
    windows, pool = BOXES[name], torch.ops.aten.max_pool3d_with_indices
    x = images(2, 3, 5, 7, 8, dtype=torch.bfloat16 if name == "three" else torch.float32)
    x = x.to(memory_format=torch.channels_last_3d) if channels_last else x
    check(lambda x: pool(x, *windows), x, count=1)
    y, indices = pool(x, *windows)
    grad = torch.randn_like(y)
    backward = torch.ops.aten.max_pool3d_with_indices_backward
    check(lambda *given: backward(given[0], given[1], *windows, given[2]), grad, x, indices, count=1)

    def both(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, indices = pool(x, *windows)
        return y, backward(grad, x, *windows, indices)

    check(both, x, grad, extern=0)


def test_one_image_without_a_batch() -> None:
    check(lambda x: torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]), images(4, 9, 8), count=1)


def test_not_a_number_wins_and_minus_infinity_has_an_index() -> None:
    x = images(1, 16, 6, 6)
    x[0, 0, 1, 1], x[0, 0, 1, 2], x[0, 1, 3, 3] = float("nan"), float("inf"), float("nan")
    x[0, 2] = float("-inf")
    check(lambda x: torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]), x, count=1)


def test_large_windows_stay_with_aten() -> None:
    made = check(lambda x: torch.ops.aten.max_pool2d_with_indices(x, [6, 6], [6, 6]), images(1, 2, 12, 12), extern=1)
    assert "more than 27" in made.steps[0].reason  # type: ignore[union-attr]


def test_the_gradient_goes_straight_into_the_sums_of_batch_norm() -> None:
    """Pooling, activation and norm backward: sums, their combination, and each element's gradient."""
    x, shape = images(4, 16, 20, 20, channels_last=True, seed=1), dict(memory_format=torch.channels_last)
    y, indices = torch.ops.aten.max_pool2d_with_indices(x, *WINDOWS["resnet"])
    grad, weight, mean = torch.randn(y.shape).to(**shape), torch.rand(16) + 0.5, torch.rand(16)

    def gradients(grad: Tensor, indices: Tensor, x: Tensor, weight: Tensor, mean: Tensor) -> Any:
        passed = torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *WINDOWS["resnet"], indices)
        passed = torch.ops.aten.threshold_backward(passed, x, 0)
        norm = torch.ops.aten.native_batch_norm_backward
        return norm(passed, x, weight, None, None, mean, weight, True, 1e-5, [True, True, True])

    made = check(gradients, grad, indices, x, weight, mean, count=3, tuning=SPLIT, rtol=1e-3, atol=1e-3)
    assert len(kernels(made)[0].nodes) == 3
    check(gradients, grad, indices, x, weight, mean, count=1, tuning=HOPPER, rtol=1e-3, atol=1e-3)


@last
@pytest.mark.parametrize("name", WINDOWS)
def test_between_forward_and_backward_a_byte_says_which_element_it_was(name: str, channels_last: bool) -> None:
    windows, pool = WINDOWS[name], torch.ops.aten.max_pool2d_with_indices
    x = images(2, 18, 11, 13, channels_last=channels_last)

    def step(x: Tensor) -> list[Tensor]:
        y, indices = pool(x, *windows)
        return [y, torch.ops.aten.max_pool2d_with_indices_backward(y * 2, x, *windows, indices)]

    made = check(step, x, count=2)
    bytes_only = windows[3] == [1, 1]
    assert any("*i8" in dict(step.kernel.signature).values() for step in kernels(made)) == bytes_only
    assert any("*i64" in dict(step.kernel.signature).values() for step in kernels(made)) != bytes_only


def test_channels_side_by_side_are_read_in_vectors() -> None:
    """Not by threads whose elements lie a warp apart, as operands off boundaries are."""
    x = images(2, 32, 11, 13, channels_last=True, dtype=torch.bfloat16)
    (kernel,) = kernels(check(lambda x: torch.ops.aten.max_pool2d_with_indices(x, *WINDOWS["resnet"]), x, count=1))
    assert "multiple_of(tl.arange" not in kernel.kernel.source
