"""Rows that a multiprocessor's cache holds while they are walked twice: numbers, and which kernels are made so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Iterator

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, check, kernels, record
from long_rows import inputs, loss, softmax, spilled
from torch import Tensor

from codegen import cached_rows, emit, triton_compile
from codegen.cached_rows import REGISTERS
from codegen.fuse import plan
from codegen.kernel import Kernel
from codegen.tuning import HOPPER
from ir_nodes import settings

ROWS = 3
FEW = replace(HOPPER, few=ROWS - 1)
MANY = 16
"""So many rows that each is one program's where the machine is as small as this."""
WHOLE = replace(HOPPER, few=MANY - 1, programs=2)


@pytest.fixture(autouse=True)
def others_are_not_faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Some of these rows would be held by programs, see test_codegen_held_rows.py, and so few long ones shared."""
    for name in ("ALONE", "SEVERAL"):
        monkeypatch.setattr(cached_rows, name, {2: (), 4: ()})
    with settings.override(disable="long_norms"):
        yield


def cached(x: Tensor, target: Tensor, program: object = loss, tuning: object = FEW) -> list[Kernel]:
    recording, _ = record(program, x, target)  # type: ignore[arg-type]
    return [step.kernel for step in kernels(plan(recording.graph, tuning=tuning)) if step.kernel.registers]  # type: ignore[arg-type]


def one_of_many(program: object, dtype: torch.dtype, extent: int) -> Kernel:
    """The kernel where there are enough rows for a program each."""
    (kernel,) = cached(torch.empty(MANY, extent, dtype=dtype), torch.zeros(MANY, dtype=torch.long), program, WHOLE)
    return kernel


@pytest.mark.parametrize(("extent", "warps"), [(16_400, 8), (18_432, 8), (20_001, 8), (24_584, 8), (30_528, 8), (50_257, 16),
                                               (50_264, 16), (65_536, 16)])
def test_a_loss_and_its_gradient(extent: int, warps: int) -> None:
    x, target = inputs(extent)
    check(loss, x, target, tuning=FEW)
    (kernel,) = cached(x, target)
    assert kernel.num_warps == warps and dict(kernel.constexprs)["B1"] == warps * 256


@pytest.mark.parametrize("extent", [6 * 2048 + 8, *range(7 * 2048 - 8, 9 * 2048, 2040), 8 * 2048 + 1, 7 * 2048 + 7, 8 * 2048 - 1])
def test_few_blocks_behind_those_that_registers_hold(extent: int) -> None:
    x, target = inputs(extent)
    assert cached(x, target)
    check(loss, x, target, tuning=FEW)


@pytest.mark.parametrize("offset", range(8))
def test_as_many_blocks_are_held_as_leave_whole_steps(offset: int) -> None:
    """Rows of any length are walked in steps of four blocks, with none left over but where a row begins far behind a boundary."""
    extent = 20_000 + 2_048 * (offset % 4) + offset // 4
    (kernel,) = cached(*inputs(extent))
    held, first = len(set(re.findall(r"_held\d+", kernel.source))), extent % 8 > 0
    assert 3 <= held <= 6 and ((extent - 1) // 2_048 - first - held) % 4 == 0


@pytest.mark.parametrize(("program", "dtype", "extent", "warps", "held"), [
    (loss, torch.float32, 128_256, 32, 7), (softmax, torch.float32, 50_257, 32, 7), (softmax, torch.bfloat16, 65_536, 16, 7),
    (softmax, torch.bfloat16, 128_256, 32, 7), (loss, torch.bfloat16, 128_256, 32, 7), (loss, torch.bfloat16, 151_936, 32, 6),
    (loss, torch.bfloat16, 256_000, 32, 7), (softmax, torch.float32, 256_000, 32, 6)])
def test_long_rows_leave_more_to_registers(program: object, dtype: torch.dtype, extent: int, warps: int, held: int) -> None:
    """As much as there is room for beside what is computed; where rows are longer than the cache, too."""
    kernel = one_of_many(program, dtype, extent)
    assert kernel.num_warps == warps and f"_held{held - 1} = " in kernel.source and f"_held{held} = " not in kernel.source


@pytest.mark.parametrize("extent", [50_257, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", [loss, softmax])
def test_registers_have_room_for_what_is_held(program: object, dtype: torch.dtype, extent: int, tmp_path: Path) -> None:
    """On an H200 a loss of 50,257 in bfloat16 takes 441 us with three blocks held, 424 with seven and 12 bytes that spill."""
    stored, told = spilled(one_of_many(program, dtype, extent), tmp_path)
    assert stored <= 12, told


@pytest.mark.parametrize("program", [loss, softmax])
def test_rows_just_longer_than_two_programs_have_room_for(program: object) -> None:
    """They are eight blocks, less the one that lies off a boundary: fewer than what is held and what is loaded together."""
    assert {one_of_many(program, torch.bfloat16, extent).num_warps for extent in range(71_001, 75_000, 500)} == {16, 32}


def test_what_is_held_does_not_wait_for_a_rows_index() -> None:
    (kernel,) = cached(*inputs(50_264))
    lines = kernel.source.splitlines()
    held = max(number for number, line in enumerate(lines) if "_held" in line and "tl.load(" in line)
    picks = min(number for number, line in enumerate(lines) if "device_assert" in line)
    assert held < picks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_floats(dtype: torch.dtype) -> None:
    x, target = inputs(50_264, dtype)
    check(loss, x, target, tuning=FEW, rtol=1e-3 if dtype is torch.float16 else 2e-5, atol=1e-6)
    (kernel,) = cached(x, target)
    assert ("_as_loaded(" in kernel.source) == (dtype is torch.float16) and kernel.num_warps == 8 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_softmax(dtype: torch.dtype) -> None:
    x, target = inputs(32_000 if dtype is torch.bfloat16 else 50_264, dtype)
    check(softmax, x, target, tuning=FEW, count=1)
    assert len(cached(x, target, softmax)) == 1


def test_only_sums_of_float32_take_the_fast_exponential() -> None:
    """Its error grows with how far below the maximum a term is, which vanishes in a sum, and not in a gradient or a softmax."""
    x, target = inputs(50_264, torch.float32)
    (kernel,) = cached(x, target)
    sums, others = "libdevice.fast_expf(t", "libdevice.exp(t"
    lines = kernel.source.splitlines()
    assert any("_each += " + sums in line for line in lines) and any(" = " + others in line for line in lines)
    assert not any("_each += " + others in line or re.search(r"t\d+ = " + re.escape(sums), line) for line in lines)
    double, _ = record(lambda x: F.log_softmax(x, 1), torch.empty(MANY, 60_000, dtype=torch.float64))
    source = "".join(step.kernel.source for step in kernels(plan(double.graph, tuning=WHOLE)))
    assert "libdevice.exp(" in source and "fast_expf" not in source


def test_what_is_computed_of_logits_is_computed_once_a_walk() -> None:
    """Sums of what is loaded, of several blocks at a time, share a maximum; what is computed of it goes block by block."""

    def capped(x: Tensor, target: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = F.cross_entropy(torch.tanh(leaf.float() / 30) * 30, target)
        (grad,) = torch.autograd.grad(out, leaf)
        return [out.detach(), grad]

    x, target = inputs(20_000)
    check(capped, x, target, tuning=FEW, rtol=2e-2, atol=1e-6)
    check(loss, x, target, tuning=FEW)
    (kernel,) = cached(x, target)
    held = len(set(re.findall(r"_held\d+", kernel.source)))
    assert kernel.source.count("_high = _max_bf16(") == (4 - 1) + (held - 1) and kernel.source.count("_near = ") == 2

    def halved(x: Tensor, target: Tensor) -> Tensor:
        return (torch.tanh(x.float() / 30) * 30).softmax(1).to(x.dtype)

    check(halved, x, target, tuning=FEW, rtol=2e-2, atol=1e-6)
    sources = [kernel.source for kernel in cached(x, target, halved)]
    assert sources and all("_held0" in source and "_near = " not in source for source in sources)


def test_infinite_and_nan_logits() -> None:
    x, target = inputs(20_000)
    x[0, :4_000], x[1, 7], x[2] = float("-inf"), float("nan"), float("-inf")
    target[0] = 19_999
    check(loss, x, target, tuning=FEW)


def test_a_target_that_is_ignored_and_logits_that_are_overwritten() -> None:
    def program(x: Tensor, target: Tensor) -> list[Tensor]:
        logits = x * 2
        out, grad = loss(logits, target)
        logits.copy_(grad)
        return [out, logits]

    x, target = inputs(20_000)
    target[1] = -100
    check(program, x, target, tuning=FEW)


@pytest.mark.parametrize("extent", [20_000, 20_001])
def test_indices_of_64_bits(extent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "INT32_LIMIT", 4)
    x, target = inputs(extent)
    (kernel,) = cached(x, target)
    assert ".to(tl.int64)" in kernel.source
    check(loss, x, target, tuning=FEW)


@pytest.mark.parametrize("extent", [16_400, 50_264])
def test_machine_code(extent: int) -> None:
    """No memory of loads ahead, so that the cache has it; registers for as many rows as the cache holds."""
    (kernel,) = cached(*inputs(extent))
    built = triton_compile.compile_for_hopper(kernel, CACHE)
    assert f".maxnreg {REGISTERS}" in built.handle.asm["ptx"] and built.shared <= 256
    assert "L1::evict_last" in built.handle.asm["ptx"] and "cp.async" not in built.handle.asm["ptx"]


def test_results_stay_out_of_the_way_where_there_are_many() -> None:
    (few,), (many,) = cached(*inputs(20_000)), cached(*inputs(20_000, rows=1_000))
    assert '".cs"' in many.source and '".cs"' not in few.source


def test_who_is_not_made_so() -> None:
    x, target = inputs(20_000)
    assert cached(x, target)
    assert not cached(x, target, tuning=HOPPER), "three programs leave the machine idle, whose time is that of one"
    assert not cached(x[:, :19_992], target // 2), "results whose rows lie closer together"
    many = torch.zeros(MANY, dtype=torch.long)
    assert cached(torch.empty(MANY, 500_000, dtype=torch.bfloat16), many, tuning=WHOLE)
    assert not cached(torch.empty(MANY, 600_000, dtype=torch.bfloat16), many, tuning=WHOLE), "several times as long as the cache"
    assert not cached(*inputs(12_288)), "registers hold it"
    assert not cached(*inputs(16_384), softmax), "registers hold two of them"
    assert cached(x, target, softmax) and not cached(x, target, lambda x, target: (x + x.flip(0)).softmax(1)), "two operands"
    assert not cached(x, target, lambda x, target: x.float().softmax(1)), "results wider than what is read"
    with settings.override(disable="cached_rows"):
        assert not cached(x, target)
