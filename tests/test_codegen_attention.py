"""Attention in kernels of our own: numbers, what drops, the plan around them, and why ATen is called instead."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attentions import CUDNN, FLASH, NAMES, SEED, START, Case, bits_of
from graphs import CACHE, compile_all, execute, kernels, typed
from triton.backends.nvidia.compiler import get_ptxas

from codegen import attention, triton_compile
from codegen.attention_draws import PRECISION
from codegen.attention_source import FORWARD, KEYS, QUERIES, without_drops
from codegen.combo import combine
from codegen.engine import Context
from codegen.fuse import plan
from codegen.kernel import KernelStep, Offset, Plan
from ir_nodes import Layout, settings
from ir_nodes.remarks import Remarks
from tests.device import ON_GPU

CASES = {
    "causal": Case(), "other keys": Case((1, 2, 128, 192, 64), causal=False),
    "float16, a scale": Case((2, 2, 64, 64, 64), p=0.5, scale=0.3, dtype=torch.float16),
    "flash": Case((1, 5, 192, 192, 64), target=FLASH), "two gradients": Case((1, 1, 128, 128, 64), backwards=2),
    "p is 0": Case((1, 2, 64, 64, 64), p=0.0), "all drops": Case((1, 2, 64, 128, 64), causal=False, p=1.0),
    "no gradient": Case((1, 1, 64, 64, 64), backwards=0),
}  # fmt: skip
CASES |= {f"{name}, none drops": replace(case, p=None, tensors={}, access={}) for name, case in CASES.items() if case.p == 0.25}
CASES["float16, a scale, none drops"] = Case((2, 2, 64, 64, 64), p=None, scale=0.3, dtype=torch.float16)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.skipif(ON_GPU, reason="the interpreter runs kernels that are made for it; a GPU's: test_lazy_backend_attention.py")
def test_result_and_gradients_are_those_of_the_definition(case: Case) -> None:
    """Where it is known that nothing drops, nothing is drawn, and the generator does not move on."""
    recording = case.recording()
    made = case.planned(recording)
    draws = case.p is not None
    assert [step.kernel.name for step in kernels(made)] == [*NAMES[:draws], NAMES[1], *NAMES[2:] * case.backwards]
    assert any(name in ("p", "words") for step in kernels(made) for name, _ in step.kernel.signature) == draws
    compile_all(made)
    kept = bits_of(case, made, recording) if draws else 1.0
    memory = execute(recording, made)
    for name, wanted in case.reference(kept).items():
        found = typed(memory[case.access[name].buffer.index], case.tensors[name])
        assert torch.isfinite(found).all()
        assert (found.double() - wanted).norm() <= (0.012 if case.dtype is torch.bfloat16 else 0.003) * wanted.norm() + 1e-9, name
    seed, offset = memory[case.access["state"].buffer.index].view(torch.int64).tolist()
    increments = [arg.increment for step in kernels(made) for arg in step.args if isinstance(arg, Offset)]
    assert (seed, offset) == (SEED, START + sum(increments)) and len(increments) == draws


@pytest.mark.parametrize("text", [FORWARD, QUERIES, KEYS], ids=["forward", "queries", "keys"])
def test_no_word_of_dropping_is_left_where_nothing_drops(text: str) -> None:
    found = without_drops(text)
    assert not [word for word in ("drop", "kept", "words", "share", "_inverse") if word in found]
    assert text.count("tl.dot(") == found.count("tl.dot(") and text.count("_add(") == found.count("_add(")


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_as_many_drop_as_asked_and_none_like_its_neighbour(p: float) -> None:
    case = Case((2, 4, 256, 256, 64), causal=False, p=p)
    recording = case.recording()
    made = case.planned(recording)
    bits = bits_of(case, made, recording).double()
    share, count = 1 - p, bits.numel()
    spread = (share * (1 - share) / count) ** 0.5
    assert abs(bits.mean() - share) < 5 * spread + 0.5 / (1 << PRECISION)
    for dim in range(4):
        shifted = bits.roll(1, dim)
        both = ((bits - share) * (shifted - share)).mean()
        assert abs(both) < 5 * share * (1 - share) / count**0.5, f"neighbours along {dim} drop together"
    state = recording.inputs[case.access["state"].buffer.index].view(torch.int64)
    for change in (torch.tensor([1, 0]), torch.tensor([0, 4])):  # another seed, a later call
        state += change
        other = bits_of(case, made, recording).double()
        assert abs(((bits - share) * (other - share)).mean()) < 5 * share * (1 - share) / count**0.5
        bits = other


def test_the_generator_moves_on_as_eager_modes_does() -> None:
    for target, wanted in ((CUDNN, 2 * 3 * 128 * 128), (FLASH, 2 * 3 * 32)):
        recording = Case(target=target).recording()
        assert attention.increment_of(recording.graph.nodes[0]) == wanted


REFUSED = [
    (Case(mismatch=True), "another share"), (Case(held="sums"), "no part of the same recording"), (Case(biased=True), "a bias"),
    (Case((2, 3, 128, 128, 32)), "32 elements, not 64"), (Case((2, 3, 100, 100, 64)), "no multiple of 64"),
    (Case((2, 3, 64, 128, 64)), "other queries than keys"), (Case(dtype=torch.float32), "16 bits"),
    (Case((1, 1, 1088, 1088, 64), p=None), "nobody has measured"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_aten_is_called_for_a_reason_that_is_told(case: Case, reason: str) -> None:
    recording, remarks = case.recording(), Remarks()
    made = case.planned(recording, remarks)
    assert not kernels(made)
    ((remark, _),) = remarks.all()
    assert not remark.done and reason in remark.why


def test_what_drops_may_be_longer_than_what_does_not() -> None:
    long = Case((1, 1, 1088, 1088, 64))
    assert kernels(long.planned(long.recording()))


@pytest.mark.parametrize("values", [{}, {"attention": "triton", "disable": frozenset({"attention"})}], ids=["unasked", "off"])
def test_nothing_happens_unless_asked(values: dict[str, Any]) -> None:
    recording = Case().recording()
    made = plan(recording.graph)
    with settings.override(**values):
        assert attention.use_kernels(made, recording.graph, Context(True, 0, CACHE, numbers=recording.scalars)) is made


def test_programs_that_may_draw_again_are_left_to_aten() -> None:
    """Else a checkpointed layer might drop other elements in its second run, which another recording holds."""
    recording, remarks = Case().recording(), Remarks()
    made = plan(recording.graph)
    assert attention.with_kernels(made, recording.graph, remarks, redraws=True) is made
    assert "generator's state" in remarks.all()[0][0].why
    recording = Case(p=None).recording()
    assert len(kernels(attention.with_kernels(plan(recording.graph), recording.graph, redraws=True))) == 3, "nothing is drawn"


def test_older_gpus_are_left_to_aten_and_so_are_programs_that_may_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recording, remarks = Case().recording(), Remarks()
    made = plan(recording.graph)
    with settings.override(attention="triton"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        context = Context(True, 0, CACHE, numbers=recording.scalars, remarks=remarks)
        assert len(kernels(attention.use_kernels(made, recording.graph, context))) == 4
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert attention.use_kernels(made, recording.graph, context) is made
        assert "Hopper" in remarks.all()[-1][0].why
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        context = Context(True, 0, CACHE, numbers=recording.scalars, remarks=remarks, redraws=True)
        assert attention.use_kernels(made, recording.graph, context) is made


def test_layouts_that_kernels_do_not_read_are_refused() -> None:
    def why(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> str:
        return attention.why_not_rows(Layout(torch.bfloat16, size, stride, offset))

    assert why((2, 3, 128, 64), (3 * 128 * 64, 128 * 64, 64, 1)) == ""
    assert why((2, 3, 128, 64), (0, 0, 0, 0)) == "a head's elements don't lie one behind the other"
    assert "16-byte" in why((2, 3, 128, 64), (128 * 196, 64, 196, 1)) and "16-byte" in why((1, 1, 64, 64), (4096, 4096, 64, 1), 4)
    for stride in ((1 << 31, 64, 192, 1), (64, 1 << 30, 192, 1), (64, 64, 1 << 24, 1)):
        assert why((2, 3, 128, 64), stride) == "it is too large"


def test_steps_wait_for_what_they_read_and_share_no_launch() -> None:
    case = Case(backwards=2)
    recording = case.recording()
    made = case.planned(recording)
    makers: dict[Any, int] = {}
    for index, (step, needs) in enumerate(zip(made.steps, made.needs)):
        for read in step.reads:  # type: ignore[union-attr]
            if read in makers:
                assert ancestors(made, index) >= {makers[read]}
        assert all(need < index for need in needs)
        makers.update(dict.fromkeys(step.writes, index))  # type: ignore[union-attr]
    assert [step.kernel.name for step in kernels(combine(made))] == [step.kernel.name for step in kernels(made)]
    assert len({one.id for one in made.temporaries}) == len(made.temporaries) == 4


def ancestors(made: Plan, index: int) -> set[int]:
    found, waiting = set(), list(made.needs[index])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += made.needs[one]
    return found


def long(p: float | None, causal: bool, sums: str) -> list[KernelStep]:
    """The launches that attend, of kernels as they are for long sequences. ``sums``: gradients that are summed for biases."""
    case = Case((4, 12, 1024, 1024, 64), causal=causal, p=p)
    recording = case.recording()
    for letter in sums:
        case.add_sum(recording, f"d{letter}0")
    attention.with_sums(recording.graph)
    found = [step for step in kernels(case.planned(recording)) if step.kernel.name in NAMES[1:]]
    assert [step.kernel.source.count("_partial + ") for step in found] == [0, "q" in sums, ("k" in sums) + ("v" in sums)]
    return found


@pytest.mark.parametrize("sums", ["", "v", "qkv"])
@pytest.mark.parametrize("p", [0.25, None], ids=["some drop", "none drop"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
def test_products_are_the_tensor_cores_and_words_do_not_spill(p: float | None, causal: bool, sums: str) -> None:
    """Bits become a tile of scores in registers: only words pass through shared memory."""
    for step in long(p, causal, sums):
        ptx = triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"]
        assert "wgmma.mma_async" in ptx and "ld.local" not in ptx and "st.local" not in ptx
        assert "mma.sync" not in ptx.replace("wgmma.mma_async.sync", "")


@pytest.mark.parametrize("sums", ["", "v", "qkv"])
@pytest.mark.parametrize("p", [0.25, None], ids=["some drop", "none drop"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
def test_the_assembler_lets_products_overlap(p: float | None, causal: bool, sums: str, tmp_path: Path) -> None:
    """It tells where it does not, which is a matter of how loops are written (C7515)."""
    for step in long(p, causal, sums):
        told = assembled(step, tmp_path)
        assert "registers" in told and "serialized" not in told, told


def assembled(step: KernelStep, folder: Path) -> str:
    """What the assembler tells of a kernel."""
    ptx = folder / f"{step.kernel.name}.ptx"
    ptx.write_text(triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx, "-o", folder / "cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("p", [0.25, None], ids=["some drop", "none drop"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
def test_sums_leave_room_for_as_many_programs(p: float | None, causal: bool, tmp_path: Path) -> None:
    """A multiprocessor has 64 Ki registers, of which each thread takes a multiple of eight."""
    def programs(step: KernelStep) -> int:
        used = int(re.findall(r"Used (\d+) registers", assembled(step, tmp_path))[-1])
        return 65536 // (-(-used // 8) * 8 * 32 * step.kernel.num_warps)

    assert [*map(programs, long(p, causal, "qkv"))] == [*map(programs, long(p, causal, ""))]
