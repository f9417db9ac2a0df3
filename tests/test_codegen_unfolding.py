"""`torch.nn.Unfold`, `torch.nn.Fold` and `torch.Tensor.unfold` with their gradients against eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels
from torch import Tensor

import lazy_backend  # noqa: F401  registers the device

WINDOWS = {  # kernel, dilation, padding, stride
    "three": ([3, 3], [1, 1], [1, 1], [1, 1]),
    "three, every other": ([3, 3], [1, 1], [1, 1], [2, 2]),
    "side by side": ([4, 4], [1, 1], [0, 0], [4, 4]),
    "uneven": ([3, 2], [1, 2], [1, 0], [2, 1]),
    "dilated and apart": ([3, 3], [2, 2], [1, 1], [2, 2]),
    "apart": ([2, 2], [1, 1], [1, 1], [3, 3]),
    "no padding": ([3, 3], [1, 1], [0, 0], [1, 1]),
    "few of many": ([4, 4], [1, 1], [1, 1], [2, 2]),
}
ops = torch.ops.aten
last = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])


def images(*size: int, channels_last: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    return made.to(memory_format=torch.channels_last) if channels_last else made


@last
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_their_sums_equal_eager(name: str, channels_last: bool) -> None:
    windows = WINDOWS[name]
    dtype = torch.bfloat16 if name.startswith("three") else torch.float32
    x = images(2, 5, 16, 12, channels_last=channels_last, dtype=dtype)
    check(lambda x: ops.im2col(x, *windows), x, count=1)
    columns = ops.im2col(x, *windows)
    check(lambda columns: ops.col2im(columns, [16, 12], *windows), columns, count=1, rtol=2e-2, atol=2e-2)


def test_one_image_without_a_batch() -> None:
    windows = WINDOWS["three, every other"]
    check(lambda x: ops.im2col(x, *windows), images(3, 9, 10), count=1)
    check(lambda x: ops.col2im(ops.im2col(x, *windows), [9, 10], *windows), images(3, 9, 10))


def test_an_image_that_windows_do_not_fill() -> None:
    """Rows and columns behind the last window are zero."""
    columns = images(2, 3 * 4, 9)
    check(lambda columns: ops.col2im(columns, [7, 7], [2, 2], [1, 1], [0, 0], [2, 2]), columns, count=1)


@pytest.mark.parametrize(("dim", "size", "step"), [(1, 3, 1), (2, 4, 2), (-1, 5, 5), (0, 1, 1), (1, 2, 3), (2, 12, 8)])
def test_the_gradient_of_a_series_windows(dim: int, size: int, step: int) -> None:
    x = images(4, 9, 13)
    grad = images(*x.unfold(dim, size, step).shape)
    check(lambda grad: ops.unfold_backward(grad, list(x.shape), dim, size, step), grad, count=1)


def test_elements_of_many_windows_stay_with_aten() -> None:
    made = check(lambda grad: ops.unfold_backward(grad, [64], 0, 30, 1), images(35, 30), extern=1)
    assert "more than 27 windows" in made.steps[0].reason  # type: ignore[union-attr]


def test_what_follows_reads_the_image_itself() -> None:
    """Attention over windows sorts its columns another way: they are not stored in between."""

    def sorted_anew(x: Tensor) -> Tensor:
        columns = ops.im2col(x, *WINDOWS["three, every other"]).view(2, 4, 8, 9, -1)
        return columns.permute(0, 1, 4, 3, 2).clone(memory_format=torch.contiguous_format)

    made = check(sorted_anew, images(2, 32, 12, 12), count=1)
    (kernel,) = kernels(made)
    assert [node.name for node in kernel.nodes] == ["im2col", "clone"]


def test_windows_of_channels_side_by_side_are_turned_in_squares() -> None:
    """Also where rows of windows are short: several of them are one side of the square."""
    x = images(2, 32, 12, 12, channels_last=True)
    (kernel,) = kernels(check(lambda x: ops.im2col(x, *WINDOWS["three, every other"]), x, count=1))
    assert "[:, None]" in kernel.kernel.source and "i1 // " not in kernel.kernel.source.split("m1 =")[0]
    (kernel,) = kernels(check(lambda x: ops.im2col(x, *WINDOWS["three"]), x, count=1))
    assert "[:, None]" in kernel.kernel.source


@pytest.mark.parametrize("padding", [0, 1])
def test_modules_on_the_device(padding: int) -> None:
    def both(x: Tensor) -> tuple[Tensor, Any]:
        x = x.requires_grad_()
        unfold = torch.nn.Unfold(3, padding=padding, stride=2)
        fold = torch.nn.Fold((13, 13), 3, padding=padding, stride=2)
        loss = (fold(unfold(x * 2).tanh()) * x).sum() + F.unfold(x, 2).square().mean()
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    x = images(2, 4, 13, 13)
    found = both(x.to("lazysched"))
    for one, other in zip(found, both(x)):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
