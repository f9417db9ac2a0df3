"""Matrices with odd rows get longer ones: who may, who may not, and the numbers stay."""

from __future__ import annotations

import ctypes
from typing import Callable, Iterator

import pytest
import torch
from graphs import assert_same, buffer_of, execute, record, typed

import lazy_backend
from codegen.fuse import plan
from codegen.kernel import KernelStep
from codegen.pad_products import pad_products
from codegen.pad_rows import NO_USE, with_rows
from codegen.tuning import HOPPER, INTERPRETER, Tuning
from ir_nodes import BufferKind, Graph, Layout, Node, settings
from ir_nodes.node import Value
from ir_nodes.verify import verify
from lazy_backend.explain import explained, optimised

M_PERTURB, FILL_WITH_FF = -6, 0x100
"""For glibc's `mallopt`: what `malloc` hands out is filled with 0xFF, the low byte of 0x100 turned round. Floats made of such
bytes are NaN."""


def head(weight: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = x.bfloat16() @ weight.bfloat16().t()
    return torch.nn.functional.cross_entropy(logits.float(), target)


def recorded(rows: int, columns: int, outside: bool = False, cast: bool = False) -> Graph:
    dtype = torch.float32 if cast else torch.bfloat16
    weight = torch.randn(columns, 16, device="lazysched", dtype=dtype).requires_grad_()
    x = torch.randn(rows, 16, device="lazysched", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(columns, (rows,), device="lazysched")
    lazy_backend.mark_step()
    logits = x @ weight.bfloat16().t()
    loss = torch.nn.functional.cross_entropy(logits.float(), target)
    loss.backward()
    kept = [loss, x.grad, weight.grad] + ([logits] if outside else [])
    return optimised([tensor for tensor in kept if tensor is not None])


def test_rows_of_logits_and_of_their_gradient_are_padded() -> None:
    graph = recorded(512, 2057)
    pad_products(graph)
    products = [node for node in graph.nodes if node.name == "mm"]
    assert len(products) == 3
    for node in products:
        layouts = [*(r.layout for r in node.reads), *(w.layout for w in node.writes)]
        assert node.relaid and not any(2057 in layout.stride for layout in layouts)
    forward, to_weight, to_x = products
    assert forward.writes[0].layout.size == (512, 2057)  # the weight is the user's, and has no rows more
    assert to_x.reads[0].layout.size == (512, 2057)
    assert to_weight.writes[0].layout.size == (2057, 16)  # a gradient that is seen outside


def test_sizes_are_rounded_up_where_all_is_internal() -> None:
    graph = recorded(512, 2057, cast=True)
    pad_products(graph)
    verify(graph)
    forward, to_weight, to_x = [node for node in graph.nodes if node.name == "mm"]
    assert forward.writes[0].layout.size == (512, 2064) and to_x.reads[0].layout.size == (512, 2064)
    assert to_weight.writes[0].layout.size == (2064, 16)
    zeros = [node for node in graph.nodes if node.name == "zero_" and node.instr < 0]
    assert sorted(node.writes[0].layout.size for node in zeros) == [(7, 16), (512, 7)]


def test_sums_of_a_padded_matrix_are_taken_before_its_padding_is_filled() -> None:
    weight, bias = (torch.randn(*size, device="lazysched").requires_grad_() for size in ((2057, 16), (2057,)))
    x, target = torch.randn(512, 16, device="lazysched").requires_grad_(), torch.randint(2057, (512,), device="lazysched")
    lazy_backend.mark_step()
    with torch.autocast("lazysched", torch.bfloat16):
        logits = torch.nn.functional.linear(x, weight, bias)
    torch.nn.functional.cross_entropy(logits.float(), target).backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    graph = optimised([x.grad, weight.grad, bias.grad])
    steps = plan(graph).steps
    verify(graph)
    (zero,) = [node for node in graph.nodes if node.name == "zero_" and node.instr < 0 and node.writes[0].layout.size == (512, 7)]
    (total,) = [node for node in graph.nodes if node.name == "sum"]
    assert total.reads[0].value is zero.writes[0].base
    assert any({"_log_softmax_backward_data", "sum"} <= {node.name for node in step.nodes}
               for step in steps if isinstance(step, KernelStep))


def test_what_is_seen_outside_keeps_its_rows() -> None:
    graph = recorded(512, 2057, outside=True)
    refused = pad_products(graph)
    assert "its memory is seen outside" in refused.values()


def test_rows_stay_where_another_matrix_of_their_product_has_odd_ones() -> None:
    """A vector of each is loaded, or of none."""
    x, odd, even = (torch.randn(*size, device="lazysched").bfloat16() for size in ((512, 2057), (64, 2057), (2057, 64)))
    lazy_backend.mark_step()
    graph = optimised([torch.nn.functional.linear(x.tanh(), odd)])
    assert NO_USE in pad_products(graph).values()
    assert not any(node.relaid for node in graph.nodes)
    graph = optimised([x.tanh() @ even])
    pad_products(graph)
    assert any(node.relaid for node in graph.nodes)


def test_even_rows_stay() -> None:
    graph = recorded(512, 2064)
    pad_products(graph)
    assert not any(node.relaid for node in graph.nodes)


def test_the_switch_and_the_kernels() -> None:
    with settings.override(disable="pad_rows"):
        plain = plan(recorded(512, 2057))
    padded = plan(recorded(512, 2057))
    assert any(node.relaid for step in padded.steps for node in (step.nodes if isinstance(step, KernelStep) else (step.node,)))
    assert len(padded.steps) <= len(plain.steps)


def test_layouts_of_rows() -> None:
    whole = Layout.contiguous(torch.bfloat16, (4, 8, 7))
    assert with_rows(whole, 7, 8, 2) == Layout(torch.bfloat16, (4, 8, 7), (64, 8, 1))
    assert with_rows(Layout(torch.bfloat16, (7, 32), (1, 7)), 7, 8, 2) == Layout(torch.bfloat16, (7, 32), (1, 8))
    assert with_rows(Layout(torch.bfloat16, (31, 7), (7, 1), 7), 7, 8, 2) == Layout(torch.bfloat16, (31, 7), (8, 1), 8)
    assert with_rows(Layout(torch.bfloat16, (32, 3), (7, 2), 2), 7, 8, 2) == Layout(torch.bfloat16, (32, 3), (8, 2), 2)
    assert with_rows(Layout(torch.bfloat16, (224,), (1,)), 7, 8, 2) is None
    assert with_rows(Layout(torch.bfloat16, (31, 7), (7, 1), 3), 7, 8, 2) is None
    assert with_rows(Layout(torch.float32, (16, 7), (7, 1)), 7, 8, 2) is None


@pytest.fixture
def junk() -> Iterator[None]:
    """Memory that nobody has written holds NaN, where the C library can do that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    mallopt(M_PERTURB, FILL_WITH_FF)
    yield
    mallopt(M_PERTURB, 0)


@pytest.mark.usefixtures("junk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_stay(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    data = torch.randn(16457, 16), torch.randn(64, 16), torch.randint(16457, (64,))
    grads = {}
    for device in ("cpu", "lazysched"):
        weight, x = (t.to(device, dtype).detach().requires_grad_() for t in data[:2])
        with settings.override(engine="triton" if device == "lazysched" else "aten"):
            loss = head(weight, x, data[2].to(device))
            loss.backward()
            grads[device] = [t.float().cpu() for t in (loss.detach(), weight.grad, x.grad) if t is not None]
    for eager, lazy in zip(grads["cpu"], grads["lazysched"]):
        torch.testing.assert_close(lazy, eager, rtol=2e-2, atol=1e-4)


def test_padding_keeps_wide_logits_out_of_memory() -> None:
    """What a loss computes from logits has rows like theirs, or kernels could not read one for the other."""
    steps = explained(recorded(512, 2057, cast=True)).steps
    assert max(step.written for step in steps) < 512 * 2057 * torch.float32.itemsize


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Into memory of its own, as products are recorded."""
    return torch.mm(left, right, out=torch.empty(left.shape[0], right.shape[1], dtype=left.dtype))


def internal(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    return [product(a.bfloat16(), w.bfloat16()).float()]


def given(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """The sum cannot run over padding: the right matrix is the user's."""
    return [product(a.bfloat16(), w).float()]


def overwritten(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    wide = a.bfloat16()
    first = product(wide, w)
    wide.mul_(2)
    return [first.float(), product(wide, w).float(), wide.float()]


def columns(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """One product reads some columns of what has rows more, another, which sums over these rows, all."""
    weight = w.bfloat16()
    return [product(a[:, :8].bfloat16(), weight[:, :8].t()).float(), product(a.bfloat16(), weight).float()]


def windows(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    wide = a.bfloat16()
    return [product(wide[:, :2001], w[:2001]).float(), product(wide[256:], w).float()]


def gram(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    wide = a.bfloat16()
    return [product(wide, wide.t()).float()]


def square(a: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    both = torch.cat([a[:, :1025]] * 3)[:1025].bfloat16()
    return [product(both, both).float()]


@pytest.mark.parametrize("program", [internal, given, overwritten, columns, windows, gram, square])
def test_what_lies_behind_rows_reaches_no_result(program: Callable[..., list[torch.Tensor]]) -> None:
    """Not even where it is NaN (`execute` sees to that) and ATen's products read it, as oneDNN's do on CPUs with AMX."""
    given_one = program in (given, overwritten, windows)
    a, w = torch.randn(512, 2057), torch.randn(2057, 16, dtype=torch.bfloat16 if given_one else torch.float32)
    recording, wanted = record(program, a, w)
    homes = [buffer_of(recording, recording.expected, tensor) for tensor in wanted]
    made = plan(recording.graph, tuning=INTERPRETER)
    verify(recording.graph)
    assert any(node.relaid for node in recording.graph.nodes)
    memory = execute(recording, made)
    for tensor, home in zip(wanted, homes):
        assert home is not None
        assert_same(typed(memory[home], tensor), tensor, rtol=2e-2, atol=2e-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuBLAS needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("depth", [2049, 2056, 2057, 2063])
def test_cublas_stays_inside_the_sizes_that_it_is_told(depth: int, dtype: torch.dtype) -> None:
    """Or `Tuning.overreads` has to be set for GPUs, too."""
    left, right = (torch.full((512, 2064), float("nan"), device="cuda", dtype=dtype)[:, :depth] for _ in range(2))
    left.fill_(1)
    right.fill_(1)
    down = torch.full((2064, 16), float("nan"), device="cuda", dtype=dtype)[:depth].fill_(1)
    for made in (left @ down, left @ right.t(), torch.addmm(down[0], left, down), left.t() @ right):
        assert not made.isnan().any()


class Meaning:
    """Which bytes of each buffer mean something once the nodes so far have run."""

    def __init__(self, graph: Graph) -> None:
        self.bytes = {buffer: torch.full((buffer.nbytes,), buffer.kind is not BufferKind.FRESH) for buffer in graph.buffers}

    def seen(self, value: Value, layout: Layout) -> torch.Tensor:
        """bool[*layout.size, itemsize]: a window on ``bytes``."""
        step = layout.itemsize
        strides = tuple(stride * step for stride in layout.stride)
        return self.bytes[value.buffer].as_strided((*layout.size, step), (*strides, 1), layout.offset * step)

    def run(self, node: Node) -> None:
        read = [self.seen(read.value, read.layout) for read in node.reads]
        if node.name == "mm":  # rows and columns that mean nothing make such a result, a sum over one spoils all of it
            self.seen(node.writes[0].value, node.writes[0].layout).copy_(read[0].all(1, True) & read[1].all(0, True))
            return
        assert all(bool(one.all()) for one in read), f"{node} reads what means nothing"
        for write in node.writes:
            self.seen(write.value, write.layout).fill_(True)


@pytest.mark.parametrize("tuning", [HOPPER, INTERPRETER])
@pytest.mark.parametrize("cast", [False, True])
def test_no_sum_runs_over_what_means_nothing(cast: bool, tuning: Tuning) -> None:
    """On GPUs, where libraries stay inside the sizes that they are told: what a padded product sums over is written or zero."""
    graph = recorded(512, 2057, cast=cast)
    pad_products(graph, overreads=tuning.overreads)
    meaning = Meaning(graph)
    for node in graph.nodes:
        if node.name == "mm" and tuning.overreads:  # whole rows, whatever the product is told of them
            rows = [meaning.bytes[read.value.buffer] for read in node.reads if 2064 in read.layout.stride]
            assert all(bool(one.all()) for one in rows), node
        meaning.run(node)
    outputs = [write for node in graph.nodes for write in node.writes if write.value in graph.outputs()]
    assert len(outputs) == 3 and all(bool(meaning.seen(write.value, write.layout).all()) for write in outputs)
