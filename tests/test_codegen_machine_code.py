"""What kernels' machine code must be like for an H200: wide loads, few instructions for each element. Compiled, not run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
import triton
from graphs import CACHE, check, kernels, record

from codegen import triton_compile
from codegen.fuse import plan
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

BF16 = torch.bfloat16
BUSY = HOPPER.changed("few_lane=99")  # as where programs fill the machine: then each thread loads as much as an instruction can


def ptx(program: Callable[..., Any], *inputs: torch.Tensor, tuning: Tuning = HOPPER) -> str:
    """The only kernel's instructions."""
    (step,) = kernels(plan(record(program, *inputs)[0].graph, tuning=tuning))
    return str(triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"])


def count(text: str, instruction: str) -> int:
    return len(re.findall(rf"\b{re.escape(instruction)}\b", text))


def rows(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(size).to(dtype)


def test_rounding_between_steps_is_one_instruction() -> None:
    chain = lambda x, y: (x.sigmoid() + y).sigmoid() - x  # noqa: E731
    text = ptx(chain, rows(256, 512), rows(256, 512))
    assert count(text, "cvt.rn.bf16x2.f32") and not count(text, "cvt.rn.bf16.f32")
    with settings.override(disable="packed_rounding"):
        plain = check(chain, rows(256, 512), rows(256, 512), count=1)
    packed = check(chain, rows(256, 512), rows(256, 512), count=1)
    assert "_bf16" in kernels(packed)[0].kernel.source and "_bf16" not in kernels(plain)[0].kernel.source
    product = lambda x, y: x * y * x  # noqa: E731
    assert "_bf16" not in kernels(plan(record(product, rows(256, 512), rows(256, 512))[0].graph))[0].kernel.source
    assert count(ptx(product, rows(256, 512), rows(256, 512)), "mul.bf16x2"), "the machine's own instructions for two at a time"
    older = check(chain, rows(256, 512), rows(256, 512), count=1, tuning=HOPPER.changed("packs=0"))
    assert "_bf16" not in kernels(older)[0].kernel.source


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_in_16_bits_divides_and_exponentiates_once(approximate: str) -> None:
    text = ptx(lambda x: F.gelu(x, approximate=approximate), rows(64, 512))
    lane = count(text, "ex2.approx.ftz.f32")
    assert lane and count(text, "div.approx.ftz.f32") == lane
    assert not count(text, "div.full.f32") and not count(text, "ex2.approx.f32")


def test_a_softmax_divides_once_for_a_row() -> None:
    """A division takes a branch wherever a mask has left zero: on an H200, 0.35 ms where the bytes take 0.26."""
    text = ptx(lambda x: x.softmax(-1), rows(512, 4096, dtype=torch.float32))
    assert count(text, "div.rn.f32") == 1 and count(text, "fma.rn.f32") > 4


@pytest.mark.parametrize("length", [768, 5003, 50_257])
def test_a_softmax_in_16_bits_needs_no_care_for_tiny_exponentials(length: int) -> None:
    """They are 2^32 times as large: nothing asks whether the machine would take them for zero."""
    program = lambda x: x.softmax(-1)  # noqa: E731
    many = HOPPER.changed("few=2,programs=2")
    with settings.override(disable="long_norms"):
        text = ptx(program, rows(3, length), tuning=many)
    assert count(text, "ex2.approx.ftz.f32") and not count(text, "ex2.approx.f32")
    with settings.override(disable="long_norms,raised_exponentials,scaled_exponentials"):
        assert count(ptx(program, rows(3, length), tuning=many), "ex2.approx.f32")


def test_tiny_shares_of_a_softmax_are_kept() -> None:
    """Denormal ones, and those of rows whose maximum is far from zero."""
    x = torch.zeros(3, 700)
    x[0, 1:], x[1], x[1, 5], x[2] = -90.0, -3e38, 3e38, -3.3895e38
    check(lambda x: x.softmax(-1), x.bfloat16(), count=1, rtol=8e-3, atol=0)
    assert x[0].bfloat16().float().softmax(-1).bfloat16()[1] > 0
    gradient = lambda x, g: torch.ops.aten._softmax_backward_data(g, x.softmax(-1), -1, x.dtype)  # noqa: E731
    check(gradient, rows(3, 700), rows(3, 700), count=1)
    large = torch.full((3, 700), 80.0).bfloat16()
    check(lambda x: [x.exp() * x.sum(-1, keepdim=True) * 1e-4, x.softmax(-1), x.exp()], large, count=1)
    scaled = lambda x: x.exp() * torch.rsqrt(x.float().sum(-1, keepdim=True))  # noqa: E731
    check(scaled, large, count=1)
    check(scaled, large.half() / 8, count=1)


def test_tanh_has_no_branches() -> None:
    text = ptx(torch.tanh, rows(64, 512, dtype=torch.float32))
    assert not count(text, "bra") and count(text, "div.approx.ftz.f32")


def test_tanh_is_as_exact_as_libdevices() -> None:
    rare = torch.tensor([0.0, 1e-30, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([torch.linspace(-11, 11, 4001), torch.linspace(-0.7, 0.7, 2001), rare])
    check(torch.tanh, x, rtol=3e-7, atol=0.0)


def test_rows_off_boundaries_are_read_and_written_in_vectors() -> None:
    """An odd row's ends, too: what is stored apart is a vector's part at either end."""
    for program in (lambda x, y: x * y, lambda x, y: x.softmax(-1), lambda x, y: F.layer_norm(x + y, (5003,))):
        text = ptx(program, rows(64, 5003), rows(64, 5003))
        assert "ld.global.v4.b32" in text and not count(text, "ld.global.b16")
        assert "st.global.v4.b32" in text


def padded(count: int, length: int, room: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Rows of ``length`` elements in the first part of rows of ``room``."""
    return torch.randn(count, room).to(dtype)[:, :length]


def loss_gradient(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    share = torch.log_softmax(logits, 1)
    aten = torch.ops.aten
    loss, weight = aten.nll_loss_forward(share, target, None, 1, -100)
    return aten._log_softmax_backward_data(
        aten.nll_loss_backward(loss, share, target, None, 1, -100, weight), share, 1, torch.bfloat16)


@pytest.mark.parametrize("length, room", [(5002, 5008), (5003, 5016), (1000, 1000)])
def test_rows_that_end_off_boundaries_are_read_and_written_in_vectors(length: int, room: int) -> None:
    programs: tuple[Callable[..., Any], ...] = (torch.Tensor.add_, lambda x, y: x.copy_(y.softmax(-1)),
                                                lambda x, y: x.copy_(F.layer_norm(x + y, (length,))),
                                                lambda x, y: (x + y).logsumexp(-1))
    for program in programs:
        text = ptx(program, padded(64, length, room), padded(64, length, room), tuning=BUSY)
        assert "ld.global.v4.b32" in text and not count(text, "ld.global.b16")
        check(program, padded(5, length, room), padded(5, length, room), atol=5e-2, rtol=2e-2)
    check(lambda x, y: ((x + y).sum(0), x.float().sum(1)), padded(5, length, room), padded(5, length, room), rtol=2e-2, atol=5e-2)
    looped = HOPPER.changed("persistent=512,looped=512,online=512,pointwise_block=512")
    for program in (lambda x: x.softmax(-1), lambda x: x.logsumexp(-1), torch.relu_):
        check(program, padded(5, length, room), tuning=looped)
    check(lambda x: x.argmax(-1), padded(3, length, room))


def test_what_lies_behind_a_rows_end_is_left_alone() -> None:
    def program(whole: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        whole[:, :5003].mul_(other[:, :5003])
        return whole

    for columns in (5008, 5016):
        check(program, rows(5, columns), rows(5, columns), count=1)


def test_a_losss_gradient_compares_a_place_in_one_instruction() -> None:
    target = torch.tensor([3, -100, 5002, 0])
    made = check(loss_gradient, padded(4, 5003, 5008), target, atol=1e-2, tuning=BUSY)
    (step,) = [step for step in kernels(made) if "backward" in step.kernel.name]
    text = str(triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"])
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    assert step.kernel.source.count("_bf16(t") >= 2, "the loss's gradient and log-softmax are rounded in one instruction each"
    assert count(text, "setp.eq.b64") < 4 and count(text, "setp.ne.b64") < 4


@pytest.mark.parametrize("length, room", [(50264, 50264), (50257, 50257)])
def test_a_losss_gradient_takes_few_instructions(length: int, room: int) -> None:
    """For each element one difference, two multiply-adds and one exponential; none asks whether it is the target's."""
    def program(logits: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        logits = logits.detach().requires_grad_()
        loss = F.cross_entropy(logits.float(), target)
        return [loss.detach(), *torch.autograd.grad(loss, logits)]

    target = torch.tensor([3, -100, length - 1, 0]).repeat(8)  # fewer rows, programs would share
    made = check(program, padded(32, length, room), target, atol=1e-2, tuning=HOPPER.changed("rewalked=1"))
    (step,) = [step for step in kernels(made) if "backward" in step.kernel.name]
    source = step.kernel.source.rpartition("for r in tl.range")[2]
    assert "[None, :] == t" not in source and "tl.exp2(" in source
    text = str(triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"]).partition("bar.sync")[2]
    assert not count(text, "ex2.approx.f32"), "denormal probabilities would take three instructions more"
    lanes = count(text, "st.global.v4.b32") * 8
    assert lanes and count(text, "fma.rn.f32") >= 2 * lanes


def test_powers_are_computed_before_what_stays_in_registers_meanwhile() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(y * 0.5) * y.exp()
        return inner * x.float().pow(3.0) + (inner + x).pow(2.0) * inner

    made = check(program, rows(64, 512, dtype=torch.float32), rows(64, 512, dtype=torch.float32), count=1)
    body = [line.strip() for line in kernels(made)[0].kernel.source.rpartition("def ")[2].splitlines() if " = " in line]
    computed = [line for line in body if not re.search(r"= (tl\.load|tl\.full|pid|tl\.program_id|i1|\w+ < )", line)]
    assert "_pow(" in computed[0], computed


def test_a_short_shares_loads_are_under_way_together() -> None:
    """In a branch of their own: ptxas puts what follows a load before the next one."""
    x = rows(768, 3072)
    made = check(lambda x: torch.linalg.vector_norm(x.float()), x, tuning=BUSY, rtol=1e-3, atol=0.0)
    first = kernels(made)[0]
    assert "if r + B1 <= end:" in first.kernel.source and "num_stages" not in first.kernel.source
    text = str(triton_compile.compile_for_hopper(first.kernel, CACHE).handle.asm["ptx"])
    assert len(re.findall(r"^\tld\.global\.v4", text, re.M)) == 4, "a thread's loads, without masks"
    for length in (9 * 4096, 9 * 4096 + 16, 70_000):
        check(lambda x: x.sum(), torch.ones(length).to(BF16), tuning=HOPPER.changed("split_numel=4096"))


def test_the_ends_of_rows_cost_columns_nothing_elsewhere() -> None:
    """Only programs whose block holds the end of the rows store parts of vectors, unless each row's ends lie elsewhere; none do
    where rows end with a vector."""
    def program(grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        out.copy_(torch.ops.aten.gelu_backward(grad, x))
        return [out, out.sum(0)]

    narrow = HOPPER.changed("column_width=16,column_tile=64,split_numel=256,split_column=16,covered=16")
    for length, room in ((101, 104), (101, 101), (99, 99), (96, 104), (16, 24)):
        made = check(program, *(padded(40, length, room) for _ in range(3)), tuning=narrow, atol=2e-2, rtol=2e-2)
        sources = [step.kernel.source for step in kernels(made)]
        cut = [source for source in sources if "(w1 == 0)" in source]
        assert len(cut) == (length % 8 > 0), (length, room)
        assert all(("if " in source) == (room % 8 == 0) for source in cut), (length, room)


def test_rows_that_would_leave_registers_empty_are_looped_over() -> None:
    for length, looped in ((5003, True), (4001, False), (5000, False), (1003, False)):
        (step,) = kernels(plan(record(lambda x: x.softmax(-1), rows(64, length))[0].graph))
        assert ("tl.range" in step.kernel.source) == looped, length
    check(lambda x: x.softmax(-1), rows(3, 5003), count=1)
    check(lambda x: (x, F.layer_norm(x, (3001,))), rows(5, 3001), count=1, atol=2e-2)


def test_programs_of_one_row_need_no_mask_for_it() -> None:
    (step,) = kernels(plan(record(lambda x: x.softmax(-1), rows(64, 4096))[0].graph))
    assert "m0" not in step.kernel.source


def test_rows_that_are_walked_again_may_be_kept_in_the_cache() -> None:
    """More threads for each row, so that fewer rows are under way; one pass over them needs no cache."""
    graphs = [record(program, rows(40, 50257))[0].graph for program in (lambda x: x.softmax(-1), lambda x: x.logsumexp(-1))]
    usual, kept = ([kernels(plan(graph, tuning=HOPPER.changed(text)))[0].kernel.num_warps for graph in graphs]
                   for text in ("", "resident=32"))
    assert usual == [4, 4] and kept == [32, 4]
    short = HOPPER.changed("persistent=64,looped=64,online=64,resident=1,cores=100")
    check(lambda x: x.softmax(-1), rows(2, 1003), count=1, tuning=short)


def loads_before_work(program: Callable[..., Any], rows: int) -> int:
    """How many operands are loaded before the first branch or reduction."""
    x, w = torch.randn(rows, 768), torch.randn(768)
    (step,) = kernels(check(program, x, x + 1, w, count=1, rtol=1e-4, atol=1e-4))
    text = step.kernel.source.split("\ndef ")[-1]
    return len(re.findall(r"\w+ = tl\.load\((p\d)", re.split(r"libdevice|tl\.reduce", text)[0]))


def test_operands_are_loaded_together() -> None:
    """An elementwise kernel's at any size; a reduction's where few programs have nothing else to do while they wait."""
    gate, norm = lambda x, y, w: F.silu(x) * y, lambda x, y, w: F.layer_norm(x + y, (768,), w, None)  # noqa: E731
    assert [loads_before_work(gate, rows) for rows in (64, 3000)] == [2, 2]
    assert loads_before_work(norm, 64) == 3
    (many,) = kernels(plan(record(norm, torch.randn(9000, 768), torch.randn(9000, 768), torch.randn(768))[0].graph))
    assert many.kernel.source.rindex("tl.load(") > many.kernel.source.rindex("tl.reduce(")
    with settings.override(disable="early_loads"):
        assert loads_before_work(gate, 64) == 1


def busy_chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Six results for each element, and a sum of what is made of them all."""
    made = [x]
    for _ in range(6):
        made.append((made[-1] * 0.5 + x.abs()).sigmoid() * made[-1] + 1)
    return (*made[1:], sum(one * x for one in made).sum())


def test_threads_have_as_few_elements_as_their_registers_hold(tmp_path: Path) -> None:
    recording, _ = record(busy_chain, torch.zeros(1 << 22, dtype=BF16))
    first = kernels(plan(recording.graph))[0].kernel
    elements = dict(first.constexprs)["B0"] * dict(first.constexprs)["B1"] // (32 * first.num_warps)
    assert elements <= 16
    file = tmp_path / "kernel.cubin"
    file.write_bytes(triton_compile.compile_for_hopper(first, CACHE).handle.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in usage, usage
