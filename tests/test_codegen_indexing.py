"""Gathers, embeddings, scatters and their gradients: numbers and kernel counts."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, check, compile_all, execute, externs, kernels, record, typed

from codegen.cuda_graph import blocked_call
from codegen.fuse import plan
from codegen.triton_compile import compile_for_hopper
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

LOOPED = Tuning(pointwise_block=64, transpose_side=16, tile=64, persistent=16, looped=16)
SPLIT = Tuning(tile=64, persistent=64, looped=16, programs=16, split_rows=16, split_column=16, split_row=16, split_numel=64)
aten = torch.ops.aten


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def indices(*size: int, below: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, below, size, generator=torch.Generator().manual_seed(seed))


READS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "index_select 0": (lambda x, i: x.index_select(0, i), indices(9, below=6)),
    "index_select 1": (lambda x, i: x.index_select(1, i), indices(9, below=7)),
    "index_select -1": (lambda x, i: x.index_select(-1, i.int()), indices(9, below=5)),
    "index_select of a view": (lambda x, i: x.transpose(0, 2).index_select(1, i[::2]), indices(9, below=7)),
    "gather 0": (lambda x, i: x.gather(0, i), indices(4, 6, 5, below=6)),
    "gather -1": (lambda x, i: x.gather(-1, i), indices(6, 3, 9, below=5)),
    "gather transposed": (lambda x, i: x.transpose(0, 1).gather(1, i.transpose(0, 1)), indices(5, 7, 4, below=6)),
    "index": (lambda x, i: (x[i], x[:, i], x[..., i], x[None, i]), indices(3, 2, below=5)),
    "take": (lambda x, i: (x.take(i), x.take(-i - 1) * 2), indices(4, 3, below=210)),
    "index from behind": (lambda x, i: x[i - 5], indices(8, below=5)),
    "index by two": (lambda x, i: (x[i, i], x[:, i, i], x[i, :, i], x[i[:, None], i]), indices(4, below=5)),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reads_by_index(name: str, dtype: torch.dtype) -> None:
    program, index = READS[name]
    check(program, (data(6, 7, 5) * 9).to(dtype), index)
    check(program, (data(6, 7, 5) * 9).to(dtype), index, tuning=LOOPED)


def test_embedding_position_and_layer_norm_are_one_kernel() -> None:
    def program(weight: torch.Tensor, ids: torch.Tensor, places: torch.Tensor, gain: torch.Tensor) -> list[torch.Tensor]:
        x = weight.index_select(0, ids.view(-1)).view(3, 4, 40) + places
        return [x, F.layer_norm(x, (40,), gain)]

    check(program, data(11, 40), indices(3, 4, below=11), data(4, 40, seed=1), data(40, seed=2), count=1)
    check(lambda w, ids: F.embedding(ids, w), data(11, 40, dtype=torch.bfloat16), indices(3, 4, below=11), count=1)


def test_a_computed_table_is_stored_before_it_is_read_by_index() -> None:
    """Made of two operands, which would both be looked up instead of it."""

    def program(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        table = x * y
        return [table, table[i]]

    made = check(program, data(6, 7), data(6, 7), indices(6, below=6), count=2)
    assert "another order" in str(made.refusals[0])
    check(program, data(1), data(1), indices(1, below=1), count=2)
    check(lambda x, i: [table := x * 2, table[i]], data(6, 7), indices(6, below=6), count=2)


def test_a_table_that_nobody_else_reads_is_computed_where_it_is_read() -> None:
    check(lambda x, i: (x * 2)[i], data(6, 7), indices(6, below=6), count=1)
    check(lambda x, i: (x * 2)[i], data(1), indices(1, below=1), count=1)


@pytest.mark.parametrize("rows", [3, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("tuning", [HOPPER, SPLIT], ids=["hopper", "split"])
def test_gradient_of_an_embedding(rows: int, dtype: torch.dtype, padding: int, tuning: Tuning) -> None:
    def program(grad: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return aten.embedding_dense_backward(grad, ids, rows, padding, False) * 2

    grad, ids = data(5, 8, 24, dtype=dtype), indices(5, 8, below=rows)
    rtol, atol = (5e-2, 1e-1) if dtype is torch.bfloat16 else (1e-4, 1e-5)  # eager sums in 16 bits on a CPU, not on a GPU
    made = check(program, grad, ids, tuning=tuning, rtol=rtol, atol=atol)
    assert any("atomic_add" in step.kernel.source for step in kernels(made)) is (rows > 4)
    check(program, grad.transpose(0, 1), ids.t(), tuning=tuning, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("summed", [False, True], ids=["alone", "of sums"])
def test_a_small_table_that_is_asked_often_is_summed_in_several(dtype: torch.dtype, padding: int, summed: bool) -> None:
    """As a table of biases by distance is, whose gradient is summed over a batch first."""
    def program(grad: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        grad = grad.sum(0).permute(1, 2, 0) if summed else grad
        return aten.embedding_dense_backward(grad, ids, 9, padding, False) * 2

    ids = (torch.arange(40)[:, None] - torch.arange(40)).abs() // 5
    grad = data(3, 4, 40, 40, dtype=dtype) if summed else data(40, 40, 4, dtype=dtype)
    exact = program(grad.double(), ids).to(dtype)
    recording, (result,) = record(program, grad, ids)
    made = plan(recording.graph)
    assert not externs(made) and any("% 256" in step.kernel.source for step in kernels(made))
    got = typed(execute(recording, made)[recording.graph.outputs()[0].buffer.index], result)
    bound = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, exact, rtol=bound, atol=bound * 10)


def test_gradients_by_atomics_are_refused_where_order_matters() -> None:
    recording, _ = record(lambda g, i: aten.embedding_dense_backward(g, i, 11, -1, False), data(4, 8), indices(4, below=11))
    torch.use_deterministic_algorithms(True)
    try:
        assert "atomics add in any order" in externs(plan(recording.graph))[0].reason
    finally:
        torch.use_deterministic_algorithms(False)
    double = record(lambda g, i: aten.embedding_dense_backward(g, i, 11, -1, False), data(4, 8).double(), indices(4, below=11))[0]
    assert [step.reason for step in externs(plan(double.graph))] == ["atomic sums of float64"]


def test_the_gradient_of_an_embedding_takes_in_what_makes_its_gradient() -> None:
    def program(grad: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return aten.embedding_dense_backward(aten.native_dropout_backward(grad, mask, 2.0), ids, 11, -1, False)

    check(program, data(5, 8, 24), data(5, 8, 24) > 0, indices(5, 8, below=11), count=2)  # zeros, then sums


def test_index_put() -> None:
    def put(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x[i] = v
        return x * 2

    def add(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        twice = x * 2
        return aten.index_put_(twice, [None, i, i], v, True) + 1

    def gradient(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(3, 7, 7)
        return aten._index_put_impl_(zeros, [None, i, i], v, True, False)

    check(put, data(9, 4), torch.tensor([3, 1, -2]), data(3, 4, seed=1), count=2)
    check(put, data(9, 4, dtype=torch.bfloat16), torch.tensor([3, 1, -2]), data(1, 4, dtype=torch.bfloat16, seed=1), count=2)
    for program in (add, gradient):
        check(program, data(3, 7, 7), torch.tensor([1, 4, 1, -1]), data(3, 4, seed=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_sums_at_one_place_of_each_row_need_no_atomics(dtype: torch.dtype) -> None:
    """The gradient of ``heads[:, :, [-1]]``. ATen's bfloat16 has one addition, too."""
    def gradient(v: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(2, 5, 6, 16, dtype=v.dtype)
        last = aten._index_put_impl_(zeros, [None, None, i], v * 2, True, False)
        return last + aten._index_put_impl_(w * 3, [None, None, i - 1], v + 1, True, False)

    inputs = (data(2, 5, 1, 16) * 8).to(dtype), (data(2, 5, 6, 16, seed=1) * 8).to(dtype), torch.tensor([-1])
    check(gradient, *inputs, extern=0)


def test_sums_of_16_bits_are_rounded_once() -> None:
    """As ATen's, which sorts the places."""
    def gradient(v: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        new = aten._index_put_impl_(torch.zeros(5, 16, dtype=v.dtype), [i], v * 2, True, False)
        return aten._index_put_impl_(w * 3, [None, i], v.view(1, 40, 16), True, False).sum(0) + new

    i = torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(1))
    v, w = data(40, 16).bfloat16(), data(2, 5, 16, seed=1).bfloat16()
    recording, (result,) = record(gradient, v, w, i)
    made = plan(recording.graph)
    assert not externs(made)
    got = typed(execute(recording, made)[recording.graph.outputs()[0].buffer.index], result)
    rounded = (torch.zeros(5, 16, dtype=torch.float64).index_add(0, i, v.double() * 2)).bfloat16()
    added = (w * 3).double().index_add(1, i, v.double().view(1, 40, 16).expand(2, -1, -1)).bfloat16()
    torch.testing.assert_close(got, added.sum(0) + rounded, rtol=8e-3, atol=0)


MASKED: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "a vector": ((4, 6, 8), (4, 6), (8,)), "a row": ((4, 6, 8), (4, 6), (1, 8)), "a number": ((4, 6, 8), (4, 6), (1,)),
    "all dimensions": ((4, 6), (4, 6), (1,)), "behind": ((3, 4, 6), (4, 6), (3, 1)), "between": ((3, 4, 5, 2), (4, 5), (1, 2)),
    "before and behind": ((3, 4, 5, 2), (4, 5), (3, 1, 2)), "one of few": ((3, 1, 2), (1,), (3, 1, 1)),
}  # fmt: skip
"""Sizes of a tensor, of a mask and of what is put where it is true."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("accumulate", [False, True], ids=["set", "add"])
@pytest.mark.parametrize("name", MASKED)
def test_index_put_with_a_mask_is_elementwise(name: str, accumulate: bool, dtype: torch.dtype) -> None:
    size, chosen, given = MASKED[name]
    place = next(at for at in range(len(size)) if size[at : at + len(chosen)] == chosen)
    (x, values), mask, beside = (data(*n).mul(9).to(dtype) for n in (size, given)), data(*chosen) > 0, [None] * place
    check(lambda x, mask, values: aten.index_put_(x + 1, [*beside, mask], values, accumulate) * 2, x, mask, values, count=1)
    check(lambda x, mask, values: aten.index_put(x, [*beside, mask], values, accumulate), x, mask, values, count=1)


def test_masks_that_choose_among_values_are_atens_and_wait() -> None:
    mask = data(9) > 0
    for index in (mask, mask.to(torch.uint8)):
        recording, _ = record(lambda x, m, v: aten.index_put_(x * 2, [m], v), data(9, 4), index, data(int(mask.sum()), 4))
        (step,) = externs(plan(recording.graph))
        assert step.reason == ("as many values as the mask chooses elements" if index is mask else "indices of dtype uint8")
        assert "how many elements its mask chooses" in blocked_call(step.node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_index_copy_stores_only_what_it_copies(dtype: torch.dtype) -> None:
    def in_place(cache: torch.Tensor, place: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(2, place, (token * 2).transpose(1, 2))
        return cache.sum(-1)

    def as_out(cache: torch.Tensor, place: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        aten.index_copy.out(cache, -2, place + 1, token.transpose(1, 2), out=cache)
        return cache.sum(-1)

    for program, count in ((in_place, 2), (as_out, 3)):  # the sum of places is a kernel, too
        cache, token = data(2, 3, 16, 8, dtype=dtype), data(2, 2, 3, 8, dtype=dtype, seed=1)
        made = check(program, cache, torch.tensor([5, 2]), token, count=count, rtol=1e-2, atol=1e-2)
        store = kernels(made)[-2]
        assert [store.bytes_of(value) for value in store.writes] == [2 * 3 * 2 * 8 * dtype.itemsize]
        assert [value.buffer.nbytes for value in store.writes] == [cache.nbytes]


def test_index_copy_into_what_a_fill_made() -> None:
    def program(place: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return torch.zeros(9, 4).index_copy_(0, place, token)

    check(program, torch.tensor([3]), data(1, 4), count=2)
    check(program, torch.tensor([3, 8, 0]), data(3, 4), tuning=LOOPED)


def test_index_copy_beside_what_it_copies_into_is_atens() -> None:
    recording, _ = record(lambda x, i, v: x.index_copy(0, i, v), data(9, 4), torch.tensor([3]), data(1, 4))
    assert [step.reason for step in externs(plan(recording.graph))] == ["a copy beside what it copies into"]


OUTSIDE: dict[str, tuple[Callable[..., Any], torch.Tensor, str]] = {
    "index_select": (lambda x, i: x.index_select(1, i), torch.tensor([0, 7]), "aten::index_select"),
    "below zero": (lambda x, i: x.index_select(1, i), torch.tensor([0, -1]), "aten::index_select"),
    "gather": (lambda x, i: x.gather(0, i.view(1, 2, 1)), torch.tensor([6, 0]), "aten::gather"),
    "index from behind": (lambda x, i: x[i], torch.tensor([-7, 0]), "aten::index.Tensor"),
    "embedding and sums": (lambda x, i: F.embedding(i, x[:, 0]).sum(-1), torch.tensor([5, 6]), "aten::embedding"),
    "index_put": (lambda x, i: aten.index_put_(x * 2, [i], torch.ones(2, 7, 5)), torch.tensor([0, 6]), "aten::index_put_"),
    "a loss": (lambda x, i: F.cross_entropy(x[:2, 0], i), torch.tensor([5, 0]), "aten::nll_loss_forward"),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["hopper", "looped"])
def test_an_index_out_of_range_stops_the_kernel(name: str, tuning: Tuning) -> None:
    program, outside, op = OUTSIDE[name]
    x, inside = data(6, 7, 5), torch.tensor([0, 1])
    recording, _ = record(program, x, inside)
    made = plan(recording.graph, tuning=tuning)
    assert not externs(made)
    execute(recording, made)
    (place,) = [index for index, held in recording.inputs.items() if torch.equal(held, inside.view(torch.uint8))]
    recording.inputs[place] = outside.view(torch.uint8)
    with pytest.raises(IndexError, match=f"{op}.*: an index is out of range"):
        execute(recording, made)
    compile_all(made)
    with settings.override(check_indices=False):
        unchecked = plan(recording.graph, tuning=tuning)
        execute(recording, unchecked)
    assert not any("device_assert" in step.kernel.source for step in kernels(unchecked))


def test_only_kernels_that_look_carry_the_assertion() -> None:
    """Triton leaves assertions out unless it is told to compile them, and then would add its own about integers."""
    for on in (True, False):
        with settings.override(check_indices=on):
            (step,) = kernels(plan(record(lambda w, i: F.embedding(i, w) + 1, data(11, 40), indices(5, below=11))[0].graph))
            ptx = compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"]
            assert ("__assertfail" in ptx) is on and ptx.count("call.uni") == int(on)


def test_what_is_ignored_may_lie_outside() -> None:
    targets = torch.tensor([2, -100, 0])
    check(lambda x, i: F.cross_entropy(x, i), data(3, 7), targets, rtol=1e-5, atol=1e-6)
    check(lambda x, i: F.cross_entropy(x, i, ignore_index=9), data(3, 7), torch.tensor([2, 9, 0]), rtol=1e-5, atol=1e-6)
