"""Rows that programs hold in registers block by block, alone or several together: numbers, and which kernels are made so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Iterator

import pytest
import torch
from graphs import CACHE, check, kernels, record
from long_rows import inputs, loss, softmax, spilled
from torch import Tensor

from codegen import cached_rows, emit, triton_compile
from codegen.combo_launches import kernel_key
from codegen.fuse import plan
from codegen.kernel import KernelStep
from codegen.taking_turns import Turns
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

ROWS = 3
FEW = replace(HOPPER, few=ROWS - 1, programs=2)
TOLERANCE = {torch.bfloat16: {}, torch.float16: {"rtol": 1e-3, "atol": 1e-6}, torch.float32: {"rtol": 2e-5, "atol": 1e-6}}
BOTH = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def programs_share_no_rows() -> Iterator[None]:
    """Which they would where there are so few."""
    with settings.override(disable="long_norms"):
        yield


def rows_of(extent: int) -> int:
    """So many that programs would not share them to fill the machine, even where it is as small as here."""
    return 16 if extent > 100_000 else ROWS


def held(program: object, x: Tensor, target: Tensor, tuning: Tuning = FEW) -> list[KernelStep]:
    recording, _ = record(program, x, target)  # type: ignore[arg-type]
    return [step for step in kernels(plan(recording.graph, tuning=tuning)) if "_held" in step.kernel.source]


def empty(program: object, extent: int, dtype: torch.dtype, tuning: Tuning = FEW) -> KernelStep:
    rows = rows_of(extent)
    (step,) = held(program, torch.empty(rows, extent, dtype=dtype), torch.zeros(rows, dtype=torch.long), tuning)
    return step


@pytest.mark.parametrize(("dtype", "extent", "programs"), [
    (torch.bfloat16, 20_000, 1), (torch.bfloat16, 20_001, 1), (torch.bfloat16, 32_761, 1), (torch.float16, 32_768, 1),
    (torch.float32, 50_257, 2), (torch.float32, 53_248, 2), (torch.float32, 53_249, 3)])
@pytest.mark.parametrize("program", [loss, softmax])
def test_numbers(program: object, dtype: torch.dtype, extent: int, programs: int) -> None:
    x, target = inputs(extent, dtype)
    (step,) = held(program, x, target)
    assert step.kernel.cluster == programs
    check(program, x, target, tuning=FEW, **TOLERANCE[dtype])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("programs", [3, 5, 8])
@pytest.mark.parametrize("full", ["on boundaries", "off boundaries", "hardly"])
def test_numbers_of_many_small_programs(full: str, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one warp, which holds four blocks: rows that fill them, and rows of which the last has but a few elements."""
    monkeypatch.setattr(cached_rows, "HELD", dict.fromkeys(cached_rows.HELD, 256))
    monkeypatch.setattr(cached_rows, "ALONE", {2: (), 4: ()})
    monkeypatch.setattr(cached_rows, "SEVERAL", {width: ((1, 4, 128),) for width in (2, 4)})
    vector = 16 // dtype.itemsize
    room = 4 * 32 * vector
    extent = room * programs - {"on boundaries": 0, "off boundaries": vector - 1, "hardly": room - vector}[full]
    x, target = inputs(extent, dtype)
    tuning = replace(FEW, cached=0)
    assert [step.kernel.cluster for step in held(loss, x, target, tuning)] == [programs]
    check(loss, x, target, tuning=tuning, **TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "extent", "warps", "programs"), [
    (torch.bfloat16, 20_000, 8, 1), (torch.bfloat16, 32_761, 8, 1), (torch.float16, 170_001, 4, 7),
    (torch.bfloat16, 170_008, 4, 7), (torch.bfloat16, 256_000, 8, 7), (torch.float32, 50_257, 8, 2),
    (torch.float32, 128_256, 8, 5), (torch.float32, 212_988, 8, 8), (torch.float32, 256_000, 16, 5)])
@pytest.mark.parametrize("program", [loss, softmax])
def test_how_many_programs_hold_a_row(program: object, dtype: torch.dtype, extent: int, warps: int, programs: int) -> None:
    step = empty(program, extent, dtype)
    assert (step.kernel.num_warps, step.kernel.cluster, step.grid) == (warps, programs, (rows_of(extent) * programs, 1, 1))


@pytest.mark.parametrize(("dtype", "extent"), [(torch.bfloat16, 20_001), (torch.float32, 60_001)])
def test_infinite_and_nan_logits(dtype: torch.dtype, extent: int) -> None:
    x, target = inputs(extent, dtype)
    x[0, :4_000], x[1, 7], x[2] = float("-inf"), float("nan"), float("-inf")
    target[0] = extent - 1
    check(loss, x, target, tuning=FEW, **TOLERANCE[dtype])


@pytest.mark.parametrize("last", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("program", [loss, softmax])
def test_exponentials_take_the_places_of_elements(program: object, last: float) -> None:
    """Each is computed once, relative to what a thread has, also where that is nothing or far below the row's maximum."""
    extent = 60_000
    x, target = inputs(extent, torch.float32)
    x[0, :40_000], x[1], x[1, 6], x[2, 7] = float("-inf"), -300.0, 100.0, last
    source = empty(program, extent, torch.float32).kernel.source
    check(program, x, target, tuning=FEW, **TOLERANCE[torch.float32])  # type: ignore[arg-type]
    x[2] = float("-inf")
    check(program, x, target, tuning=FEW, **TOLERANCE[torch.float32])  # type: ignore[arg-type]
    held = set(re.findall(r"_held\d+", source))
    alone = program is loss  # the target's element, which is stored behind the others
    assert len(held) == 20 and source.count(" = libdevice.exp(") == len(held) + alone and source.count("_shift = ") == 1


def test_elements_that_are_needed_themselves_stay() -> None:
    def program(x: Tensor, target: Tensor) -> list[Tensor]:
        return [x.softmax(1), x.log_softmax(1)]

    x, target = inputs(60_000, torch.float32)
    check(program, x, target, tuning=FEW, **TOLERANCE[torch.float32])
    assert "_shift" not in "".join(step.kernel.source for step in held(program, x, target))


@pytest.mark.parametrize(("dtype", "extent"), [(torch.bfloat16, 20_000), (torch.float32, 60_000)])
def test_a_target_that_is_ignored_and_logits_that_are_overwritten(dtype: torch.dtype, extent: int) -> None:
    """Programs that exchange sums have read what they pick from one another's elements by then."""

    def program(x: Tensor, target: Tensor) -> list[Tensor]:
        logits = x * 2
        out, grad = loss(logits, target)
        logits.copy_(grad)
        return [out, logits]

    x, target = inputs(extent, dtype)
    target[1] = -100
    # A sum in eager mode on a CPU is 6e-5 away from that of float64 here.
    check(program, x, target, tuning=FEW, **({"rtol": 1e-4, "atol": 1e-6} if dtype is torch.float32 else {}))
    source = empty(loss, extent, dtype).kernel.source
    assert source.index("tl.device_assert(") < source.index("_held0 = ") and ("_exchange2(" in source) == (dtype is torch.float32)


@pytest.mark.parametrize("dtype", BOTH)
def test_what_is_computed_of_elements_before_they_are_reduced(dtype: torch.dtype) -> None:
    def program(x: Tensor, target: Tensor) -> Tensor:
        return (torch.tanh(x / 30) * 30).softmax(1)

    x, target = inputs(60_001 if dtype is torch.float32 else 30_001, dtype)
    assert held(program, x, target)
    check(program, x, target, tuning=FEW, **TOLERANCE[dtype])


@pytest.mark.parametrize("extent", [60_000, 60_001])
def test_indices_of_64_bits(extent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "INT32_LIMIT", 4)
    x, target = inputs(extent, torch.float32)
    assert ".to(tl.int64)" in empty(loss, extent, torch.float32).kernel.source
    check(loss, x, target, tuning=FEW, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(("dtype", "extent"), [(torch.bfloat16, 32_000), (torch.bfloat16, 200_000), (torch.bfloat16, 262_144),
                                               (torch.float32, 50_257), (torch.float32, 128_256), (torch.float32, 256_000)])
@pytest.mark.parametrize("program", [loss, softmax])
def test_registers_have_room_for_what_is_held(program: object, dtype: torch.dtype, extent: int, tmp_path: Path) -> None:
    """But for a few of 128 or 168 that a thread has."""
    kernel = empty(program, extent, dtype).kernel
    text = triton_compile.compile_for_hopper(kernel, CACHE).handle.asm["ptx"]
    assert f".maxnreg {kernel.registers}" in text and ("mapa.shared::cluster" in text) == (kernel.cluster > 1)
    stored, told = spilled(kernel, tmp_path)
    assert stored <= 128, told


def test_who_is_not_made_so() -> None:
    target = torch.zeros(ROWS, dtype=torch.long)

    def programs(extent: int, dtype: torch.dtype, tuning: Tuning = FEW, program: object = loss) -> list[int]:
        steps = held(program, torch.empty(ROWS, extent, dtype=dtype), target, tuning)
        return [step.kernel.cluster for step in steps if step.kernel.registers > 64]

    assert programs(60_000, torch.float32) == [3] and programs(20_000, torch.bfloat16) == [1]
    assert not programs(60_000, torch.float32, HOPPER), "three rows leave the machine idle"
    assert not programs(12_288, torch.bfloat16) and not programs(24_576, torch.float32), "registers hold such rows whole"
    assert not programs(50_257, torch.bfloat16) and not programs(32_000, torch.float32), "a cache holds two"
    assert not programs(60_000, torch.float32, replace(FEW, clusters=0)), "programs form no clusters"
    assert not programs(430_000, torch.float32), "too long for a cluster"
    assert not programs(20_000, torch.bfloat16, replace(FEW, packs=False)), "no instruction compares two elements"
    both = lambda x, target: (x.softmax(1), x.softmax(1).sum(1))  # noqa: E731
    assert not programs(60_000, torch.float32, program=both), "another sum"
    with settings.override(disable="held_rows"):
        assert not programs(60_000, torch.float32) and not programs(20_000, torch.bfloat16)


def test_clusters_share_no_launch_with_other_kernels() -> None:
    assert kernel_key(empty(loss, 20_000, torch.bfloat16)) is not None
    assert kernel_key(empty(loss, 60_000, torch.float32)) is None


def test_programs_take_turns() -> None:
    """Each learns what all have told, at each meeting, and is entered again whenever it goes on."""
    log: list[object] = []

    def run(number: int) -> None:
        for meeting in "ab":
            log.append((number, list(turns.meet(f"{meeting}{number}"))))

    turns = Turns(3, run, lambda number: log.append(number))
    turns.all()
    assert [entry for entry in log if isinstance(entry, tuple)] == [
        (number, [f"{meeting}{other}" for other in range(3)]) for meeting, order in (("a", (2, 0, 1)), ("b", (1, 2, 0)))
        for number in order]
    assert log[:3] == [0, 1, 2], "one after the other"


def test_a_program_that_fails_ends_them_all() -> None:
    def run(number: int) -> None:
        turns.meet(number)
        raise IndexError(f"program {number}")

    turns = Turns(2, run, lambda number: None)
    with pytest.raises(IndexError, match="program"):
        turns.all()
