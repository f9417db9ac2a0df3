"""What cuDNN's fused convolutions compute, as CPU kernels for tests without a GPU. Imports torch only.

They round where eager mode does; cuDNN rounds once, at the end.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

Sizes = Sequence[int]


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:  # fmt: skip
    return torch.ops.aten.convolution.default(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def with_relu(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return convolved(x, weight, bias, *rest).relu()


def with_sum(x: Tensor, weight: Tensor, other: Tensor, alpha: Any, bias: Tensor | None, *rest: Any) -> Tensor:
    return convolved(x, weight, bias, *rest).add(other, alpha=1 if alpha is None else alpha).relu()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The fused ops have CPU kernels."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cudnn_convolution_relu", with_relu, "CPU")
        library.impl("cudnn_convolution_add_relu", with_sum, "CPU")
        yield


@contextlib.contextmanager
def flag(name: str, value: bool) -> Iterator[None]:
    """A switch of ``torch.backends.cudnn``, also where PyTorch's own test suites, in this process, have locked them."""
    cudnn = torch.backends.cudnn
    with torch.backends.__allow_nonbracketed_mutation():
        before = getattr(cudnn, name)
        setattr(cudnn, name, value)
    try:
        yield
    finally:
        with torch.backends.__allow_nonbracketed_mutation():
            setattr(cudnn, name, before)
