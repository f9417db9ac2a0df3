"""How many programs share a reduction, how far ahead they load, and what they load of the next row themselves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from graphs import check, kernels, record
from long_rows import spilled
from torch import Tensor

from codegen import emit
from codegen.body import Body
from codegen.columns import column_width
from codegen.fuse import plan
from codegen.instructions import FULL
from codegen.kernel import KernelStep
from codegen.row_traits import FILE, MOST_VALUES, narrow, values_at_once
from codegen.shares import alike, divided, steps_ahead, walked_by
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

WALKING = HOPPER.changed("mixed_rows=2,mixed_tile=1,cores=1,split_numel=64,few=0")
"""One multiprocessor, whose programs walk several rows each."""


@pytest.fixture(autouse=True)
def few_rows_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codegen.ahead_source.WORTH", 3)


def data(*size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scaled(g: Tensor, x: Tensor, s: Tensor) -> list[Tensor]:
    """What a norm's gradient does: a row's sum and columns' sums of what is scaled by a number of the row."""
    y = x.float() * s.float()
    inner = (y * g.float()).sum(-1, keepdim=True)
    return [(g.float() - y * inner).to(x.dtype), (y * g.float()).flatten(0, -2).sum(0)]


def first(program: Callable[..., Any], *inputs: Tensor) -> KernelStep:
    """The first kernel for an H200."""
    return kernels(plan(record(program, *inputs)[0].graph, tuning=HOPPER))[0]


def near(program: Callable[..., Any], *inputs: Tensor) -> str:
    """The source of the first kernel, whose numbers agree with ATen's."""
    return kernels(check(program, *inputs, tuning=WALKING, rtol=2e-2, atol=2e-1))[0].kernel.source


def ahead(source: str) -> bool:
    return "ahead = tl.minimum(" in source


@pytest.mark.parametrize("length", [64, 300, 1003])
@pytest.mark.parametrize("rows", [(37,), (5, 9)], ids=str)
def test_a_rows_number_is_loaded_while_the_row_before_is_worked_on(rows: tuple[int, ...], length: int) -> None:
    g, x, s = data(*rows, length), data(*rows, length, seed=1), data(*rows, 1, seed=2)
    source = near(scaled, g, x, s)
    before, loop = source.split("for r in ")
    name = next(line for line in before.split("\n") if "_next = tl.load(" in line).split("_next")[0].strip()
    assert f"        {name} = {name}_next\n" in loop and f"{name}_next = tl.load(" in loop and f" {name} = tl.load(" not in loop
    with settings.override(disable=frozenset(["loads_ahead"])):
        assert not ahead(near(scaled, g, x, s))


def test_rows_numbers_may_lie_in_another_order() -> None:
    g, x = data(5, 9, 300), data(5, 9, 300, seed=1)
    source = near(scaled, g, x, data(9, 5, seed=2).t()[..., None])
    assert ahead(source) and "_next, d1_factor, d1_shift)" in source


def test_what_the_machine_copies_ahead_by_itself_is_left_to_it() -> None:
    g, x = data(37, 300), data(37, 300, seed=1)
    assert not ahead(near(scaled, g, x, data(37, 1, dtype=torch.float32, seed=2)))
    assert not ahead(near(scaled, g[:9], x[:9], data(9, 1, seed=2))), "too few rows of a program"
    assert not ahead(near(scaled, data(37, 3003), data(37, 3003, seed=1), data(37, 1, seed=2))), "four warps"


def test_rows_numbers_that_the_kernel_replaces_are_read_in_their_turn() -> None:
    def program(g: Tensor, x: Tensor, s: Tensor) -> list[Tensor]:
        results = scaled(g, x, s)
        s.mul_((x.float() * g.float()).sum(-1, keepdim=True).sigmoid())
        return [*results, s]

    source = near(program, data(37, 300), data(37, 300, seed=1), data(37, 1, seed=2))
    assert "for r in " in source and not ahead(source)


def bodies(program: Callable[..., Any], *inputs: Tensor) -> list[Body]:
    """What the kernels of a reduction that programs share are made of, before it is divided."""
    found: list[Body] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, real in (("mixed_blocks", emit.mixed_blocks), ("divided", emit.divided)):
            def seen(body: Body, tuning: Tuning, real: Callable[..., Any] = real) -> Any:
                found.append(body)
                return real(body, tuning)

            patch.setattr(f"codegen.emit.{name}", seen)
        plan(record(program, *inputs)[0].graph, tuning=WALKING.changed("split_column=8,split_rows=8,programs=8,covered=32"))
    return found


def sized(body: Body, rows: int, columns: int) -> Body:
    """The same work on a matrix of another size."""
    numel = rows * columns
    steps = [replace(step, form=((numel, 1),)) if step.stage == "load" and step.level == FULL else step for step in body.steps]
    return replace(body, numel=numel, reduced=((columns, numel),) if body.column else ((1, columns),), steps=steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_off_boundaries_never_need_a_second_round(dtype: torch.dtype) -> None:
    """Programs are a multiple of 8, or 4, there; more than a GPU runs at a time would take twice as long."""
    (body,) = bodies(scaled, data(64, 131, dtype=dtype), data(64, 131, dtype=dtype), data(64, 1, dtype=dtype))
    like = 16 // dtype.itemsize
    assert alike(body) == like
    for rows in (512, 515, 1033, 5555, 8191, 20001):
        for columns in (1001, 2050, 3001, 5003, 7001, 8001):
            for down, programs in ((1, 132), (1, 264), (2, 132), (1, 78), (1, 3)):
                share, shares = walked_by(sized(body, rows, columns), HOPPER, down, programs)
                assert shares <= max(programs, like) and share * shares >= rows and share % down == 0
                assert columns % like == 0 or shares % like == 0
                assert shares >= programs * 0.75 or -(-rows // shares) <= -(-rows // programs) + down + like


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_columns_off_boundaries_are_shared_evenly(dtype: torch.dtype) -> None:
    """No multiprocessor has many more summands than the others; with stores of 16 bits beside, twice as many programs."""
    def program(g: Tensor, x: Tensor) -> list[Tensor]:
        y = g * x.sigmoid()
        return [y, y.sum(0)]

    (body,) = bodies(program, data(640, 131, dtype=dtype), data(640, 131, dtype=dtype))
    like, wanted = 16 // dtype.itemsize, HOPPER.programs * (2 if dtype is torch.bfloat16 else 1)
    assert body.column and narrow(body) == (dtype is torch.bfloat16)
    for rows in (8191, 20001, 40001):
        for columns in (1001, 2050, 3001, 5003, 7001, 12001):
            one = sized(body, rows, columns)
            share, shares = divided(one, HOPPER)
            programs = -(-(columns + like - 1) // column_width(one, HOPPER, True)) * shares
            longest = share * -(-programs // HOPPER.cores)
            assert shares % like == 0 or columns % like == 0
            assert share * shares >= rows and wanted * 0.6 <= programs <= wanted * 1.3
            assert longest <= 1.25 * rows * programs / shares / HOPPER.cores, (rows, columns, shares)


def test_all_programs_that_share_a_reduction_run_at_the_same_time(tmp_path: Path) -> None:
    """Of much that is computed and stored for each element, a thread has fewer elements."""
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        made = []
        for one in (x, y, x * y):
            made.append(torch.minimum(one / (y.abs() + 1), one - y).tanh() + one)
        return [*made, sum(made).mean()]  # type: ignore[union-attr]

    made = plan(record(program, data(1024, 4096), data(1024, 4096, seed=1))[0].graph)
    step = next(step for step in kernels(made) if "mean" in step.kernel.name)
    (registers,) = re.findall(r"Used (\d+) registers", spilled(step.kernel, tmp_path)[1])
    threads = step.grid[0] * step.kernel.num_warps * 32
    assert threads * int(registers) <= HOPPER.cores * FILE
    (body,) = bodies(scaled, data(64, 131), data(64, 131), data(64, 1))
    few, all_others, too_many = (values_at_once(body, threads, 132) for threads in (512 * 128, 528 * 64, 1 << 20))
    assert few < all_others == too_many == values_at_once(body, 0, 132) == MOST_VALUES


def test_few_small_steps_are_not_loaded_all_ahead() -> None:
    """Each step ahead is written out before the loop, and takes shared memory."""
    (body,) = bodies(scaled, data(64, 131), data(64, 131), data(64, 1))
    for elements, programs, wanted in ((131, 8, 4), (1 << 16, 8, 1), (4096, 132, 4), (4096, 528, 3), (4096, 5280, 3)):
        assert steps_ahead(body, HOPPER, elements, HOPPER.stages, programs) == wanted
    assert steps_ahead(body, HOPPER, 4096, 2, 528) == 2


def test_weights_that_are_loaded_once_take_no_room_of_what_is_loaded_ahead() -> None:
    """Two rows of 8,192 float32 elements of two operands wait in 128 KiB; with a third operand there is room for one."""
    def program(g: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        y = g * w
        return [y - x * (y * x).mean(-1, keepdim=True), (g * x).sum(0)]

    g, x, w = (torch.zeros(600, 8192) for _ in range(3))
    assert "num_stages=3" in first(program, g, x, w[0]).kernel.source
    assert "num_stages=2" in first(program, g, x, w).kernel.source


def counts(drawn: Tensor) -> Tensor:
    """How often each of 512 was drawn."""
    return torch.nn.functional.one_hot(drawn, 512).float().mean(0)


def test_what_has_the_same_operands_for_all_results_is_walked_as_it_was_divided() -> None:
    drawn = torch.randint(512, (8192,), generator=torch.Generator().manual_seed(0))
    step = first(counts, drawn)
    rows, columns = (block for _, block in step.kernel.constexprs)
    assert columns > 1 and "i0 = r + tl.arange(0, B0)" in step.kernel.source, "a program has several columns, and walks rows"
    assert rows * columns * step.grid[0] <= 4 * 8192 * 512, "and next to no threads that have nothing to do"
    check(counts, drawn[:64].repeat(4), tuning=HOPPER.changed("split_numel=64,programs=4"), extern=None)
