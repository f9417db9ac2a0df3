"""Few long rows, which programs share: softmax and its gradient, log-sum-exp, places of extremes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record
from torch import Tensor

from codegen import moments, rules, statistics
from codegen.fuse import plan
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

SPLIT = Tuning(split_numel=64, split_row=64, split_column=64, split_rows=8, looped=64, programs=8, cores=2)
TUNINGS = pytest.mark.parametrize("tuning", [HOPPER, SPLIT], ids=["whole", "split"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["float32", "bfloat16", "float64"])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are long from 64 elements on, columns from 4, and for places all are."""
    monkeypatch.setattr(moments, "LONG_ROW", 64)
    monkeypatch.setattr(rules, "LONG", 64)
    monkeypatch.setattr(statistics, "KEYED", 0)


def data(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradient(how: str, dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(torch.ops.aten, f"{how}_backward_data")(x.flip(0), getattr(torch, how)(x, dim, False), dim, x.dtype)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: (x.softmax(-1), (x / 0.7).softmax(-1)),
    "of columns": lambda x: (x.softmax(0), x.log_softmax(0), x.logsumexp(0)),
    "log-softmax": lambda x: (x.log_softmax(-1), x.logsumexp(-1), x.logsumexp((0, 1))),
    "of what it was rounded to": lambda x: x.float().log_softmax(-1).to(x.dtype),
    "gradient": gradient("_softmax", -1),
    "logarithm's gradient": gradient("_log_softmax", -1),
    "columns' gradient": gradient("_softmax", 0),
}


@DTYPES
@TUNINGS
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", [(3, 500), (90, 5)], ids=str)
def test_softmax(size: tuple[int, int], name: str, tuning: Tuning, dtype: torch.dtype) -> None:
    x = data(*size, dtype=dtype)
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    check(PROGRAMS[name], x, tuning=tuning, combos=True, **near)
    with settings.override(disable=frozenset({"long_norms"})):
        check(PROGRAMS[name], x, tuning=tuning, **near)


@pytest.mark.usefixtures("short")
def test_sums_wait_for_the_maxima_whose_last_launch_reads_nothing_else() -> None:
    """Small launches that do not depend on one another are joined: these do, by scratch memory alone."""
    recording, _ = record(lambda x: x.softmax(-1), data(1, 9000))
    made = plan(recording.graph, tuning=SPLIT)
    assert made.needs == ((), (0,), (1,), (2,), (1, 3))
    check(lambda x: x.softmax(-1), data(1, 9000), tuning=SPLIT, combos=True)


@pytest.mark.parametrize("length", [17, 19, 33, 40])
def test_programs_beyond_the_last_summand_add_nothing(length: int) -> None:
    """Operands of which one lies in columns and one in rows: so many programs share them as columns would have, of which some
    have nothing to do."""
    def program(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(1)

    columns = replace(SPLIT, split_column=8)
    across = data(length, 17).t()
    for operands in ((across, data(17, length)), (data(17, length), across)):
        check(program, *operands, tuning=columns, rtol=1e-5, atol=1e-5)


@TUNINGS
@pytest.mark.usefixtures("short")
def test_rows_without_a_finite_number(tuning: Tuning) -> None:
    x = torch.full((4, 201), float("-inf"))
    x[0, 5], x[1, 7], x[2, 3] = 1.0, float("nan"), float("inf")
    check(lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1)), x, tuning=tuning)


def loss(x: Tensor, *, rows: int = 3, **options: Any) -> list[Tensor]:
    target = torch.tensor([3, 7, 401])[:rows]
    leaf = x.detach().requires_grad_()
    out = F.cross_entropy(leaf.float(), target, **options)
    return [out.detach(), *torch.autograd.grad(out, leaf, torch.ones_like(out) / 3)]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_loss_keeps_nothing_for_each_element(rows: int) -> None:
    """Programs share rows to find their maxima and sums; the gradient is made of the logits."""
    made = check(partial(loss, rows=rows), data(rows, 500, dtype=torch.bfloat16), tuning=SPLIT, combos=True, rtol=2e-2, atol=2e-2)
    assert sum(step.grid[0] > rows for step in kernels(made) if step.kernel.name.startswith("reduce")) == 2
    assert max(temporary.nbytes for temporary in made.temporaries) < 500
    gradients = [step.kernel.name for step in kernels(made) if "log_softmax_backward_data_to_copy" in step.kernel.name]
    assert len(gradients) == 1 and gradients[0].startswith("pointwise")


@pytest.mark.usefixtures("short")
def test_a_loss_is_walked_by_one_program_for_each_row_where_programs_share_none() -> None:
    target = torch.tensor([3, 7])

    def program(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = F.cross_entropy(leaf.float(), target)
        return [out.detach(), *torch.autograd.grad(out, leaf)]

    with settings.override(disable="long_norms"):
        made = check(program, data(2, 500, dtype=torch.bfloat16), rtol=2e-2, atol=2e-2)
    assert sum("log_softmax" in step.kernel.name for step in kernels(made)) <= 2


def test_how_many_rows_of_a_loss_are_shared() -> None:
    """Fewer with its gradient than without, as one walk is enough for both where a cluster holds each row."""
    def shared(rows: int, gradient: bool) -> bool:
        target = torch.zeros(rows, dtype=torch.long)

        def program(x: Tensor) -> list[Tensor]:
            leaf = x.detach().requires_grad_()
            out = F.cross_entropy(leaf, target)
            return [out.detach(), *(torch.autograd.grad(out, leaf) if gradient else ())]

        recording, _ = record(program, torch.zeros(rows, (1 << 16) + 8))
        return any(step.grid[0] > rows for step in kernels(plan(recording.graph)) if step.kernel.name == "reduce_log_softmax")

    assert shared(63, gradient=True) and not shared(64, gradient=True)
    assert shared(127, gradient=False) and not shared(128, gradient=False)


LOSSES: dict[str, dict[str, Any]] = {
    "of each": {"reduction": "none"}, "sum": {"reduction": "sum"}, "one ignored": {"ignore_index": 7},
    "weighed": {"weight": torch.linspace(0.5, 2, 500)}, "smoothed": {"label_smoothing": 0.1},
}


@TUNINGS
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_losses(options: dict[str, Any], tuning: Tuning) -> None:
    check(partial(loss, **options), data(3, 500), tuning=tuning, combos=True, rtol=1e-5, atol=1e-6)


@TUNINGS
@pytest.mark.usefixtures("short")
def test_a_loss_of_few_pixels(tuning: Tuning) -> None:
    target = torch.tensor([[3, 7, 2], [250, 1, 0]])

    def program(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = F.cross_entropy(leaf, target)
        return [out.detach(), *torch.autograd.grad(out, leaf)]

    check(program, data(2, 300, 3), tuning=tuning, rtol=1e-5, atol=1e-6)


@TUNINGS
@pytest.mark.usefixtures("short")
def test_what_is_handed_on_may_be_overwritten(tuning: Tuning) -> None:
    """Then the sum of the gradient's rows is not known, and the logits are read while they are there."""
    target = torch.tensor([3, 7, 401])

    def program(x: Tensor) -> list[Tensor]:
        leaf, labels = x.clone().requires_grad_(), target.clone()
        out = F.cross_entropy(leaf, labels)
        found = out.detach()
        (grad,) = torch.autograd.grad(out, leaf)
        leaf.detach().mul_(2)
        labels.zero_()
        return [found, grad, leaf.detach(), labels]

    check(program, data(3, 500), tuning=tuning, rtol=1e-5, atol=1e-6)


def counts(program: Callable[[Tensor], Any], *size: int) -> list[int]:
    recording, _ = record(program, torch.zeros(size))
    return [step.grid[0] for step in kernels(plan(recording.graph))]


def test_many_programs_work_on_the_next_word() -> None:
    """A single row of a large vocabulary keeps 30 programs busy, and no program more than 4,096 elements."""
    assert counts(lambda x: x.softmax(-1), 1, 128256) == [32, 1, 32, 1, 126]
    assert counts(lambda x: x.argmax(-1), 1, 128256) == [32, 1]
    assert counts(lambda x: x.softmax(-1), 4096, 1024) == [4096]


PLACES: dict[str, Callable[..., Any]] = {
    "rows": lambda x: (x.argmax(-1), x.argmin(-1), x.argmax(), x.argmin(0, keepdim=True)),
    "with values": lambda x: (*x.max(-1), *x.min(-1), *x.max(0), *x.min(0, keepdim=True)),
}
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64,
         torch.int32, torch.int16, torch.int8, torch.uint8]


@TUNINGS
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("size", [(3, 300), (150, 5)], ids=str)
def test_places(size: tuple[int, int], name: str, dtype: torch.dtype, tuning: Tuning) -> None:
    """The first of equals: there are many."""
    x = (data(*size) * 3).round().to(dtype) if dtype is not torch.uint8 else (data(*size) * 3).abs().round().to(dtype)
    check(PLACES[name], x, tuning=tuning)
    check(PLACES[name], x.t(), tuning=tuning)
    if dtype is torch.float32:
        with settings.override(disable=frozenset({"keyed_places"})):
            check(PLACES[name], x, tuning=tuning)


@TUNINGS
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_places_of_what_has_no_order(tuning: Tuning, dtype: torch.dtype) -> None:
    """NaN comes first; zeros are equal, whatever their sign, and so are infinities."""
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, nan, 3.0, nan], [-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, 0.0, -0.0], [inf, 1.0, inf, -inf], [-inf, -inf, nan, inf],
            [-inf] * 4, [-1.0, -2.0, -2.0, -1.0], [3e38, -3e38, 1e-45, -1e-45]]
    x = torch.tensor(rows, dtype=dtype).repeat(1, 40)
    check(lambda x: (x.argmax(-1), x.argmin(-1), *x.max(-1), *x.min(-1)), x, tuning=tuning)
    check(lambda x: (x.argmax(0), x.argmin(0)), x.t().contiguous(), tuning=tuning)


@pytest.mark.usefixtures("short")
def test_places_among_truths() -> None:
    x = data(5, 70) > 0
    check(lambda x: (*x.max(-1), *x.min(-1)), x)
