"""Dropout with Philox in the kernel: the numbers that ATen's CUDA kernels draw, emulated here thread by thread."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from graphs import CACHE, compile_all, execute, externs, kernels, typed
from recording import Recording, layout_of

from codegen import triton_compile
from codegen.draws import vector_size
from codegen.fuse import plan
from codegen.kernel import Offset, Plan
from codegen.tuning import HOPPER, INTERPRETER, Tuning
from ir_nodes import Access, BufferKind, Graph, Layout, settings

BLOCKS = 2  # so that threads take several turns in small tensors
SMALL = Tuning(philox_blocks=BLOCKS)
SEED, START = 0x123456789ABCDEF, 8


def philox(counter: tuple[int, int, int, int], seed: int) -> list[int]:
    a, b, c, d = counter
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ low, right & 0xFFFFFFFF, (left >> 32) ^ d ^ high, left & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def uniforms(numel: int, vector: int, seed: int, offset: int, blocks: int) -> list[numpy.float32]:
    """What each element is compared with, by walking through fused_dropout_kernel(_vec) as each thread does."""
    grid = min(blocks, -(-numel // 256))
    threads = grid * 256
    out = [numpy.float32(0)] * numel

    def draw(thread: int, call: int) -> list[numpy.float32]:
        words = philox(((offset // 4 + call) & 0xFFFFFFFF, (offset // 4 + call) >> 32, thread, 0), seed)
        scale, half = numpy.float32(2.0**-32), numpy.float32(2.0**-33)
        return [numpy.float32(word) * scale + half for word in words]

    for thread in range(threads):
        call, index = 0, thread * vector if vector > 1 else thread
        while index < numel:
            if vector == 1:
                for lane, number in enumerate(draw(thread, call)):
                    if index + threads * lane < numel:
                        out[index + threads * lane] = number
                call, index = call + 1, index + threads * 4
                continue
            calls = max(vector // 4, 1)
            numbers = [number for one in range(calls) for number in draw(thread, call + one)]
            out[index : index + vector] = numbers[:vector]
            call, index = call + calls, index + threads * vector
    return out


def test_the_reference_gives_philoxs_known_answers() -> None:
    assert philox((0, 0, 0, 0), 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def dropout_graph(x: torch.Tensor, then: str | None = None) -> tuple[Recording, Access, Access, Access]:
    """native_dropout of ``x`` and what ``then`` makes of its result; (recording, result, mask, state)."""
    graph = Graph()
    source = Access(graph.add_buffer(x.untyped_storage().nbytes(), BufferKind.INPUT), layout_of(x))
    state = Access(graph.add_buffer(16, BufferKind.GENERATOR, live=True), Layout.contiguous(torch.uint8, (16,)), "rw")
    like = torch.empty_like(x)

    def fresh(dtype: torch.dtype, live: bool = True) -> Access:
        layout = layout_of(like.to(dtype))
        return Access(graph.add_buffer(layout.nbytes, live=live), layout, "w")

    out, mask = fresh(x.dtype, live=then is None), fresh(torch.bool)
    graph.record("aten::native_dropout", [source, graph.add_scalar("float"), True], [out, mask], [state])
    result = out
    if then is not None:
        result = fresh(x.dtype)
        read = Access(out.buffer, out.layout)
        others: list[object] = [-1, False] if then == "_softmax" else [read, graph.add_scalar("int")]
        graph.record(f"aten::{then}", [read, *others], [result])
    inputs = {source.buffer.index: typed_bytes(x), state.buffer.index: torch.tensor([SEED, START]).view(torch.uint8)}
    return Recording(graph, inputs, [0.3, 1]), result, mask, state


def typed_bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()


def test_rows_in_strips_draw_what_eager_draws() -> None:
    """A row's strips each begin at another of ATen's vectors."""
    for dtype in (torch.float32, torch.bfloat16):
        x = data(6, 768, dtype=dtype)
        recording, result, *_ = dropout_graph(x, "_softmax")
        made = plan(recording.graph, tuning=SMALL.changed("few=0"))
        (step,) = kernels(made)
        assert "i1_2" in step.kernel.source and "tl.join" in step.kernel.source
        drawn = torch.tensor(numpy.array(uniforms(x.numel(), vector_size(layout_of(x)), SEED, START, BLOCKS))).view(x.shape)
        kept = (x.float() * (drawn < 0.7) * (1 / torch.tensor(0.7))).to(dtype)
        made_of = typed(execute(recording, made)[result.buffer.index], x)
        torch.testing.assert_close(made_of, kept.softmax(-1), rtol=1e-2, atol=1e-5)
        compile_all(made)


def test_elements_that_lie_far_apart_share_a_call_of_philox() -> None:
    """Of an odd number of elements: a program takes what ATen's threads do in one call, and needs masks only at the end."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for numel in (513, 3333, 2047, 2049, 4097, 65537):
            source = kernels(check_dropout(data(numel, dtype=dtype)))[0].kernel.source
            assert source.count("= _philox(") == 1 and "if begin + 3 * s0 + B1 <= n1:" in source
            plain, cut = source.split("if begin + ")[1].split("else:")
            assert "mask" not in plain and "mask" in cut
    check_dropout(data(3333), then="add.Tensor")
    source = kernels(check_dropout(data(511)))[0].kernel.source
    assert "begin + 3" not in source, "no thread has a second element"


def check_dropout(x: torch.Tensor, tuning: Tuning = SMALL, then: str | None = None) -> Plan:
    recording, result, mask, state = dropout_graph(x, then)
    made = plan(recording.graph, tuning=tuning)
    assert len(kernels(made)) == 1 and not externs(made)
    memory = execute(recording, made)
    vector = vector_size(layout_of(x))
    drawn = torch.tensor(numpy.array(uniforms(x.numel(), vector, SEED, START, BLOCKS)))
    like = torch.empty_like(x)
    if vector > 1:  # vectors run along memory
        drawn = torch.as_strided(drawn, x.size(), x.stride())
    keep = drawn.reshape(x.shape) < 1 - 0.3
    wide = x.double() if x.dtype is torch.float64 else x.float()
    scale = 1 / torch.tensor(1 - 0.3, dtype=torch.float32).to(wide.dtype) if x.dtype is not torch.float64 else 1 / (1 - 0.3)
    wanted = (wide * keep * scale).to(x.dtype)
    torch.testing.assert_close(typed(memory[mask.buffer.index], like.bool()), keep, rtol=0, atol=0)
    if then is not None:
        wanted = wanted + wanted
    torch.testing.assert_close(typed(memory[result.buffer.index], like), wanted, rtol=0, atol=0)
    grid = min(BLOCKS, -(-x.numel() // 256))
    moved = ((x.numel() - 1) // (256 * grid * 4) + 1) * 4
    assert memory[state.buffer.index].view(torch.int64).tolist() == [SEED, START + moved]
    compile_all(made)
    return made


def data(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [5000, 2996, 2002, 1023, 1], ids=str)
def test_dropout_draws_what_eager_draws(dtype: torch.dtype, numel: int) -> None:
    check_dropout(data(numel, dtype=dtype))


def test_neighbours_share_a_call_of_philox() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert "tl.join" in kernels(check_dropout(data(24, 40, dtype=dtype)))[0].kernel.source
    assert "tl.join" not in kernels(check_dropout(data(11, 5)))[0].kernel.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_are_drawn_where_their_elements_lie(dtype: torch.dtype) -> None:
    """Nothing is exchanged between threads, and ten rounds of two products serve four elements."""
    (step,) = kernels(plan(dropout_graph(data(1 << 20, dtype=dtype), "add.Tensor")[0].graph))
    built = triton_compile.compile_for_hopper(step.kernel, CACHE)
    elements = dict(step.kernel.constexprs)["B1"] // (32 * step.kernel.num_warps)
    assert built.shared == 0
    wide = len(re.findall(r"mul\.(?:wide|hi)\.u32", built.handle.asm["ptx"]))
    assert wide <= elements // 4 * 20 + 4, wide


def test_numbers_are_not_drawn_again_for_each_pass_over_a_row() -> None:
    """A row that would be walked thrice if it were only read."""
    recording, result, _, _ = dropout_graph(data(64, 2501, dtype=torch.bfloat16))
    sums = Access(recording.graph.add_buffer(2 * 64 * 2501, live=True), result.layout, "w")
    recording.graph.record("aten::_softmax", [Access(result.buffer, result.layout), 1, False], [sums])
    (step,) = kernels(plan(recording.graph))
    assert "_philox(seed" in step.kernel.source and "tl.range" not in step.kernel.source


@pytest.mark.parametrize("make", [
    lambda: data(12, 40).t(), lambda: data(4, 6, 10).permute(2, 0, 1), lambda: data(30, 40)[:, 3:30],
    lambda: data(1, 40).expand(20, 40),
    lambda: data(81)[1:], lambda: data(82)[2:], lambda: data(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)],
    ids=["transposed", "permuted", "window", "expanded", "by one", "by two", "channels_last"])
def test_order_of_numbers_follows_memory_format_and_alignment(make: object) -> None:
    check_dropout(make())  # type: ignore[operator]


def test_what_follows_shares_the_kernel() -> None:
    made = check_dropout(data(24, 40, dtype=torch.bfloat16), then="add.Tensor")
    assert len(kernels(made)[0].writes) == 2  # the mask and the sum


def test_a_mask_that_nobody_reads_is_not_stored_and_dead_draws_still_move_the_generator() -> None:
    recording, out, mask, state = dropout_graph(data(24, 40))
    mask.buffer.live = False
    (step,) = kernels(plan(recording.graph))
    assert len(step.writes) == 1
    out.buffer.live = False
    (step,) = kernels(plan(recording.graph))
    assert [arg.increment for arg in step.args if isinstance(arg, Offset)] == [4]
    memory = execute(recording, plan(recording.graph))
    assert memory[state.buffer.index].view(torch.int64).tolist() == [SEED, START + 4]


def test_two_draws_keep_their_order_in_two_kernels() -> None:
    recording, out, _, state = dropout_graph(data(24, 40))
    graph = recording.graph
    again = [Access(graph.add_buffer(3840, live=True), out.layout, "w"), Access(graph.add_buffer(960, live=True),
             Layout.contiguous(torch.bool, (24, 40)), "w")]
    graph.record("aten::native_dropout", [Access(out.buffer, out.layout), graph.add_scalar(), True], again, [state])
    recording.scalars.append(0.5)
    made = plan(graph)
    assert [step.nodes[0].index for step in kernels(made)] == [0, 1]
    assert "each draws random numbers" in [refusal.reason for refusal in made.refusals]
    assert execute(recording, made)[state.buffer.index].view(torch.int64).tolist() == [SEED, START + 8]


def test_dropping_everything_gives_zeros() -> None:
    recording, out, mask, _ = dropout_graph(data(40))
    recording.scalars[0] = 1.0
    memory = execute(recording, plan(recording.graph))
    assert not typed(memory[out.buffer.index], data(40)).any() and not memory[mask.buffer.index].any()


def test_draws_are_left_to_aten_where_switched_off_or_without_philox(monkeypatch: pytest.MonkeyPatch) -> None:
    recording, *_ = dropout_graph(data(40))
    assert [step.reason for step in externs(plan(recording.graph, tuning=INTERPRETER))] == ["its generator is not Philox"]
    monkeypatch.setattr(settings, "enabled", lambda name: name != "fused_random")
    assert [step.reason for step in externs(plan(recording.graph, tuning=HOPPER))] == ["fused_random is switched off"]



@pytest.mark.parametrize("row, kind, together", [
    (1024, torch.bfloat16, True), (768, torch.bfloat16, True), (768, torch.float32, True), (3072, torch.bfloat16, True),
    (8192, torch.bfloat16, True), (320, torch.bfloat16, False), (640, torch.bfloat16, False),
])  # fmt: skip
def test_rows_are_reduced_beside_draws_where_that_saves_time(row: int, kind: torch.dtype, together: bool) -> None:
    """The sum of what dropout leaves and a residual, which is kept, and its softmax. In float32 more memory moves."""
    recording, *made_there = dropout_graph(torch.empty((1 << 22) // row, row, dtype=kind))
    graph, result, layout = recording.graph, made_there[0], made_there[0].layout
    for access in made_there:
        access.buffer.live = False
    residual = Access(graph.add_buffer(layout.nbytes, BufferKind.INPUT), layout)
    total, softmax = (Access(graph.add_buffer(layout.nbytes, live=True), layout, "w") for _ in range(2))
    graph.record("aten::add.Tensor", [Access(result.buffer, layout), residual, 1], [total])
    graph.record("aten::_softmax", [Access(total.buffer, layout), 1, False], [softmax])
    made = plan(graph, tuning=HOPPER)
    apart = any(refusal.reason.startswith("its random numbers delay rows") for refusal in made.refusals)
    assert (len(kernels(made)) == 1) is together and apart is not together


@pytest.mark.parametrize("rows, row, together", [(1024, 1024, True), (2048, 1003, False), (1025, 1027, False), (16, 1003, True)])
def test_rows_are_not_reduced_beside_draws_of_one_number_each(rows: int, row: int, together: bool) -> None:
    """A Philox call gives four numbers, to neighbours where ATen's threads work on vectors of them."""
    recording, result, _, _ = dropout_graph(torch.empty(rows, row, dtype=torch.bfloat16))
    graph = recording.graph
    softmax = Access(graph.add_buffer(result.layout.nbytes, live=True), result.layout, "w")
    graph.record("aten::_softmax", [Access(result.buffer, result.layout), 1, False], [softmax])
    made = plan(graph, tuning=HOPPER)
    kept = any(refusal.reason.startswith("each of its random numbers takes a call of its own") for refusal in made.refusals)
    assert len(kernels(made)) == (1 if together else 2) and kept == (not together)
