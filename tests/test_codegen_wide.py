"""Tensors of more than 2**31 elements: kernels count in 64 bits, and only those do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels
from hypothesis import given
from hypothesis import settings as hypothesis

import lazy_backend
from codegen import emit, triton_compile
from codegen.combo import combine
from codegen.fuse import plan
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings
from lazy_backend import core
from tests.programs import Step, inputs, interpret, steps

SMALL = Tuning(pointwise_block=64, transpose_side=16, tile=64, persistent=64, looped=32, online=32, programs=8, split_rows=16,
               split_column=16, split_row=64, split_numel=256, mixed_rows=16, peeled=16, covered=16)
ROWS, WIDTH = 1 << 16, 1 << 15


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is large."""
    monkeypatch.setattr(emit, "INT32_LIMIT", 4)


def data(*size: int) -> torch.Tensor:
    return torch.linspace(-2, 2, torch.Size(size).numel()).reshape(size)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "elementwise": (lambda x, y: (x * y).tanh(), (data(17, 33), data(33))),
    "transposed": (lambda x, y: x + y.t(), (data(33, 17), data(17, 33))),
    "rows": (lambda x: x.softmax(-1), (data(9, 200),)),
    "odd rows in 16 bits": (lambda x: x.bfloat16().softmax(-1), (data(9, 203),)),
    "columns": (lambda x: x.sum(0), (data(300, 9),)),
    "all": (lambda x: x.square().sum(), (data(40, 50),)),
    "a layer norm's gradient": (lambda x, g: torch.ops.aten.native_layer_norm_backward(
        g, x, [24], x.mean(-1, keepdim=True), x.var(-1, keepdim=True).rsqrt(), data(24), data(24), [True] * 3),
        (data(64, 24), data(64, 24).sin())),
    "by index": (lambda x, i: F.embedding(i, x) + 1, (data(12, 7), torch.tensor([[3, 11], [0, 5]]))),
    "joined": (lambda x, y: torch.cat([x * 2, y], 1), (data(5, 7), data(5, 9))),
    "pooled": (lambda x: F.max_pool2d(x, 3, 2, 1), (data(2, 3, 9, 9),)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("tuning", [HOPPER, SMALL], ids=["hopper", "small"])
def test_counting_in_64_bits_changes_no_number(wide: None, name: str, tuning: Tuning) -> None:
    program, tensors = PROGRAMS[name]
    made = check(program, *tensors, tuning=tuning, extern=None, combos=True, rtol=2e-3, atol=2e-3)
    assert kernels(made)
    for step in kernels(made):
        indices = [kind for name, kind in step.kernel.signature if name[0] in "nds" and not name.startswith(("seed", "from"))]
        assert step.kernel.name.startswith("combo") or "i32" not in indices, step.kernel.signature


FAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elementwise": lambda x: x * 2,
    "rows": lambda x: x.float().softmax(-1),
    "even rows": lambda x: torch.empty_like(x[:, 1:]).softmax(-1),
    "columns": lambda x: x.sum(0),
    "all": lambda x: x.abs().sum(),
    "by index": lambda x: x.index_select(0, torch.empty(64, dtype=torch.int64, device="lazysched")),
    "a slice's end": lambda x: x[-3:] + 1,
    "a column": lambda x: x[:, 5] + 1,
}


@pytest.fixture
def nothing_runs() -> Iterator[None]:
    """What is recorded is never there, however large."""
    lazy_backend.mark_step()
    try:
        with settings.override(max_pending_bytes="1000000G"):
            core.configure(core.get())
            yield
    finally:
        core.configure(core.get())


@pytest.mark.parametrize("name", FAR)
def test_what_reaches_beyond_31_bits_counts_in_64(nothing_runs: None, name: str, tmp_path: Path) -> None:
    made = combine(plan(lazy_backend.debug.graph(
        [FAR[name](torch.empty(ROWS, WIDTH + 1, dtype=torch.bfloat16, device="lazysched"))])))  # fmt: skip
    steps = kernels(made)
    assert steps and sum(step.grid[0] for step in steps) < 1 << 31
    first = steps[0].kernel
    assert (".to(tl.int64)" in first.source) is (name != "a slice's end"), "a slice's end is near its own beginning"
    for step in steps:
        assert triton_compile.compile_for_hopper(step.kernel, tmp_path).handle.asm["ptx"]
        assert all(argument.value < 1 << 31 for (_, kind), argument in zip(step.kernel.signature, step.args)
                   if kind == "i32" and hasattr(argument, "value"))


@hypothesis(max_examples=25, deadline=None)
@given(program=steps(barriers=False))
def test_random_programs(program: list[Step]) -> None:
    before, emit.INT32_LIMIT = emit.INT32_LIMIT, 4
    try:
        check(lambda *tensors: interpret(program, list(tensors)), *inputs("cpu"), extern=None, rtol=4e-2, atol=4e-2)
    finally:
        emit.INT32_LIMIT = before
