"""Running sums, products, extremes and log-sum-exps against eager PyTorch, along any dimension, in every kernel form."""

from __future__ import annotations

import functools
from typing import Any, Callable

import pytest
import torch
from graphs import check, drawn, kernels

from codegen.kernel import Plan
from codegen.tuning import HOPPER, INTERPRETER, Tuning
from ir_nodes import settings

LOOPED = Tuning(tile=64, persistent=16, looped=16, column_tile=128, column_width=32, covered=1 << 20)
SPLIT = Tuning(tile=64, persistent=64, looped=16, programs=16, split_rows=16, split_column=16, split_row=16, split_numel=64)
FORMS = {"persistent": HOPPER, "looped": LOOPED, "split": SPLIT, "interpreter": INTERPRETER}
forms = pytest.mark.parametrize("tuning", FORMS.values(), ids=FORMS.keys())
OPS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "cumsum": torch.cumsum, "cumprod": torch.cumprod, "logcumsumexp": torch.logcumsumexp, "cummax": torch.cummax,
    "cummin": torch.cummin,
}
NEAR = {"rtol": 1e-4, "atol": 1e-5}


data = functools.partial(drawn, most=3, false=0.5)


def refusals(made: Plan) -> str:
    return " / ".join(refusal.reason for refusal in made.refusals)


@forms
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_scan_along_any_dimension(op: Callable[[torch.Tensor, int], Any], tuning: Tuning) -> None:
    for dim in (0, -2, 2):
        check(lambda x, dim=dim: op(x, dim), data(5, 7, 69), count=1, tuning=tuning, **NEAR)


@pytest.mark.parametrize(("op", "dtype"), [
    pytest.param(op, dtype, id=f"{name}-{str(dtype)[6:]}") for name, op in OPS.items()
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
    if dtype.is_floating_point or name != "logcumsumexp"
])
def test_scan_has_atens_dtypes(op: Callable[[torch.Tensor, int], Any], dtype: torch.dtype) -> None:
    check(lambda x: op(x, 1), data(9, 40, dtype=dtype), count=1, tuning=LOOPED)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["persistent", "looped"])
def test_nan_infinity_and_equals(op: Callable[[torch.Tensor, int], Any], tuning: Tuning) -> None:
    x = data(6, 40).round()  # equal ones: the last counts
    x[0, 3], x[1, 5], x[2, 7], x[2, 8], x[3] = float("nan"), float("inf"), float("inf"), float("-inf"), float("-inf")
    x[0, 20] = float("nan")
    check(lambda x: op(x, 1), x, count=1, tuning=tuning, **NEAR)


def test_no_dimensions_one_element_and_none() -> None:
    scans = lambda x, dim: (x.cumsum(dim), *x.cummax(dim), x.logcumsumexp(dim))  # noqa: E731
    check(lambda x: scans(x, 0), data(), count=1)
    check(lambda x: scans(x, 1), data(5, 1, 6), count=1)
    made = check(lambda x: x.cumsum(0), data(0, 3), extern=1)
    assert {step.reason for step in made.steps} == {"an empty tensor"}


def test_other_dtypes_strides_and_places_of_the_result() -> None:
    check(lambda x: x.cumsum(1, dtype=torch.float32), data(5, 40, dtype=torch.bfloat16), count=1)
    check(lambda x: x.cumsum(0, dtype=torch.float32), data(5, 40, dtype=torch.int32), count=1)
    check(lambda x: x.cumprod_(0), data(5, 40, dtype=torch.int32), count=1, tuning=LOOPED)
    check(lambda x: x.t().cumsum_(0), data(30, 40), count=1, tuning=LOOPED, **NEAR)
    check(lambda x: (x[:, ::2].cumsum(1), x[:, :1].expand(9, 30).cumsum(1)), data(9, 40), **NEAR)
    check(lambda x: x.permute(1, 2, 0).cumsum(1), data(4, 6, 40), count=1, **NEAR)
    check(lambda x: torch.ones(6, 40).cumsum(1) * x, data(6, 40), count=1, tuning=LOOPED)


def test_producers_and_readers_join() -> None:
    made = check(lambda x, y: (x * y).relu().cumsum(1).sqrt() + y, data(9, 69), data(69, seed=1), count=1, tuning=LOOPED, **NEAR)
    assert len(made.steps[0].reads) == 2 and len(made.steps[0].writes) == 1


@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["persistent", "looped"])
def test_scans_and_reductions_of_the_same_rows_share_a_kernel(tuning: Tuning) -> None:
    """As in nucleus sampling: what is kept of a distribution."""

    def program(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = logits.softmax(-1)
        before = share.cumsum(-1) - share
        kept = share.masked_fill(before > 0.9, 0.0)
        return kept / kept.sum(-1, keepdim=True), before.amax(-1)

    check(program, data(9, 69), count=1, tuning=tuning, **NEAR)


def test_a_scan_of_a_scan_and_one_beside_a_split_sum() -> None:
    check(lambda x: x.cumsum(1).cummax(1), data(9, 69), count=1, tuning=LOOPED, **NEAR)
    made = check(lambda x: (x.cumsum(1), x.sum(1)), data(3, 200), tuning=SPLIT, **NEAR)
    assert "the other needs whole rows" in refusals(made)


def test_rows_off_boundaries_are_walked_in_order() -> None:
    check(lambda x: x.cumsum(1), data(20, 1003, dtype=torch.bfloat16), count=1,
          tuning=Tuning(persistent=64, looped=64), rtol=2e-2, atol=0.1)
    for length in (3, 61, 65, 131):
        check(lambda x: x.cumsum(1), data(20, length), count=1, tuning=Tuning(persistent=16, looped=16), **NEAR)


@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["persistent", "looped"])
def test_gradients_scan_backwards_in_one_kernel(tuning: Tuning) -> None:
    for dim in (0, 1):
        check(lambda x, dim=dim: x.flip(dim).cumsum(dim).flip(dim) * 2, data(37, 69), count=1, tuning=tuning, **NEAR)
    check(lambda x: x.flip(1).logcumsumexp(1).flip(1), data(37, 69), count=1, tuning=tuning, **NEAR)
    made = check(lambda x: x.flip(1).cumsum(1).flip(1) + x.cumsum(1), data(37, 69), count=2, tuning=tuning, **NEAR)
    assert "they scan in opposite directions" in refusals(made)


def test_what_was_turned_round_and_is_gone_is_not_read_again() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        turned = x.flip(1).cumsum(1)
        x.mul_(2)
        return [turned.flip(1), x]

    check(program, data(9, 40), **NEAR)
    check(lambda x: (lambda turned: (turned, turned.flip(1)))(x.flip(1).cumsum(1)), data(9, 40), **NEAR)


def test_a_flip_alone() -> None:
    check(lambda x: (x.flip(0), x.flip(0, -1), x.flip(1) + 1), data(9, 40))
    check(lambda x: x.flip(0), data(9, 40, dtype=torch.bfloat16), count=1)


def test_few_long_rows_are_left_to_aten() -> None:
    made = check(lambda x: x.cumsum(1), data(2, (1 << 15) + 1), extern=1, count=0)
    assert "few long rows" in made.steps[0].reason


def test_scans_can_be_switched_off() -> None:
    with settings.override(disable="scans"):
        made = check(lambda x: x.cumsum(0), data(5, 4), extern=1, count=0)
    assert made.steps[0].reason == "scans is switched off"


def test_the_text_does_not_depend_on_sizes() -> None:
    one, two = (check(lambda x: x.cumsum(1), data(*size), tuning=LOOPED, **NEAR) for size in ((9, 64), (5, 128)))
    assert kernels(one)[0].kernel.source == kernels(two)[0].kernel.source
    assert "tl.associative_scan" in kernels(one)[0].kernel.source


@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["held", "looped"])
def test_summands_keep_their_order_beside_operands_that_cut_them(tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    """An elementwise part of as many elements in another order shares the kernel. It cuts the dimension that is summed along in
    two, of which the outer one has the smaller stride."""
    monkeypatch.setattr("codegen.moments.LONG_ROW", 64)  # the softmax is in parts

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.t().contiguous().t() * 1.5
        return [y, y.softmax(0), torch.sigmoid(y.cumsum(0) * 0.1)]

    check(program, torch.randn(130, 5, generator=torch.Generator().manual_seed(0)), tuning=tuning, rtol=1e-5, atol=1e-5)
