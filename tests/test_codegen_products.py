"""Which of cuBLASLt's suggestions runs a product, and why none does: chosen by measurement, checked, remembered. Needs no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

import pytest
import torch
from cublaslt import FakeCublasLt, Measured, in_place_of
from graphs import externs, record

from codegen import cublaslt, products
from codegen.cublaslt import LibraryError
from codegen.fuse import plan
from codegen.kernel import Algorithm, ExternStep, MatMul
from codegen.product_bench import Outcome, aten_call, prepare, repeatable
from codegen.products import product_of, reductions_of, with_algorithms
from ir_nodes import Node, settings
from ir_nodes.node import ScalarInput
from ir_nodes.remarks import Remarks

BF16 = torch.bfloat16
Program = Callable[..., Any]


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, w, b)


INPUTS = [tensor(64, 32), tensor(48, 32), tensor(48)]


def chosen(folder: Path, measure: Measured | None, functions: FakeCublasLt | None = None, program: Program = linear,
           inputs: Sequence[torch.Tensor] = INPUTS, **changes: Any) -> tuple[ExternStep, list[str]]:
    """The product's step, and what was told."""
    recording, _ = record(program, *inputs)
    remarks = Remarks()
    with in_place_of(functions or FakeCublasLt()), settings.override(**{"autotune": True, **changes}):
        made = with_algorithms(plan(recording.graph), folder, 0, measure, recording.scalars, remarks)
    return externs(made)[0], [f"{remark.done} {remark}" for remark, _ in remarks.all() if remark.optimisation == "products"]


def test_the_fastest_is_taken_told_and_measured_once(tmp_path: Path) -> None:
    measure = Measured(30e-6, 31e-6, 20e-6, 25e-6)
    step, told = chosen(tmp_path, measure)
    assert step.algorithm == Algorithm(measure.asked[0], 2, (2, *[0] * 7), 256)
    assert told == ["True addmm 64 x 48 x 32: cuBLASLt's suggestion 2 of 3: 20 us measured instead of 30"]
    for again in (chosen(tmp_path, measure), chosen(tmp_path, None)):
        assert again[0].algorithm == step.algorithm and again[1] == told
    assert len(measure.asked) == 1
    (file,) = tmp_path.glob("multiply_*.json")
    assert json.loads(file.read_text())["microseconds"] == {"ATen": 30.0, "1": 31.0, "2": 20.0, "3": 25.0}


def test_aten_stays_unless_another_is_clearly_faster(tmp_path: Path) -> None:
    step, told = chosen(tmp_path, Measured(30e-6, 29.9e-6, 31e-6, 29.6e-6))
    assert step.algorithm is None
    assert told == ["False addmm 64 x 48 x 32: none of cuBLASLt's 3 suggestions is faster: 30 us measured"]
    step, again = chosen(tmp_path, None)
    assert step.algorithm is None and again == told


def test_wrong_results_and_refusals_are_dropped(tmp_path: Path) -> None:
    functions = FakeCublasLt(count=4, wrong=[1], refused=[3])
    step, _ = chosen(tmp_path, Measured(30e-6, 20e-6, 10e-6), functions)  # ATen, then the second and the fourth
    assert step.algorithm is not None and step.algorithm.number == 4
    (file,) = tmp_path.glob("*.json")
    facts = json.loads(file.read_text())
    assert facts["microseconds"] == {"ATen": 30.0, "1": None, "2": 20.0, "3": None, "4": 10.0}
    assert "off by 0.5 of ATen's norm" in facts["dropped"]["1"] and "not supported" in facts["dropped"]["3"]


def test_a_product_of_no_use_is_told_and_not_remembered(tmp_path: Path) -> None:
    def measure(*_: Any) -> Outcome:
        return Outcome(why="there is no room to measure it now")

    assert chosen(tmp_path, measure)[1] == ["False addmm 64 x 48 x 32: there is no room to measure it now"]  # type: ignore[arg-type]
    assert chosen(tmp_path, None)[1] == ["False addmm 64 x 48 x 32: it was not measured yet"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{}", '{"choice": "2"}', '{"choice": "2", "microseconds": {}, "words": [1]}'])
def test_a_damaged_choice_is_measured_again(text: str, tmp_path: Path) -> None:
    measure = Measured(3.0, 2.0, 1.0, 2.0)
    step, _ = chosen(tmp_path, measure)
    (file,) = tmp_path.glob("*.json")
    file.write_text(text)
    assert chosen(tmp_path, measure)[0].algorithm == step.algorithm and len(measure.asked) == 2


def test_a_choice_holds_for_a_layout_and_pytorchs_precision(tmp_path: Path) -> None:
    measure = Measured(3.0, 2.0, 1.0, 2.0)
    chosen(tmp_path, measure)
    chosen(tmp_path, measure, inputs=[tensor(32, 64).t(), *INPUTS[1:]])
    assert [product.left for product in measure.asked] == [(False, 32), (True, 64)]
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        assert reductions_of(BF16) in (cublaslt.IN_FLOAT32, cublaslt.NO_SPLIT)
        functions = FakeCublasLt()
        chosen(tmp_path, measure, functions)
        assert len(measure.asked) == 3
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("changes", [{"autotune": False}, {"disable": {"products"}}], ids=str)
def test_nothing_is_chosen_unless_asked_for(changes: dict[str, Any], tmp_path: Path) -> None:
    measure = Measured(3.0, 2.0, 1.0, 2.0)
    step, told = chosen(tmp_path, measure, **changes)
    assert step.algorithm is None and not told and not measure.asked


def test_nothing_is_chosen_where_sums_keep_their_order(tmp_path: Path) -> None:
    measure = Measured(3.0, 2.0, 1.0, 2.0)
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(tmp_path, measure)[0].algorithm is None and not measure.asked
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_the_library_atens_calls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: int) -> None:
        raise LibraryError("PyTorch has loaded no cuBLASLt")

    recording, _ = record(linear, *INPUTS)
    remarks, made = Remarks(), plan(recording.graph)
    monkeypatch.setattr(cublaslt, "library", missing)
    with settings.override(autotune=True):
        assert with_algorithms(made, tmp_path, 0, None, (), remarks) is made
    assert [str(remark) for remark, _ in remarks.all()] == ["PyTorch has loaded no cuBLASLt"]


def added_up(made: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return made.clone().addmm_(x, w)


def test_a_product_onto_what_is_there_is_judged_by_what_it_adds(tmp_path: Path) -> None:
    """One that forgets what is there is dropped."""
    measure, functions = Measured(30e-6, 40e-6, 20e-6), FakeCublasLt(count=3, forgetful=[2])
    step, told = chosen(tmp_path, measure, functions, added_up, [tensor(64, 48), X, W])
    assert step.algorithm is not None and step.algorithm.number == 3 and step.algorithm.product.onto
    assert told == ["True addmm_ 64 x 48 x 32 onto what is there: cuBLASLt's suggestion 3 of 3: 20 us measured instead of 30"]
    (file,) = tmp_path.glob("*.json")
    assert "of ATen's norm" in json.loads(file.read_text())["dropped"]["2"]
    assert {call.beta for call in functions.calls} == {1.0}


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_timing_a_product_onto_what_is_there_keeps_its_numbers(dtype: torch.dtype) -> None:
    product = MatMul(dtype, 64, 48, 32, (False, 32), (False, 48), 48, onto=True)
    x, w, made = tensor(64, 32, dtype=dtype), tensor(32, 48, dtype=dtype), torch.empty(64, 48, dtype=dtype)
    prepare(product, made)
    first, call = made.clone(), repeatable(product, partial(aten_call(product, x, w, x), out=made))
    for _ in range(1000):
        call()
    assert float((made - first).float().norm()) < 0.2 * float(first.float().norm())
    call()
    torch.testing.assert_close((made - first).float(), x.float() @ w.float(), rtol=0.0, atol=1.0)


def node_of(program: Program, *inputs: torch.Tensor) -> tuple[Node, list[Any]]:
    recording, _ = record(program, *inputs)
    return next(node for node in recording.graph.nodes if node.target in products.PRODUCTS), recording.scalars


def scaled(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b, x, w, beta=2.5, alpha=0.7)


X, W, B = tensor(64, 32), tensor(32, 48), tensor(48)
REFUSED: dict[str, tuple[Program, list[torch.Tensor], str]] = {
    "float32": (torch.mm, [X.float(), W.float()], "not in 16 bits"),
    "small": (torch.mm, [X, W], "it is small: .* 0.0002 GFLOP"),
    "thin": (torch.mm, [tensor(1, 32), W], "it is small"),
    "a factor's rows are apart": (lambda x, w: x[:, ::2] @ w, [tensor(64, 64), W], "of a factor"),
    "expanded": (lambda x, w: x.expand(64, 32) @ w, [tensor(32), W], "of a factor"),
    "off a boundary": (lambda x, w: x[:, 1:33] @ w, [tensor(64, 40), W], "16-byte boundary"),
    "a matrix is added": (torch.addmm, [tensor(64, 48), X, W], "no row"),
    "one number is added": (torch.addmm, [tensor(1), X, W], "no row"),
    "what is there times another number": (
        lambda b, x, w: b.clone().addmm_(x, w, beta=0.5), [tensor(64, 48), X, W], "multiplied by another number"),
    "it writes a factor": (lambda x, w: torch.mm(x, w, out=x[:]), [tensor(32, 32), tensor(32, 32)], "writes what it reads"),
    "a bias times another number": (scaled, [B, X, W], "multiplied by another number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_a_product_stays_atens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, inputs, why = REFUSED[name]
    if name not in ("small", "thin"):
        monkeypatch.setattr(products, "SMALLEST", 1)
    found = product_of(*node_of(program, *inputs))
    assert isinstance(found, str)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found)


def test_what_a_product_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALLEST", 1)
    assert product_of(*node_of(linear, *INPUTS)) == MatMul(BF16, 64, 48, 32, (False, 32), (True, 32), 48, True)
    assert product_of(*node_of(lambda x, w: x[:, 8:40].t() @ w, tensor(64, 48), tensor(64, 96)[:, :80])) == MatMul(
        BF16, 32, 80, 64, (True, 48), (False, 96), 80)
    node, _ = node_of(linear, *INPUTS)
    part = replace(node.writes[0], layout=replace(node.writes[0].layout, stride=(200, 1), offset=8))
    node.writes = (part,)
    found = product_of(node)
    assert isinstance(found, MatMul) and found.apart == 200
    there = MatMul(BF16, 64, 48, 32, (False, 32), (False, 48), 48, onto=True)
    assert product_of(*node_of(added_up, tensor(64, 48), X, W)) == there and "onto" in str(there)
    node.writes = (replace(part, layout=replace(part.layout, stride=(1, 64))),)
    assert product_of(node) == "the rows of its result do not lie together"


def test_numbers_that_are_not_known_yet_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALLEST", 1)
    node, _ = node_of(scaled, B, X, W)
    assert any(isinstance(arg, ScalarInput) for arg in node.args)
    assert isinstance(product_of(node), MatMul) and isinstance(product_of(node, [1.0, 0.7]), MatMul)


@pytest.mark.parametrize(("switch", "why"), [("allow_fp16_accumulation", "add up in float16"), ("carveout", "leave multip")])
def test_switches_of_pytorchs_leave_products_to_it(switch: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALLEST", 1)
    node, numbers = node_of(torch.mm, X.half(), W.half())
    assert isinstance(product_of(node, numbers), MatMul)
    if switch == "carveout":
        monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 8)
    else:
        monkeypatch.setattr(type(torch.backends.cuda.matmul), "__getattr__", lambda self, name: name == switch)
    assert why in str(product_of(node, numbers))


def test_random_operands_are_not_the_programs_draws(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    chosen(tmp_path, Measured(3.0, 2.0, 1.0, 2.0))
    assert torch.equal(state, torch.get_rng_state())
