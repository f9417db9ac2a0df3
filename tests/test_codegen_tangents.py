"""A hyperbolic tangent takes few instructions where 16 bits hold whatever becomes of it, and is exact elsewhere."""

from __future__ import annotations

import math
from typing import Any, Callable

import pytest
import torch
from graphs import buffer_of, check, execute, kernels, record, typed
from torch import Tensor

from codegen.fuse import plan

BF16 = torch.bfloat16


def gelu(x: Tensor) -> Tensor:
    """As GPT-2 writes it, under autocast: float32 inside, from 16 bits to 16 bits."""
    wide = x.float()
    return (0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(wide, 3.0))))).to(x.dtype)


def gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    wide = x.float()
    bent = torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(wide, 3.0)))
    inner = torch.ops.aten.tanh_backward(grad.float() * (0.5 * x), bent) * math.sqrt(2.0 / math.pi)
    return (inner.to(BF16) + (grad * (1.0 + bent) * 0.5).to(BF16)).to(BF16)


def sources(program: Callable[..., Any], *inputs: Tensor) -> str:
    return "".join(step.kernel.source for step in kernels(plan(record(program, *inputs)[0].graph)))


def ran(program: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What the program's kernels make of ``x``."""
    recording, (out,) = record(program, x)
    index = buffer_of(recording, recording.expected, out)
    assert index is not None
    return typed(execute(recording, plan(recording.graph))[index], out)


def is_rough(program: Callable[..., Any], *inputs: Tensor) -> bool:
    text = sources(program, *inputs)
    assert ("= _tanh_16(" in text) != ("= _tanh(" in text), "all of a kernel's tangents are alike here"
    return "= _tanh_16(" in text


def rows(dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(64, 256).to(dtype)


@pytest.mark.parametrize("program, count", [(gelu, 1), (gelu_gradient, 2), (torch.tanh, 1),
                                            (lambda x: (x.float().tanh() * 3.0 + 0.5).to(BF16), 1)])
def test_what_is_only_rounded_is_rough(program: Callable[..., Any], count: int) -> None:
    assert is_rough(program, *[rows() for _ in range(count)])


@pytest.mark.parametrize("program", [
    lambda x: torch.tanh(x.float()),  # float32 goes to memory
    lambda x: (torch.tanh(x.float()) - x.float()).to(BF16),  # all but the error may cancel
    lambda x: (torch.tanh(x.float()) + torch.tanh(2 * x.float())).to(BF16),
    lambda x: torch.tanh(x.float()).sum(1).to(BF16),
    lambda x: (1.0 / torch.tanh(x.float())).to(BF16),
    lambda x: (torch.tanh(x.float()) > 0.5).to(BF16),
    lambda x: (torch.tanh(x.float()).to(BF16), torch.tanh(x.float()).exp()),  # one of two users would see it
    lambda x: torch.ops.aten.tanh_backward(torch.tanh(x.float()), x.float()).to(BF16),
])  # fmt: skip
def test_what_would_show_the_error_is_exact(program: Callable[..., Any]) -> None:
    assert not is_rough(program, rows())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_every_number_of_16_bits_has_its_tangent(dtype: torch.dtype) -> None:
    """As near to float64's as rounding to 16 bits leaves it, but for one in a thousand that lies between two."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    found = ran(torch.tanh, x)
    wanted = x.double().tanh()
    torch.testing.assert_close(found.double(), wanted, rtol=1.02 * torch.finfo(dtype).eps / 2, atol=1e-7, equal_nan=True)
    assert (found.eq(wanted.to(dtype)) | x.isnan()).float().mean() > 0.999


def test_gelu_as_gpt2_writes_it_is_as_near_to_float64_as_eager_modes() -> None:
    x = torch.cat([torch.linspace(-7, 7, 8001), torch.linspace(-0.05, 0.05, 999)]).to(BF16)
    found = ran(gelu, x)
    wanted = torch.nn.functional.gelu(x.double(), approximate="tanh")
    away, eagers = ((one.double() - wanted).abs() for one in (found, gelu(x)))
    assert away.max() <= 1.01 * eagers.max() and away.mean() <= 1.01 * eagers.mean()
    check(gelu_gradient, torch.randn(64, 256).to(BF16), rows(), atol=2e-2, rtol=2e-2)
