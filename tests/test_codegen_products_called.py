"""What multiplies in an op's place calls the library as the op was called, or ATen; a plan's steps become such. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Sequence

import pytest
import torch
from cublaslt import FakeCublasLt, in_place_of
from graphs import externs, record

from codegen import cublaslt, triton_engine
from codegen.cublaslt import Multiplier
from codegen.engine import Context
from codegen.explanation import facts
from codegen.kernel import Algorithm, MatMul, Plan
from codegen.product_bench import ATEN, Outcome
from codegen.products import as_op
from codegen.tuning import HOPPER
from ir_nodes import settings
from ir_nodes.estimate import CUDA

BF16 = torch.bfloat16
X, W, B = (torch.randn(*shape).to(BF16) for shape in ((64, 32), (32, 48), (48,)))


def op(functions: FakeCublasLt, target: str, product: MatMul) -> Callable[..., torch.Tensor]:
    with in_place_of(functions) as library:
        multiplier = Multiplier(library, product)
        return as_op(target, multiplier.suggestions(cublaslt.ANY_REDUCTION)[0], multiplier)


PRODUCT = MatMul(BF16, 64, 48, 32, (False, 32), (False, 48), 48, True)


@pytest.fixture
def unstreamed() -> Any:
    with in_place_of(FakeCublasLt()):
        yield


@pytest.mark.usefixtures("unstreamed")
def test_a_changed_alpha_reaches_the_call_and_a_changed_beta_is_atens() -> None:
    functions, made = FakeCublasLt(), torch.empty(64, 48, dtype=BF16)
    run = op(functions, "aten::addmm.out", PRODUCT)
    for alpha, beta in ((1, 1), (0.5, 1), (0.5, 2), (-3, 1)):
        assert run(B, X, W, alpha=alpha, beta=beta, out=made) is made
        torch.testing.assert_close(made, torch.addmm(B, X, W, alpha=alpha, beta=beta), rtol=2e-2, atol=5e-2)
    assert [call.alpha for call in functions.calls] == [1.0, 0.5, -3.0]


@pytest.mark.usefixtures("unstreamed")
def test_memory_off_a_boundary_and_a_library_that_refuses_are_atens() -> None:
    functions, made = FakeCublasLt(), torch.empty(64 * 48 + 1, dtype=BF16)
    run = op(functions, "aten::addmm.out", PRODUCT)
    off = made[1:].view(64, 48)
    torch.testing.assert_close(run(B, X, W, out=off), torch.addmm(B, X, W))
    assert not functions.calls
    functions.refused.append(1)
    for _ in range(2):
        torch.testing.assert_close(run(B, X, W, out=made[:-1].view(64, 48)), torch.addmm(B, X, W))
        functions.refused.clear()
    assert not functions.calls, "it is not asked again"


@pytest.mark.usefixtures("unstreamed")
def test_ops_that_make_their_result_and_those_with_a_relu() -> None:
    functions = FakeCublasLt()
    made = op(functions, "aten::mm", replace(PRODUCT, bias=False))(X, W)
    torch.testing.assert_close(made, X @ W, rtol=2e-2, atol=5e-2)
    run = op(functions, "aten::_addmm_activation.out", replace(PRODUCT, relu=True))
    out = run(B, X, W, beta=1, alpha=1, use_gelu=False, out=torch.empty(64, 48, dtype=BF16))
    torch.testing.assert_close(out, torch.addmm(B, X, W).relu(), rtol=2e-2, atol=5e-2)
    assert len(functions.calls) == 2


@pytest.mark.usefixtures("unstreamed")
def test_a_product_onto_what_is_there_runs_in_place() -> None:
    functions, there = FakeCublasLt(), torch.randn(64, 48).to(BF16)
    run = op(functions, "aten::addmm_", replace(PRODUCT, bias=False, onto=True))
    for alpha, beta in ((1, 1), (0.5, 1), (0.5, 2)):
        made = there.clone()
        assert run(made, X, W, alpha=alpha, beta=beta) is made
        torch.testing.assert_close(made, torch.addmm(there, X, W, alpha=alpha, beta=beta), rtol=2e-2, atol=5e-2)
    assert [(call.alpha, call.beta) for call in functions.calls] == [(1.0, 1.0), (0.5, 1.0)], "another beta is ATen's"
    functions.refused.append(1)
    made = there.clone()
    torch.testing.assert_close(run(made, X, W), torch.addmm(there, X, W), rtol=2e-2, atol=5e-2)
    assert len(functions.calls) == 2


class Measured:
    """The first suggestion is the fastest."""

    def __init__(self) -> None:
        self.asked: list[MatMul] = []

    def __call__(self, product: MatMul, algorithms: Sequence[Algorithm], multiplier: Multiplier) -> Outcome:
        self.asked.append(product)
        return Outcome(algorithms, {ATEN: 2e-6, "1": 1e-6})


def fused(folder: Path, replays: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, Measured]:
    measure = Measured()
    monkeypatch.setattr(triton_engine, "tuning_of", lambda context: HOPPER)
    monkeypatch.setattr(triton_engine, "warm_up", lambda folder, nodes: None)
    monkeypatch.setattr(triton_engine, "tuned", lambda plan, *where: plan)
    monkeypatch.setattr(triton_engine.product_bench, "on_gpu", lambda device: measure)
    recording, _ = record(torch.addmm, B, X, W)
    with in_place_of(FakeCublasLt()), settings.override(autotune=True):
        return triton_engine.fuse(recording.graph, Context(True, 0, folder, numbers=recording.scalars, replays=replays)), measure


@pytest.mark.parametrize("replays", [True, False])
def test_only_steps_that_replay_are_measured_and_python_calls_them(
        replays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    made, measure = fused(tmp_path, replays, monkeypatch)
    (step,) = externs(made)
    step.node.instr = 0
    with in_place_of(FakeCublasLt()):
        emit = triton_engine.emit_extern(step, Context(True, 0, tmp_path))
    assert (step.algorithm is not None, len(measure.asked), emit.python) == (replays, int(replays), replays)
    assert emit.blocked == "" and emit.calls and emit.early is not replays
    told = facts(step, CUDA)
    assert (told.by, told.python) == (("cuBLASLt's suggestion 1", True) if replays else ("ATen", False))
