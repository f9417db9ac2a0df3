"""Rows whose one element that differs is stored behind the others: numbers, and which kernels are made so."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record
from long_rows import inputs, loss
from torch import Tensor

from codegen import apart
from codegen.fuse import plan
from codegen.kernel import Kernel
from codegen.tuning import HOPPER
from ir_nodes import settings

FEW = replace(HOPPER, few=2, programs=2)
PLAIN = replace(FEW, cached=0, clusters=0)
ASKED, APART = re.compile(r"tl\.where\(.*== t\d+"), re.compile(r"tl\.store\(p\d+ \+ .* \+ (t\d+), t\d+, mask=.*\1 >= 0")

Loss = Callable[[Tensor, Tensor], list[Tensor]]


def gradient(of: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    def program(x: Tensor, target: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = of(leaf, target)
        return [out.detach(), *torch.autograd.grad(out, leaf)]

    return program


weighted = gradient(lambda x, t: F.cross_entropy(x.float(), t, torch.linspace(0.5, 2, x.shape[1])))
summed = gradient(lambda x, t: F.cross_entropy(x.float(), t, reduction="sum"))
smoothed = gradient(lambda x, t: F.cross_entropy(x.float(), t, label_smoothing=0.1))
capped = gradient(lambda x, t: F.cross_entropy(torch.tanh(x.float() / 30) * 30, t))
transposed = gradient(lambda x, t: F.cross_entropy(x.float().t(), t))


def made(program: Loss, x: Tensor, target: Tensor, tuning: object = FEW) -> Kernel:
    """The kernel that stores a gradient."""
    recording, _ = record(program, x, target)
    found = [step.kernel for step in kernels(plan(recording.graph, tuning=tuning)) if "backward" in step.kernel.name]  # type: ignore[arg-type]
    return found[-1]


@pytest.mark.parametrize("tuning", [FEW, PLAIN])
@pytest.mark.parametrize(("extent", "dtype"), [(12_296, torch.bfloat16), (24_577, torch.float32), (30_523, torch.bfloat16),
                                               (50_257, torch.float32)])
def test_no_element_asks_whether_it_is_the_one(extent: int, dtype: torch.dtype, tuning: object) -> None:
    x, target = inputs(extent, dtype)
    with settings.override(disable="long_norms"):  # programs would share so few rows
        source = made(loss, x, target, tuning).source
        check(loss, x, target, tuning=tuning, rtol=1.6e-2 if dtype is torch.bfloat16 else 2e-5, atol=1e-6)  # type: ignore[arg-type]
    assert not ASKED.search(source) and len(APART.findall(source)) == 1
    assert source.rindex("tl.debug_barrier()") < APART.search(source).start()  # type: ignore[union-attr]
    with settings.override(disable=frozenset({"long_norms", "stores_apart"})):
        source = made(loss, x, target, tuning).source
        assert ASKED.search(source) and not APART.search(source)


each = gradient(lambda x, t: (F.cross_entropy(x.float(), t, reduction="none") * torch.linspace(0, 1, len(t))).sum())


@pytest.mark.parametrize("program", [weighted, summed, smoothed, capped, each])
def test_other_losses(program: Loss) -> None:
    x, target = inputs(20_001)
    check(program, x, target, tuning=FEW, rtol=2e-2, atol=1e-5, extern=None)


def test_rows_that_lie_across_memory() -> None:
    x, target = inputs(24_600, torch.float32, rows=40)
    x = x.t().contiguous()
    assert APART.search(made(transposed, x, target).source)
    check(transposed, x, target, tuning=FEW, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("tuning", [FEW, PLAIN])
def test_targets_that_are_ignored(tuning: object) -> None:
    x, target = inputs(20_001)
    target[1] = -100
    check(loss, x, target, tuning=tuning)  # type: ignore[arg-type]


def test_short_rows_ask() -> None:
    """A barrier and an element that is loaded by itself would cost more."""
    for extent, dtype in ((1_000, torch.bfloat16), (12_288, torch.bfloat16), (24_576, torch.float32)):
        x, target = inputs(extent, dtype, rows=64)
        source = made(loss, x, target, HOPPER).source
        assert ASKED.search(source) and not APART.search(source)


def test_a_block_of_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "HELD", {(4, True): 1})
    for extent in (64, 250):
        x, target = inputs(extent, torch.float32, rows=37)
        assert APART.search(made(loss, x, target, HOPPER).source)
        check(loss, x, target, rtol=2e-5, atol=1e-6)


def test_what_is_summed_beside_is_not_changed() -> None:
    """A gradient whose columns are summed in the same kernel, or whose elements are used again, keeps its one element."""

    def program(x: Tensor, target: Tensor) -> list[Tensor]:
        _, grad = loss(x, target)
        return [grad, grad.float().abs().sum(1), (grad.float() * 2).sum(0)]

    x, target = inputs(12_296)
    check(program, x, target, tuning=FEW, rtol=2e-2, atol=1e-5)
