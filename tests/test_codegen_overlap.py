"""Kernels whose programs may be placed before the kernel before them has ended: they wait for it before they touch memory."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, drawn, kernels, record

from codegen import cuda_driver, triton_compile
from codegen.attention_draws import DRAW
from codegen.attention_source import FORWARD, KEYS, QUERIES
from codegen.combo import combine
from codegen.engine import Context
from codegen.fuse import plan
from codegen.kernel import WAIT
from codegen.triton_engine import emit_launch, why_not_overlapping
from codegen.tuning import HOPPER, INTERPRETER

OLDER = HOPPER.changed("overlaps=0")
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
    assert steps and all(step.kernel.waits for step in steps)
    for step in steps:
        lines = triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"].splitlines()
        waits = [number for number, line in enumerate(lines) if "griddepcontrol.wait" in line]
        touches = [number for number, line in enumerate(lines) if MEMORY.search(line)]
        assert waits and touches and waits[0] < touches[0]


def test_every_lane_of_a_combined_launch_waits() -> None:
    (step,) = made("several in one launch")
    lanes = re.findall(r"^def lane\d+.*?(?=^@triton|\Z)", step.kernel.source, re.MULTILINE | re.DOTALL)
    assert lanes and all(WAIT in lane for lane in lanes)


@pytest.mark.parametrize("tuning", [INTERPRETER, OLDER], ids=["interpreter", "older GPUs"])
def test_where_a_machine_can_not_kernels_do_not_wait(tuning: Any) -> None:
    assert not any(step.kernel.waits for step in made("dropout and norm", tuning=tuning))


@pytest.mark.parametrize(("arch", "driver", "reason"), [
    (9, True, ""), (12, True, ""), (9, False, "the driver is older than CUDA 12.3's"),
    (8, True, "the GPU is older than compute capability 9.0"),
], ids=["Hopper", "Blackwell", "an old driver", "an older GPU"])  # fmt: skip
def test_launches_overlap_where_machine_and_driver_can(arch: int, driver: bool, reason: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "overlaps_launches", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=arch))
    assert why_not_overlapping(Context(True, 0, Path(CACHE))) == reason


class Launches:
    """Stands for a native program."""

    def __init__(self) -> None:
        self.overlaps: list[bool] = []

    def launch(self, function: int, grid: Any, threads: int, shared: int, overlaps: bool, args: Any, instr: int) -> None:
        self.overlaps.append(overlaps)


def test_a_launch_says_whether_it_may_overlap() -> None:
    (step,) = made("pointwise")
    launches: Any = Launches()
    for overlaps in (True, False):
        emit_launch(step, cuda_driver.Function(0, 0, 4), {}, overlaps).add(launches)
    assert launches.overlaps == [True, False]


def test_attention_waits_too() -> None:
    for source in (DRAW, FORWARD, QUERIES, KEYS):
        entry = source[source.index("def {name}") :]
        assert entry.index(WAIT) < min(entry.index(word) for word in ("tl.load(", "tl.store(", "return") if word in entry)


def test_the_interpreter_passes_over_the_waiting(tmp_path: Path) -> None:
    (step,) = made("pointwise")
    x, y = drawn(64, 96), drawn(64, 96, seed=1)
    out = torch.empty_like(x)
    run = triton_compile.interpret(step.kernel, tmp_path)
    memory = iter([x, y, out])
    run(step.grid, [getattr(arg, "value", None) or next(memory) for arg in step.args])
    torch.testing.assert_close(out, F.gelu(x) + y)
