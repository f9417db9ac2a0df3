"""cuDNN's fused convolutions, in steps where cuDNN has no engine for a size. Imports torch only.

Which sizes, layouts and types cuDNN can do in one kernel it tells only when it is asked to; `barriers.passes.conv_bias` keeps to
those that it is known for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NO_ENGINE = "unable to find an engine"
"""What PyTorch says then."""


def relu_apart(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """`aten::cudnn_convolution_relu` as two ops. ``rest``: stride, padding, dilation, groups."""
    return torch.conv2d(x, weight, bias, *rest).relu_()


def sum_apart(x: Tensor, weight: Tensor, other: Tensor, alpha: Any, bias: Tensor | None, *rest: Any) -> Tensor:
    """`aten::cudnn_convolution_add_relu` as three."""
    return torch.conv2d(x, weight, bias, *rest).add_(other, alpha=1 if alpha is None else alpha).relu_()


APART = {"aten::cudnn_convolution_relu": relu_apart, "aten::cudnn_convolution_add_relu": sum_apart}


def or_apart(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, an op of the name ``target``, or what does its work where cuDNN can't: from then on without trying."""
    if target not in APART:
        return function
    able = True

    def run(*args: Any, **named: Any) -> Any:
        nonlocal able
        if able:
            try:
                return function(*args, **named)
            except RuntimeError as error:
                if NO_ENGINE not in str(error):
                    raise
                able = False
        return APART[target](*args, **named)

    return run
