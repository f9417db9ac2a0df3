"""Scatters and sums of slices as kernels: numbers as eager mode's, what is made before shares their kernel."""

from __future__ import annotations

import re

import pytest
import torch
from graphs import CACHE, check, execute, externs, kernels, record, typed

from codegen import triton_compile
from codegen.fuse import lower_all, plan

aten = torch.ops.aten


def data(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def places(*size: int, below: int, apart: int = -1) -> torch.Tensor:
    """Places below ``below``; along the dimension ``apart`` none comes twice."""
    order = torch.rand((*size[:apart], below, *size[apart:][1:]), generator=torch.Generator().manual_seed(1)).argsort(apart)
    return order.narrow(apart, 0, size[apart])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_scatters(dtype: torch.dtype) -> None:
    x, source = data(7, 9, dtype=dtype), data(7, 5, dtype=dtype)
    index = places(7, 4, below=9)
    check(lambda x, i, s: x.scatter(1, i, s * 2), x, index, source[:, 1:], count=2)
    check(lambda x, i, s: x.scatter(1, i, s), x, index, source, count=2)  # of which some go nowhere
    check(lambda x, i: x.scatter(-1, i, 3), x, index, count=2)
    check(lambda x, i: (x + 1).scatter_(1, i, 0.5), x, index, count=2)
    check(lambda x, i: (x.scatter(1, i, 5), x.scatter(1, i, 4) * 2, x * 3, x.scatter_(1, i, 2).sum(1)), x, index)
    check(lambda x, i, s: x.t().contiguous().scatter(0, i.t(), s.t()), x, index, source)
    check(lambda x, i, s: x.clone()[1:, ::2].scatter_(0, i, s), x, places(3, 4, below=6, apart=0), source)


def test_sums_at_places() -> None:
    x, index = data(7, 9), torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(3))
    check(lambda x, i, s: x.scatter_add(1, i, s.exp()), x, index, data(6, 5), count=2, rtol=1e-5, atol=1e-5)
    check(lambda x, i, s: torch.zeros_like(x).scatter_add_(0, i % 7, s), x, index, data(7, 5), rtol=1e-5, atol=1e-5)
    rows = torch.tensor([3, 0, 3, 3, 8])
    check(lambda x, i, s: x.index_add(1, i, s, alpha=0.5), x, rows, data(7, 5), count=2, rtol=1e-5, atol=1e-5)
    check(lambda x, i, s: (x * 2).index_add_(-1, i, s), x, rows, data(7, 5), rtol=1e-5, atol=1e-5)


def test_sums_by_the_name_of_the_reduction() -> None:
    x, index, source = data(7, 9), torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(3)), data(6, 5)
    check(lambda x, i, s: x.scatter_reduce(1, i, s, "sum"), x, index, source, count=2, rtol=1e-5, atol=1e-5)
    made = check(lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), x, index, source, extern=1)
    assert "by amax" in externs(made)[0].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_numbers_in_slices(dtype: torch.dtype) -> None:
    x, rows = data(7, 9, dtype=dtype), torch.tensor([3, 0, 5])
    check(lambda x, i: x.index_fill(1, i, 2), x, rows, extern=0)
    check(lambda x, i: (x + 1).index_fill_(0, i, torch.tensor(3, dtype=x.dtype)), x, rows, extern=0)
    check(lambda x, i: x.t().contiguous().index_fill(-1, i, 0.0) * 2, x, rows, extern=0)
    check(lambda x, i: x.clone()[1:, ::2].index_fill_(1, i[:2] - 1, 7), x, rows + 1, extern=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64], ids=str)
def test_sums_at_places_of_other_dtypes(dtype: torch.dtype) -> None:
    x, source, index = data(7, 9, dtype=dtype), data(6, 5, dtype=dtype), torch.tensor([3, 0, 3, 3, 8, 1])
    many = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(3))
    check(lambda x, i, s: x.scatter_add(1, i, s), x, many, source, count=2)
    check(lambda x, i, s: x[:, :5].index_add(0, i % 7, s), x, index, source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_sums_of_whole_rows_are_added_several_at_a_time(dtype: torch.dtype) -> None:
    x, source, index = data(7, 32, dtype=dtype), data(6, 32, dtype=dtype), torch.tensor([3, 0, 3, 3, 6, 1])
    near = {"rtol": 2e-2, "atol": 2e-2}
    made = check(lambda x, i, s: x.clone().index_add_(0, i, s), x, index, source, count=2, **near)
    check(lambda x, i, s: x.view(7, 2, 16).index_add(0, i, s.view(6, 2, 16)), x, index, source, **near)
    code = str(triton_compile.compile_for_hopper(kernels(made)[-1].kernel, CACHE).handle.asm["ptx"])
    added = r"(red|atom)\.global\.\S*add\.noftz\.(v\d\.|)b?f16"  # before Triton 3.9 an atom, whose result ptxas sees unread
    assert re.search(added, code) and re.search(r"noftz\.v[48]|f16x2", code)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_sums_at_single_places_are_rounded_once(dtype: torch.dtype) -> None:
    """ATen's are after each number."""
    def exact(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.scatter_add(1, i, s), x[:, :5].index_add(0, i[:, 0] % 7, s)

    x, source = data(7, 9, dtype=dtype), data(6, 5, dtype=dtype)
    index = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(3))
    recording, results = record(exact, x, index, source)
    made = plan(recording.graph)
    assert not externs(made)
    got = execute(recording, made)
    for output, result, wanted in zip(recording.graph.outputs(), results, exact(x.double(), index, source.double())):
        torch.testing.assert_close(typed(got[output.buffer.index], result), wanted.to(dtype), rtol=0, atol=0)


def test_the_gradient_of_a_gather() -> None:
    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.gather(1, index).square().sum(), x)[0]

    check(program, data(6, 9), torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(3)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("program", "why"), [
    (lambda x, i: x.scatter(0, i, x, reduce="add"), "no kernel for aten::scatter.reduce"),
    (lambda x, i: x.bool().scatter_add(0, i, x.bool()), "atomic sums of bool"),
    (lambda x, i: x.bfloat16()[:1].expand(1 << 22, 4).scatter_add(0, i, x.bfloat16()), "a large table in 16 bits"),
    (lambda x, i: x.index_add(0, i[0, 0], x[:1]), "an index of no dimension"),
], ids=["reduce", "bool", "large", "no dimension"])
def test_what_is_atens(program: object, why: str) -> None:
    recording, _ = record(program, data(4, 4), torch.zeros(4, 4, dtype=torch.int64))
    assert why in " ".join(unit.reason for unit in lower_all(recording.graph))


def test_sums_whose_order_must_not_vary_are_atens() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        recording, _ = record(lambda x, i: x.index_add(0, i, x), data(4, 4), torch.tensor([0, 1, 2, 0]))
        assert any("deterministic" in unit.reason for unit in lower_all(recording.graph))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_numbers_for_few_places_go_to_several_tables(dtype: torch.dtype) -> None:
    """The gradient of a relative position's bias: atomics on 24 addresses would wait for one another."""
    def program(v: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        put = aten._index_put_impl_(torch.zeros(8, 3, dtype=v.dtype, device=v.device), [i], v, True, False)
        columns = torch.zeros(3, 8, dtype=v.dtype).index_add_(1, i.flatten(), v.view(-1, 3).t())
        return put, columns, torch.zeros(8, 3, dtype=v.dtype).scatter_add_(0, i.view(-1, 1).expand(-1, 3), v.view(-1, 3))

    index = torch.randint(0, 8, (64, 40), generator=torch.Generator().manual_seed(3))
    values = data(64, 40, 3).to(dtype)
    recording, results = record(program, values, index)
    made = plan(recording.graph)
    assert not externs(made) and sum(step.kernel.source.count("% 256") for step in kernels(made)) >= 2  # two of them in one
    got = execute(recording, made)
    exact = torch.zeros(8, 3, dtype=torch.float64).index_add(0, index.flatten(), values.double().view(-1, 3))
    for output, result, wanted in zip(recording.graph.outputs(), results, (exact, exact.t(), exact)):
        torch.testing.assert_close(typed(got[output.buffer.index], result).double(), wanted, rtol=8e-3, atol=1e-4)
