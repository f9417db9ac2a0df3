"""Matrix products with what surrounds them in one kernel, where that measured faster. Imports `codegen` and tests' parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, assert_same, compile_all, execute, externs, kernels, record, typed
from recording import Recording

from codegen import bench
from codegen.contest import Contest
from codegen.fuse import plan
from codegen.kernel import ExternStep, KernelStep, Plan
from codegen.product import is_product
from codegen.templates import products_of, with_tiles
from codegen.triton_compile import compile_for_hopper
from codegen.tuning import HOPPER
from ir_nodes import settings

BF16 = torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def templated(recording: Recording, **changes: Any) -> Plan:
    return plan(recording.graph, products=[node for node in recording.graph.nodes if is_product(node)], **changes)


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "bias and gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [tensor(70, 40), tensor(50, 40), tensor(50)]),
    "residual": (lambda x, w, y: x @ w + y, [tensor(130, 33), tensor(33, 200), tensor(130, 200)]),
    "kept as well": (lambda x, w: ((y := x @ w), y.relu()), [tensor(64, 64), tensor(64, 64)]),
    "transposed": (lambda x, w, y: (x.t() @ w) * y.t(), [tensor(48, 70), tensor(48, 36), tensor(36, 70)]),
    "heads": (lambda x, w, y: (x @ w).view(4, 16, 2, 32) + y.transpose(1, 2),
              [tensor(64, 32), tensor(32, 64), tensor(4, 2, 16, 32)]),
    "half": (lambda x, w: (x @ w).tanh(), [tensor(32, 32, dtype=torch.float16), tensor(32, 32, dtype=torch.float16)]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_and_its_epilogue_are_one_kernel(name: str) -> None:
    program, inputs = CASES[name]
    recording, outs = record(program, *inputs)
    wanted = {index: data.clone() for index, data in recording.expected.items()}
    assert len(plan(recording.graph).steps) == 2
    made = templated(recording)
    assert len(made.steps) == len(kernels(made)) == 1, [str(refusal) for refusal in made.refusals]
    memory = execute(recording, made)
    for value in recording.graph.outputs():
        like = next((out for out in outs if out.untyped_storage().nbytes() == value.buffer.nbytes), None)
        if like is not None and value.version:
            assert_same(typed(memory[value.buffer.index], like), typed(wanted[value.buffer.index], like), 2e-2, 2e-2)
    compile_all(made)


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


INPUTS = [tensor(256, 64), tensor(128, 64), tensor(128)]


class FakeTimer:
    def __init__(self, fastest: int) -> None:
        self.fastest, self.contests = fastest, list[Contest]()

    def __call__(self, contests: Sequence[Contest]) -> list[list[float | None]]:
        self.contests += contests
        return [[1.0 if index == self.fastest else 2.0 for index in range(len(contest))] for contest in contests]


def chosen(fastest: int, folder: Path, program: Callable[..., Any] = linear) -> tuple[Recording, Plan, FakeTimer]:
    recording, _ = record(program, *INPUTS)
    timer = FakeTimer(fastest)
    found = products_of(recording.graph, HOPPER, "a GPU", folder, timer)
    return recording, with_tiles(plan(recording.graph, products=found), found), timer


def test_the_library_multiplies_where_it_is_faster(tmp_path: Path) -> None:
    _, made, timer = chosen(0, tmp_path)
    assert len(externs(made)) == len(kernels(made)) == 1
    (contest,) = timer.contests
    assert isinstance(contest[0][0], ExternStep) and len(contest[0]) == 2
    assert len(contest) > 3 and all(len(way) == 1 and isinstance(way[0], KernelStep) for way in contest[1:])


@pytest.mark.parametrize("fastest", [1, 2, 3])
def test_the_fastest_tile_is_taken_is_right_and_remembered(fastest: int, tmp_path: Path) -> None:
    recording, made, timer = chosen(fastest, tmp_path)
    (step,) = kernels(made)
    assert len(made.steps) == 1 and step.kernel == timer.contests[0][fastest][0].kernel
    (value,) = (value for value in recording.graph.outputs() if value.version)
    wanted = linear(*INPUTS)
    assert_same(typed(execute(recording, made)[value.buffer.index], wanted), wanted, 2e-2, 2e-2)
    compile_all(made)
    _, again, asked = chosen(fastest, tmp_path)
    assert not asked.contests and kernels(again)[0].kernel == step.kernel


def test_a_product_alone_is_the_librarys(tmp_path: Path) -> None:
    _, made, timer = chosen(1, tmp_path, lambda x, w, b: F.linear(x, w, b).sum(0))
    assert not timer.contests and len(externs(made)) == 1


@pytest.mark.parametrize("program", [lambda x, w, b: (x[:, :8] @ w[:, :8].t()) + b,
                                     lambda x, w, b: (x.float() @ w.float().t()) + b], ids=["too thin", "float32"])  # fmt: skip
def test_what_a_template_cannot_multiply_stays(program: Callable[..., Any], tmp_path: Path) -> None:
    _, made, timer = chosen(1, tmp_path, program)
    assert not timer.contests and len(externs(made)) == 1


def test_neighbours_are_loaded_side_by_side() -> None:
    recording, _ = record(linear, tensor(512, 256), tensor(384, 256), tensor(384))
    (step,) = kernels(templated(recording))
    ptx = compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"]
    assert "wgmma" in ptx and "0x10" in ptx[ptx.index("cp.async") :].split(";")[0], "16 bytes a thread, to tensor cores"


def test_two_products_and_reductions_keep_kernels_of_their_own() -> None:
    recording, _ = record(lambda x, w, b: (F.linear(x, w, b) * F.linear(x + 1, w, b)).softmax(-1), *INPUTS)
    made = templated(recording)
    assert len(kernels(made)) == 4 and any("suit no other product" in refusal.reason for refusal in made.refusals)


def test_an_aten_call_runs_on_scratch() -> None:
    recording, outs = record(lambda x, w: x @ w.t(), *INPUTS[:2])
    (node,) = recording.graph.nodes
    memory = {buffer.index: recording.inputs.get(buffer.index, torch.zeros(buffer.nbytes, dtype=torch.uint8))
              for buffer in recording.graph.buffers}
    result = bench.aten_call(node, lambda value: memory[value.buffer.index])()
    torch.testing.assert_close(result, outs[0])


def test_the_setting_is_off_unless_asked_for() -> None:
    assert not settings.read({}).templates and settings.read({"LAZYSCHED_TEMPLATES": "1"}).templates
