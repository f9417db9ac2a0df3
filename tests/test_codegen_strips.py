"""Rows that registers hold in several strips: when they are, what the kernels compute, and what they leave alone."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, check, kernels, record
from graphs import drawn as data

from codegen import triton_compile
from codegen.fuse import plan
from codegen.kernel import KernelStep
from codegen.strips import LEAST
from codegen.tuning import HOPPER
from ir_nodes import settings

aten = torch.ops.aten
ANY = HOPPER.changed("few=0")  # few rows are no reason to hold them whole
ROWS = ANY.changed("mixed_rows=2,mixed_tile=1,cores=2,split_numel=64")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
LENGTHS = pytest.mark.parametrize("length", [300, 768, 1000, 1003, 1600, 2055])


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}


def strips(step: KernelStep) -> int:
    """How many hold a row, 0: it is held or walked whole."""
    found = {line.split(" = ")[0].strip() for line in step.kernel.source.split("\n") if line.strip().startswith("i1_")}
    return len(found)


def strips_of(program: Callable[..., Any], *inputs: torch.Tensor) -> tuple[int, int, int]:
    """(strips, elements of each, warps) on an H200."""
    (step,) = kernels(plan(record(program, *inputs)[0].graph))
    return strips(step), dict(step.kernel.constexprs)["B1"], step.kernel.num_warps


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def add_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, F.layer_norm(x + y, x.shape[-1:], w, w)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_norm_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    inner, normal = g.float() * w.float(), x.float() * scale
    return (scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))).to(x.dtype), (g.float() * normal).sum(0)


@pytest.mark.parametrize("length, wanted", [
    (512, (0, 512, 2)), (768, (3, 256, 1)), (640, (5, 128, 1)), (1000, (4, 256, 1)), (1003, (8, 128, 1)), (1600, (7, 256, 1)),
    (515, (5, 128, 1)), (3001, (12, 256, 2)), (5000, (5, 1024, 4)), (5003, (10, 512, 4)), (5120, (5, 1024, 4)),
    (8192, (4, 2048, 8)), (11008, (6, 2048, 8)),
])  # fmt: skip
def test_rows_are_cut_where_that_leaves_few_lanes_empty(length: int, wanted: tuple[int, int, int]) -> None:
    assert strips_of(norm, data(2200, length, dtype=torch.bfloat16)) == wanted


def test_more_threads_share_rows_off_boundaries_that_are_summed_once_or_with_others() -> None:
    assert strips_of(rms_norm, data(2200, 5003, dtype=torch.bfloat16)) == (5, 1024, 8)
    assert strips_of(rms_norm, data(2200, 3003, dtype=torch.bfloat16)) == (12, 256, 2), "40 registers do not hold six strips"
    two = [data(2200, 5003, dtype=torch.bfloat16) for _ in range(2)]
    assert strips_of(lambda x, y: norm(x + y), *two) == (5, 1024, 8)
    assert strips_of(norm, data(2200, 5003)) == (5, 1024, 8)


def test_registers_are_few_where_that_lets_more_programs_run() -> None:
    def registers(program: Callable[..., Any], length: int, dtype: torch.dtype) -> int:
        (step,) = kernels(plan(record(program, data(2200, length, dtype=dtype))[0].graph))
        return step.kernel.registers

    busy = lambda x: rms_norm(F.gelu(x) * x.sigmoid() + x.exp() * 3 - x.cos())  # noqa: E731
    lengths = (768, 3001, 5003, 5120, 6007, 10_007)
    assert [registers(rms_norm, length, torch.bfloat16) for length in lengths] == [0, 0, 40, 0, 0, 40]
    assert not any(registers(program, 5003, torch.bfloat16) for program in (norm, lambda x: x.softmax(-1), busy))
    assert not registers(rms_norm, 5003, torch.float32)
    (step,) = kernels(check(rms_norm, data(3, 5003, dtype=torch.bfloat16), count=1, tuning=ANY, **near(torch.bfloat16)))
    assert step.kernel.registers == 40
    ptx = triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"]
    assert ".maxnreg 40" in ptx


def test_what_all_rows_share_needs_no_address_for_each_element() -> None:
    program = lambda x, w: F.layer_norm(x, (5003,), w, None)  # noqa: E731
    (step,) = kernels(check(program, data(3, 5003, dtype=torch.bfloat16), data(5003, dtype=torch.bfloat16), count=1, tuning=ANY,
                            **near(torch.bfloat16)))
    assert "p1 + (-shift) + at_0, mask=m1_0" in step.kernel.source
    flat = lambda x, b: F.gelu(x + b)  # noqa: E731
    check(flat, data(3, 5003, dtype=torch.bfloat16), data(5003, dtype=torch.bfloat16), count=1)


def test_rows_that_are_held_whole() -> None:
    softmax = lambda x: x.softmax(-1)  # noqa: E731
    assert strips_of(softmax, data(600, 8192, dtype=torch.bfloat16))[0] == 0, "one sum only, and no lane is empty"
    assert strips_of(norm, data(64, 768, dtype=torch.bfloat16))[0] == 0, "so few rows need more threads each"
    assert strips_of(lambda x: x.cumsum(-1), data(600, 768))[0] == 0, "a scan needs neighbours together"
    with settings.override(disable="row_strips"):
        assert strips_of(norm, data(600, 768))[0] == 0


def test_very_long_rows_are_read_once() -> None:
    """Where no cache of a multiprocessor's own holds them: on an H200 it does, and is faster."""
    graph = record(lambda x: x.softmax(-1), data(530, 50257, dtype=torch.bfloat16))[0].graph
    (step,) = kernels(plan(graph, tuning=HOPPER.changed("cached=0,clusters=0")))
    assert strips(step) == 13 and step.kernel.source.count("tl.load(") == 13


def test_only_the_ends_of_rows_have_masks() -> None:
    (step,) = kernels(plan(record(norm, data(600, 5003, dtype=torch.bfloat16))[0].graph))
    loads = [line for line in step.kernel.source.split("\n") if "tl.load(" in line]
    assert [("mask" in line) for line in loads] == [True] + [False] * 8 + [True]
    (step,) = kernels(plan(record(norm, data(600, 768))[0].graph))
    assert "mask" not in step.kernel.source


@DTYPES
@LENGTHS
def test_norms_and_softmax(length: int, dtype: torch.dtype) -> None:
    x, y, w = data(5, length, dtype=dtype), data(5, length, dtype=dtype, seed=1), data(length, dtype=dtype, seed=2)
    for program, inputs in ((lambda x: (x.softmax(-1), x.log_softmax(-1)), (x,)), (add_norm, (x, y, w)),
                            (lambda g, y: aten._softmax_backward_data(g, y, -1, y.dtype), (x, y))):
        made = check(program, *inputs, tuning=ANY, **near(dtype))
        assert all(map(strips, kernels(made)))


@DTYPES
@LENGTHS
def test_all_kinds_of_reductions(length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codegen.strips.LEAST", 0)  # one row a program, however little that is
    x = data(4, length, dtype=dtype)
    for program in (lambda x: (x.sum(-1), x.amax(-1), x.amin(-1)), lambda x: (x.float().var(-1), (x > 0).any(-1)),
                    lambda x: x.logsumexp(-1), lambda x: (x - x.amax(-1, keepdim=True)).abs().mean(-1)):
        made = check(program, x, tuning=ANY, **near(dtype))
        assert any(map(strips, kernels(made)))
    check(lambda x: (x.argmax(-1), x.argmin(-1), x[:, :3].clone()), x, tuning=ANY)


@DTYPES
@LENGTHS
def test_columns_beside_rows(length: int, dtype: torch.dtype) -> None:
    g, x, w = data(37, length, dtype=dtype), data(37, length, dtype=dtype, seed=1), data(length, dtype=dtype, seed=2)
    with settings.override(disable="short_rows"):  # which what few programs leave of the columns would be
        first, second = kernels(check(rms_norm_backward, g, x, w, tuning=ROWS, rtol=3e-2, atol=1e-1))
    assert strips(first) and "for r in" in first.kernel.source and not strips(second)
    sums = kernels(check(lambda x: (x.sum(0), x.sum(1)), x, tuning=ROWS, rtol=2e-2, atol=1e-1))[0]
    assert bool(strips(sums)) == (x[0].nbytes >= LEAST)


def test_registers_of_programs_that_walk_rows_two_at_a_time() -> None:
    """A multiprocessor has room for two programs of 8 warps with 128 registers a thread, which more work would not fit."""
    def more(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return rms_norm_backward(g * x.sigmoid(), x.sin(), w)

    g, x, w = (torch.zeros(size, dtype=torch.bfloat16) for size in ((600, 5003), (600, 5003), (5003,)))
    for program, registers in ((rms_norm_backward, 128), (more, 0)):
        step, _ = kernels(plan(record(program, g, x, w)[0].graph))
        assert (step.kernel.registers, step.kernel.num_warps) == (registers, 8 if registers else 4)


@pytest.mark.parametrize("length", [768, 1003])
def test_what_lies_beside_a_row_is_left_alone(length: int) -> None:
    def program(whole: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        rows = whole[1:, 5 : length + 5]
        rows.copy_((rows + other[1:, :length]).softmax(-1))
        return whole

    for columns in (length + 8, length + 13):
        check(program, data(5, columns, dtype=torch.bfloat16), data(5, columns, dtype=torch.bfloat16, seed=1), tuning=ANY)


@DTYPES
def test_rows_that_fill_their_lanes_may_lie_off_boundaries(dtype: torch.dtype) -> None:
    """None is left for what lies between a boundary and a row's start."""
    for length in (256, 768, 1024):
        g, x, w = (data(17, length + 13, dtype=dtype, seed=seed)[:, :length] for seed in range(3))
        check(lambda x: x.softmax(-1), x, tuning=ANY, **near(dtype))
        check(rms_norm_backward, g, x, w[0], tuning=ROWS.changed("cores=1"), rtol=3e-2, atol=1e-1)


@pytest.mark.parametrize("length", [768, 1003])
def test_results_take_the_place_of_what_they_are_made_of(length: int) -> None:
    target = torch.tensor([3, length - 1, 0, 7])

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(y).copy_(x.log_softmax(-1))
        return x, x.gather(1, target[:, None])

    check(program, data(4, length), data(4, length, seed=1), tuning=ANY)


def test_rows_without_a_finite_number() -> None:
    x = torch.full((4, 1003), float("-inf"))
    x[0, 5], x[1, 700], x[2, 1002] = 1.0, float("nan"), float("inf")
    check(lambda x: (x.softmax(-1), x.amax(-1), x.log_softmax(-1)), x, tuning=ANY)


def test_several_rows_of_dimensions_that_lie_apart() -> None:
    x = data(3, 5, 4, 200)
    check(lambda x: x.transpose(1, 2).softmax(-1), x, tuning=ANY)
    check(lambda x: F.layer_norm(x[:, ::2], (4, 200)), x, tuning=ANY, **near(torch.float32))
    check(lambda x: x.sum((1, 3)), x, tuning=ANY, **near(torch.float32))


def test_many_sums_of_large_tensors_fit_a_multiprocessors_memory() -> None:
    """Loops load steps ahead; kernels of many operands fewer, as what they load lies in memory of 227 KiB until then."""
    def norms(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))  # type: ignore[arg-type]

    made = plan(record(norms, *(data(1 << 23, seed=seed) for seed in range(8)))[0].graph)
    step = kernels(made)[0]
    handle = triton_compile.compile_for_hopper(step.kernel, CACHE).handle
    assert step.kernel.source.count("tl.load(") == 8 and "num_stages=2" in step.kernel.source
    assert handle.metadata.shared <= 227 << 10


@DTYPES
@pytest.mark.parametrize("length", [1003, 2055, 5000, 16384 - 40])
def test_a_loss_holds_its_row_for_the_gradient(length: int, dtype: torch.dtype) -> None:
    """What registers hold is not read again; longer rows are walked twice, the second time from the cache."""
    def step(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x.float(), target, ignore_index=3)
        return loss, *torch.autograd.grad(loss, x)

    target = torch.randint(0, length, (12,), generator=torch.Generator().manual_seed(1))
    target[5] = 3
    neither = ANY.changed("cached=0,clusters=0")
    made = check(step, data(12, length, dtype=dtype), target, tuning=neither, extern=None, rtol=2e-2, atol=1e-4)
    assert [strips(one) > 1 for one in kernels(made) if "log_softmax" in one.kernel.name] == [True]
    walked = plan(record(step, data(600, 40_000, dtype=dtype), torch.zeros(600, dtype=torch.long))[0].graph)
    assert [strips(one) for one in kernels(walked) if "log_softmax" in one.kernel.name] == [0]
