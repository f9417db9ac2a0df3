"""Kernels whose programs may be placed before the kernel before them has ended: they wait for it before they touch memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, drawn, kernels, record

from codegen import triton_compile
from codegen.combo import combine
from codegen.fuse import plan
from codegen.kernel import WAIT
from codegen.tuning import HOPPER, INTERPRETER
from ir_nodes import settings

MEMORY = re.compile(r"(ld|st|red|atom)\.(volatile\.)?global|cp\.async")

PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "pointwise": (lambda x, y: F.gelu(x) + y, lambda: [drawn(64, 96), drawn(64, 96, seed=1)]),
    "transposed": (lambda x, y: x.t() + y, lambda: [drawn(64, 96), drawn(96, 64)]),
    "dropout and norm": (lambda x: F.layer_norm(F.dropout(x, 0.1), (768,)), lambda: [drawn(64, 768)]),
    "rows that are walked": (lambda x: x.softmax(-1), lambda: [drawn(64, 50_257, dtype=torch.bfloat16)]),
    "sums that programs share": (lambda x: (x.sum(), x.sum(0)), lambda: [drawn(8192, 384)]),
    "running sums": (lambda x: x.cumsum(-1), lambda: [drawn(64, 5003)]),
    "a table's rows": (lambda i, w: F.embedding(i, w), lambda: [torch.arange(64) % 7, drawn(7, 96)]),
    "several in one launch": (lambda *xs: [x * 2 for x in xs], lambda: [drawn(100 + n, seed=n) for n in range(40)]),
}


def made(name: str, **options: Any) -> list[Any]:
    program, inputs = PROGRAMS[name]
    return kernels(combine(plan(record(program, *inputs())[0].graph, **options)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_wait_before_they_touch_memory(name: str) -> None:
    steps = made(name)
    assert steps and all(step.kernel.overlaps for step in steps)
    for step in steps:
        lines = triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"].splitlines()
        waits = [number for number, line in enumerate(lines) if "griddepcontrol.wait" in line]
        touches = [number for number, line in enumerate(lines) if MEMORY.search(line)]
        assert waits and touches and waits[0] < touches[0]


def test_every_lane_of_a_combined_launch_waits() -> None:
    (step,) = made("several in one launch")
    lanes = re.findall(r"^def lane\d+.*?(?=^@triton|\Z)", step.kernel.source, re.MULTILINE | re.DOTALL)
    assert lanes and all(WAIT in lane for lane in lanes)


@pytest.mark.parametrize("tuning", [INTERPRETER, HOPPER.changed("overlaps=0")], ids=["interpreter", "older GPUs"])
def test_where_a_machine_can_not_kernels_do_not_wait(tuning: Any) -> None:
    assert not any(step.kernel.overlaps for step in made("dropout and norm", tuning=tuning))


def test_it_can_be_switched_off() -> None:
    with settings.override(disable=frozenset(["overlap_launches"])):
        assert not any(step.kernel.overlaps for step in made("pointwise"))


def test_the_interpreter_passes_over_the_waiting(tmp_path: Path) -> None:
    (step,) = made("pointwise")
    x, y = drawn(64, 96), drawn(64, 96, seed=1)
    out = torch.empty_like(x)
    run = triton_compile.interpret(step.kernel, tmp_path)
    memory = iter([x, y, out])
    run(step.grid, [getattr(arg, "value", None) or next(memory) for arg in step.args])
    torch.testing.assert_close(out, F.gelu(x) + y)
