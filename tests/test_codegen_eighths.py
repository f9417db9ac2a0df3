"""8-bit floats are cast and copied in kernels, to ATen's bits."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
from graphs import compare, compile_all, kernels, record
from torch import Tensor

import lazy_backend
from codegen import eighths
from codegen.fuse import plan
from codegen.tuning import INTERPRETER
from tests.device import DEVICE

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]


def numbers() -> Tensor:
    """Ordinary, small and large ones, those half way between two, and those that are none."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1500, generator=generator) * torch.logspace(-6, 6, 1500)
    every = torch.arange(256, dtype=torch.uint8)
    steps = torch.cat([every.view(kind).float() for kind in KINDS])
    halves = (steps + torch.cat([steps[1:], steps[:1]])) / 2
    special = torch.tensor([0.0, -0.0, 464.0, 464.1, 61439.0, 61440.0, 1e9, float("inf"), float("-inf"), 2.0**-10, 1e-30, -1e-45])
    return torch.cat([drawn, steps, halves, special])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("program", [
    lambda x, kind: x.to(kind),
    lambda x, kind: (x * 2).to(torch.bfloat16).to(kind),
    lambda x, kind: x.to(kind).float() + 1,
    lambda x, kind: torch.cat((x.to(kind), x.neg().to(kind))),
    lambda x, kind: (x.view(4, -1) / x.view(4, -1).abs().nan_to_num(1, 1, 1).amax(1, keepdim=True)).to(kind).t().contiguous(),
    lambda x, kind: x.to(kind).clone(),
], ids=["cast", "rounded", "back", "joined", "scaled", "copied"])  # fmt: skip
def test_casts_are_in_kernels(program: Callable[[Tensor, torch.dtype], Tensor], kind: torch.dtype) -> None:
    recording, outs = record(lambda x: [program(x, kind)], numbers())
    made = plan(recording.graph, tuning=INTERPRETER)
    assert len(kernels(made)) == len(made.steps) > 0
    compare(recording, made, outs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_byte(kind: torch.dtype) -> None:
    recording, outs = record(lambda x: [x.float(), x.to(torch.bfloat16)], torch.arange(256, dtype=torch.uint8).view(kind))
    compare(recording, plan(recording.graph, tuning=INTERPRETER), outs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("beyond", ["448.0", 'float("nan")'])
def test_kernels_for_hopper_compile(kind: torch.dtype, beyond: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eighths, "BEYOND", beyond)
    recording, _ = record(lambda x: [x.to(kind), x.to(kind).float() * 2], numbers())
    compile_all(plan(recording.graph))


@pytest.mark.parametrize("program, by_instruction", [
    (lambda x: [x.to(torch.float8_e4m3fn)], True),
    (lambda x: [x.to(torch.float8_e4m3fn).float() * 2], False),
    (lambda x: [x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn).float() * 2], False),
], ids=["stored", "computed with", "both"])  # fmt: skip
def test_what_the_gpu_rounds_is_stored_and_not_computed_with(program: Callable[[Tensor], list[Tensor]],
                                                             by_instruction: bool) -> None:  # fmt: skip
    """ptxas reads another register for a byte of a pair that is stored with its neighbours, too."""
    recording, _ = record(program, numbers())
    (step,) = kernels(plan(recording.graph))
    assert ("float8e4nv" in step.kernel.source) is by_instruction


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares with the GPU's own casts")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes_and_numbers_of_one_kernel_on_the_gpu(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(1 << 16, generator=generator) * torch.logspace(-6, 6, 1 << 16)).cuda()
    wanted, mine = x.to(kind), (x.to(DEVICE) * 1.0).to(kind)
    numbers_of_mine = mine.float()
    lazy_backend.mark_step()
    torch.testing.assert_close(numbers_of_mine.cpu(), wanted.float().cpu(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mine.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))
