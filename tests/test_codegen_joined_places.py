"""Parts of concatenations that their makers store into place, and windows that load what is stored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels

from ir_nodes import settings


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, -1])
def test_gradients_of_chunks_are_stored_by_the_kernel_that_makes_them(dim: int, dtype: torch.dtype) -> None:
    def gated(x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        gate, value = x.chunk(2, dim)
        act, slope = torch.sigmoid(gate), grad * value
        return [act * value, torch.cat([slope * act * (1 - act), grad * act], dim)]

    x, grad = data(4, 12, 32, dtype=dtype), data(4, 12, 32, dtype=dtype, seed=1).chunk(2, dim)[0].contiguous()
    made = check(gated, x, grad, count=1, rtol=2e-2, atol=2e-2)
    assert len(kernels(made)[0].reads) == 2
    with settings.override(disable=frozenset(("stored_by_makers",))):
        check(gated, x, grad, count=2, rtol=2e-2, atol=2e-2)


def test_what_is_read_element_by_element_is_joined_where_it_is_read() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first.relu()], -1) * x

    check(turned, data(6, 8, 32), count=1)
    check(lambda x: torch.cat([x + 1, x * 2], -1).softmax(-1), data(6, 40), count=1, rtol=1e-5, atol=1e-6)


def test_gradients_of_an_images_edges_load_what_is_stored() -> None:
    """Nine windows of two products: each would load what the products are made of, three operands, wherever it is."""

    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        slope, total = x * y * z, torch.zeros(4, 20, 20)
        for down in range(3):
            for across in range(3):
                total = total + F.pad(slope, (down, 2 - down, across, 2 - across))
        return total

    made = check(program, *(data(4, 18, 18, seed=i) for i in range(3)), rtol=1e-5, atol=1e-5)
    assert len(kernels(made)) == 2 and len(kernels(made)[-1].reads) == 1
