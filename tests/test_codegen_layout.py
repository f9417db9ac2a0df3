"""How kernels that reduce nothing, and those of few elements, go over them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record
from graphs import drawn as data

from codegen.fuse import plan
from codegen.kernel import KernelStep
from codegen.tuning import HOPPER

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def only(program: Callable[..., Any], *inputs: torch.Tensor) -> KernelStep:
    (step,) = kernels(plan(record(program, *inputs)[0].graph))
    return step


def biased(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + b) + y


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def is_flat(step: KernelStep) -> bool:
    return "[:, None]" not in step.kernel.source


@DTYPES
@pytest.mark.parametrize("columns", [25, 74, 99, 251])
def test_short_rows_off_boundaries_are_walked_as_if_they_were_one(columns: int, dtype: torch.dtype) -> None:
    near = {"rtol": 1e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    x, y, b = data(30, columns, dtype=dtype), data(30, columns, dtype=dtype, seed=1), data(columns, dtype=dtype, seed=2)
    (step,) = kernels(check(biased, x, y, b, count=1, **near))
    assert is_flat(step)
    check(lambda x, y, b: (x[1:] * b, (y - x)[::2]), x, y, b, **near)
    check(lambda x, y: x.mul_(y[:, :1]).add_(y), x, y, count=1, **near)


@DTYPES
def test_as_few_dimensions_as_start_on_boundaries(dtype: torch.dtype) -> None:
    """Smaller operands run on with these: nothing is divided but where a row's half is asked for."""
    x, cos, sin = data(3, 5, 8, 22, dtype=dtype), data(1, 1, 8, 22, dtype=dtype, seed=1), data(1, 1, 8, 22, dtype=dtype, seed=2)
    (step,) = kernels(check(rotary, x, cos, sin, count=1))
    assert not is_flat(step) and step.kernel.source.count(" = _quotient(") == 1 and " % d" not in step.kernel.source


SMALL = replace(HOPPER, pointwise_block=32)


@DTYPES
@pytest.mark.parametrize("size", [(1667, 3), (111, 77), (27, 5, 33), (35, 41, 3, 1)], ids=str)
def test_all_blocks_but_the_last_run_without_masks(size: tuple[int, ...], dtype: torch.dtype) -> None:
    """What the compiler doesn't know to be whole vectors, it would load element by element."""
    near = {"rtol": 1e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    x, row, channel = data(*size, dtype=dtype), data(size[-1], dtype=dtype), data(size[1], *[1] * (len(size) - 2), dtype=dtype)
    for program in (lambda x, row, channel: F.gelu(x + row), lambda x, row, channel: x * channel + x):
        (step,) = kernels(check(program, x, row, channel, count=1, tuning=SMALL, **near))
        assert is_flat(step) and "if begin + B1 <= n1:" in step.kernel.source
    few = only(lambda x, row: x + row, x, row)
    assert "begin" not in few.kernel.source, "a second text for one block"


def test_rows_of_one_block_are_not_peeled() -> None:
    def peeled(columns: int, dtype: torch.dtype) -> bool:
        x = torch.zeros(1 << 22, dtype=dtype)[: (1 << 22) // columns * columns].view(-1, columns)
        return "shift = " in only(lambda x: x.flip(-1), x).kernel.source

    assert not any(peeled(columns, dtype) for columns in (255, 257, 333, 511, 2050) for dtype in (torch.float32, torch.bfloat16))
    assert all(peeled(columns, dtype) for columns in (1001, 1499, 3001) for dtype in (torch.float32, torch.bfloat16))
    for columns in (13, 65, 120, 999):
        check(lambda x: (x.flip(-1), x[1:] + x.flip(-1)[:-1]), data(7, columns), tuning=replace(SMALL, peeled=16))


def test_rows_that_are_left_apart() -> None:
    x, y = data(40, 251), data(40, 251, seed=1)
    assert not is_flat(only(biased, data(40, 256), data(40, 256, seed=1), data(256)))  # they start on boundaries
    assert not is_flat(only(lambda x, y: torch.cat((x, y), 1) * 2, x, y))  # memory does not run on
    assert not is_flat(only(lambda x, y: x + y, x, data(40, 300)[:, :251]))
    assert not is_flat(only(lambda x, i: x[i] + 1, x, torch.tensor([3, 1, 1, 7])))  # nor where rows are picked
    assert not is_flat(only(biased, data(4, 5003), data(4, 5003, seed=1), data(5003)))  # long ones begin on boundaries


def test_a_small_operand_that_lies_across_is_read_in_squares() -> None:
    step = only(lambda x, y: x + y.t(), data(3, 40, 51), data(51, 40))
    assert dict(step.kernel.constexprs) == {"B0": 32, "B1": 32}
    check(lambda x, y: x + y.t(), data(3, 40, 51), data(51, 40), count=1)


@pytest.mark.parametrize("program", [torch.relu, lambda x: x.softmax(-1), lambda x: x.sum(0)], ids=["map", "rows", "columns"])
def test_few_programs_have_more_threads(program: Callable[..., Any]) -> None:
    def lane(rows: int) -> float:
        step, *_ = kernels(plan(record(program, torch.ones(rows, 512, dtype=torch.bfloat16))[0].graph))
        elements = dict(step.kernel.constexprs)["B0"] * dict(step.kernel.constexprs)["B1"]
        return elements / (32 * step.kernel.num_warps)

    assert lane(48) <= 2 * HOPPER.few_lane < lane(9000)


def test_few_elements_that_take_many_instructions_have_a_thread_each() -> None:
    def lane(program: Callable[..., Any], dtype: torch.dtype) -> int:
        step = only(program, torch.ones(64, 768, dtype=dtype), torch.ones(64, 768, dtype=dtype))
        return dict(step.kernel.constexprs)["B1"] // (32 * step.kernel.num_warps)

    exact, plain = (lambda x, y: F.silu(x) * y), (lambda x, y: x * y)
    assert lane(exact, torch.float32) == 1 < lane(plain, torch.float32) < lane(plain, torch.bfloat16)
    assert lane(plain, torch.bfloat16) == lane(exact, torch.bfloat16)


def test_many_results_take_fewer_elements_a_thread_and_many_operands_alone_do_not() -> None:
    def per_thread(step: KernelStep) -> int:
        return dict(step.kernel.constexprs)["B1"] // (32 * step.kernel.num_warps)

    tensors = [data(1 << 22, dtype=torch.bfloat16, seed=seed) for seed in range(6)]
    assert per_thread(only(lambda a, b, c, d, e, f: a * b + c * d + e * f, *tensors)) == 8
    three = only(lambda a, b, c, d, e, f: (a * b + c, a - d, b + e * f), *tensors)
    assert per_thread(three) == 4


def lane(step: KernelStep) -> int:
    """Elements a thread."""
    blocks = dict(step.kernel.constexprs)
    return blocks["B0"] * blocks["B1"] // (32 * step.kernel.num_warps)


@pytest.mark.parametrize("function", [torch.sin, torch.cos, torch.tan])
def test_angles_of_half_the_elements_a_thread(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What reduces large ones is code for each of them, too much of which no longer lies in a cache."""
    x = torch.zeros(1 << 22, dtype=torch.bfloat16)
    assert lane(only(lambda x: function(x) * 2, x)) == 8 < lane(only(lambda x: x.exp() * 2, x))


def test_what_a_cache_holds_does_not_take_elements_from_threads() -> None:
    """Tables that all heads share; halves that are tensors of their own do."""
    x = torch.randn(8, 1024, 16, 64).bfloat16()
    cos, sin = torch.randn(1024, 1, 64).bfloat16(), torch.randn(1024, 1, 64).bfloat16()
    near = only(lambda x, cos, sin: x * cos + sin, x, cos, sin)
    assert lane(near) == 16 and lane(only(lambda x: x * 2 + 1, x)) == 16
    gate = lambda x, y: (x * 2 + y) * (x - y)  # noqa: E731
    wide = [torch.randn(8, 1024, 512).bfloat16() for _ in range(2)]
    many = lambda a, b: gate(a[..., :256], b[..., :256]) + gate(a[..., 256:], b[..., 256:])  # noqa: E731
    assert lane(only(many, *wide)) == 8


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 8), (torch.float32, 4)], ids=str)
def test_one_vector_of_each_operand_where_elements_read_one_half_or_the_other(dtype: torch.dtype, each: int) -> None:
    """Unless rows are read in another order than they are written."""
    x = torch.randn(8, 1024, 16, 64).to(dtype)
    cos, sin = torch.randn(1024, 1, 64).to(dtype), torch.randn(1024, 1, 64).to(dtype)
    step = only(rotary, x, cos, sin)
    assert lane(step) == each and step.kernel.num_warps == 4
    across = x.transpose(1, 2).contiguous().transpose(1, 2)
    other = lane(only(lambda *all: rotary(*all).contiguous(), across, cos, sin))
    assert other == 2 * each


@DTYPES
@pytest.mark.parametrize(("columns", "block"), [(131, 256), (300, 512), (515, 256), (768, 256), (771, 1024),
                                                 (1000, 1024), (1100, 256)])
def test_blocks_of_rows_are_wide_and_few_of_their_lanes_idle(columns: int, block: int, dtype: torch.dtype) -> None:
    table = data(40, columns + 3, dtype=dtype)[:, :columns]
    index = torch.arange(1 << 16) // 7 % 40
    step = only(F.embedding, index, table)
    assert dict(step.kernel.constexprs)["B1"] == block
    check(F.embedding, index[:20], table, count=1)


@pytest.mark.parametrize("columns", [1000, 1004, 3000], ids=str)
def test_rows_on_boundaries_of_what_is_loaded_at_a_time_need_no_other_masks(columns: int) -> None:
    """Also beside a mask of bytes, of which 16 do not fit: all are loaded in vectors, none at the row's ends by themselves."""
    def masked(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.masked_fill(keep, -1.0), x.shape[-1:])

    x, keep = data(5000, columns), data(5000, columns) > 0
    source = only(masked, x, keep).kernel.source
    assert not any(word in source for word in ("shift", "v1", "w1"))
    check(masked, x[:6], keep[:6], rtol=1e-4, atol=1e-4)
    for dtype in (torch.bfloat16, torch.float32):
        assert "shift" not in only(lambda x: x.softmax(-1), x.to(dtype)).kernel.source
        assert "shift" in only(lambda x: x.softmax(-1), data(5000, columns + 1).to(dtype)).kernel.source
        check(lambda x: x.softmax(-1), x[:6].to(dtype))


def test_rows_in_which_an_operand_jumps_do_not_share_blocks() -> None:
    """Threads would walk down their columns. Rows whose place is looked up, but not their elements' places, may."""
    def rows_of_a_block(step: KernelStep) -> int:
        return dict(step.kernel.constexprs)["B0"]

    pooled = only(lambda x: F.avg_pool2d(x, 2), torch.randn(64, 64, 112, 112))
    assert is_flat(pooled)
    rolled = only(lambda x: x.roll(3, 1) * 2, data(9000, 304))
    looked_up = only(lambda x, i: x.index_select(0, i) * 2, data(900, 304), torch.zeros(9000, dtype=torch.int64))
    assert not is_flat(rolled) and rows_of_a_block(rolled) == 1
    assert not is_flat(looked_up) and rows_of_a_block(looked_up) > 1
    assert is_flat(only(lambda x: x[:, ::2] * 2, data(9000, 96)))
    for columns in (20, 47, 96, 304):
        check(lambda x: [x.roll(3, 1) * 2, x[:, ::2] + 1, x[:, ::3].flip(1)], data(11, columns))
        check(lambda x: F.avg_pool2d(x, 2), data(2, 3, 6, columns))


@DTYPES
def test_rows_that_an_index_chooses_are_walked_as_they_lie(dtype: torch.dtype) -> None:
    """However many there are: threads along a row, one index for it."""
    table, source, target = data(40, 128, dtype=dtype), torch.arange(1 << 16) % 40, torch.arange(1 << 16) // 3 % 40

    def summed(x: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add_(0, t, x[s])

    found = kernels(plan(record(summed, table, source, target)[0].graph))
    step = next(step for step in found if "atomic_add" in step.kernel.source)
    assert dict(step.kernel.constexprs)["B1"] == 128 and "tl.load(p0 + i0, mask=m0)" in step.kernel.source
    bags = kernels(plan(record(lambda x, i: x[i.view(-1, 16)].sum(1), table, source)[0].graph))[-1]
    assert "i2 = pid // across" in bags.kernel.source and "tl.load(p0 + i0 + i2 * s0, mask=m0)" in bags.kernel.source
    check(lambda x, i: x[i.view(-1, 4)].sum(1), table, source[:40], rtol=1e-2, atol=1e-2)


@DTYPES
def test_what_all_of_a_run_share_is_loaded_once(dtype: torch.dtype) -> None:
    """The weight of a row in a sum of rows, as of channels by a gate or of experts by their shares."""
    x, share = data(512, 4, 1024, dtype=dtype), data(512, 4, 1, dtype=dtype)
    (step,) = kernels(plan(record(lambda x, share: (x * share).sum(1), x, share)[0].graph))
    assert "i2 = pid // across" in step.kernel.source and "+ i2 * s1, mask=m0)" in step.kernel.source
    for rows in (2, 5, 40):
        x, share = data(3, rows, 48, dtype=dtype), data(3, rows, 1, dtype=dtype)
        check(lambda x, share: (x * share).sum(1), x, share, rtol=2e-2, atol=2e-2)


def test_rows_are_found_by_multiplying() -> None:
    """Also where their number is a multiple of 16; along memory that would hide neighbours."""
    source = only(lambda x, y: x * y, torch.randn(4, 8, 1024, 128), torch.randn(4, 1, 1024, 1)).kernel.source
    assert "_quotient(i0, d2_factor, d2_shift)" in source and " % d2" not in source
