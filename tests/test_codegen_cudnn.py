"""Where cuDNN has no engine for a fused convolution, its parts run one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen import cudnn
from tests.cudnn_ops import with_relu, with_sum

SIZES: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], 1)


def test_parts_give_what_the_whole_gives() -> None:
    x, weight, bias, other = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(cudnn.relu_apart(x, weight, bias, *SIZES), with_relu(x, weight, bias, *SIZES))
    wanted = with_sum(x, weight, other, 2.0, None, *SIZES)
    torch.testing.assert_close(cudnn.sum_apart(x, weight, other, 2.0, None, *SIZES), wanted)


def test_what_has_no_engine_is_asked_once() -> None:
    asked = []

    def refuses(*args: Any) -> torch.Tensor:
        asked.append(args)
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    x, weight = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)
    run = cudnn.or_apart("aten::cudnn_convolution_relu", refuses)
    for _ in range(3):
        torch.testing.assert_close(run(x, weight, None, *SIZES), with_relu(x, weight, None, *SIZES))
    assert len(asked) == 1


def test_other_errors_and_other_ops_stay_as_they_are() -> None:
    def fails(*args: Any) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory"):
        cudnn.or_apart("aten::cudnn_convolution_relu", fails)()
    assert cudnn.or_apart("aten::zeros", fails) is fails
