"""What generated sources look like: golden files in words, argument lists, index widths, deterministic text."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from graphs import kernels, record

from codegen.fuse import plan
from codegen.kernel import KernelStep, Pointer, Size
from codegen.tuning import HOPPER, Tuning
from ir_nodes import Access, BufferKind, Graph, Layout


def only(program: Callable[..., Any], *inputs: torch.Tensor, tuning: Tuning = HOPPER) -> KernelStep:
    recording, _ = record(program, *inputs)
    (step,) = kernels(plan(recording.graph, tuning=tuning))
    return step


def code(step: KernelStep) -> str:
    """The kernel's own function."""
    return step.kernel.source.split("@triton.jit\n")[-1]


POINTWISE = '''def pointwise_add_relu(n0, s0, n1, p0, p1, p2, B0: tl.constexpr, B1: tl.constexpr):
    cuda.gdc_wait()  # for the kernel before this one
    pid = tl.program_id(0)
    row = pid
    i0 = row * B0 + tl.arange(0, B0)[:, None]
    m0 = i0 < n0
    base = i0 * s0 // 8 * 8
    i1 = tl.arange(0, B1)[None, :]
    m1 = i1 < n1 // 8 * 8
    t0 = tl.load(p0 + base + i1, mask=m0 & m1).to(tl.float32)
    t1 = tl.load(p1 + i1, mask=m1).to(tl.float32)
    t2 = tl.full([], 1.0, tl.float32)
    t3 = t0 + t2 * t1
    t4 = _bf16(t3)
    t5 = tl.where(t4 <= 0, 0.0, t4)
    t6 = t5.to(tl.bfloat16).to(tl.float32)
    tl.store(p2 + base + i1, t6, mask=m0 & m1)
'''

SOFTMAX = '''def reduce_softmax(n0, s0, n1, p0, p1, B0: tl.constexpr, B1: tl.constexpr):
    cuda.gdc_wait()  # for the kernel before this one
    pid = tl.program_id(0)
    i0 = pid * B0 + tl.arange(0, B0)[:, None]
    m0 = i0 < n0
    base = i0 * s0 // 4 * 4
    i1 = tl.arange(0, B1)[None, :]
    m1 = i1 < n1 // 4 * 4
    t0 = tl.load(p0 + base + i1, mask=m0 & m1)
    t1 = tl.reduce(tl.where(m1, t0, float("-inf")), 1, _max, keep_dims=True)
    t2 = t0 - t1
    t3 = libdevice.exp(t2)
    t4 = tl.reduce(tl.where(m1, t3, 0.0), 1, _add, keep_dims=True)
    t5 = tl.math.div_rn(1.0, t4)
    t6 = _share(t3, t4, t5)
    tl.store(p1 + base + i1, t6, mask=m0 & m1)
'''

COLUMN_SUM = '''def reduce_sum(n1, n0, p0, p1, B0: tl.constexpr, B1: tl.constexpr):
    cuda.gdc_wait()  # for the kernel before this one
    pid = tl.program_id(0)
    i1 = pid * B1 + tl.arange(0, B1)[None, :]
    m1 = i1 < n1
    t0_acc = tl.full([B0, B1], 0.0, tl.float32)
    for r in tl.range(0, n0, B0, num_stages=3):
        i0 = r + tl.arange(0, B0)[:, None]
        m0 = i0 < n0
        t1 = tl.load(p0 + i0 * n1 + i1, mask=m0 & m1)
        t0_acc = t0_acc + tl.where(m0, t1, 0.0)
    t0 = tl.reduce(t0_acc, 0, _add, keep_dims=True)
    tl.store(p1 + i1, t0, mask=m1)
'''


LOSS = '''    cuda.gdc_wait()  # for the kernel before this one
    pid = tl.program_id(0)
    i0 = pid * B0 + tl.arange(0, B0)[:, None]
    base = i0 * s0 // 8 * 8
    last = (n1 - 1) // B1 * B1
    t0 = tl.load(p0 + i0)
    t1 = tl.load(p1)
    t2 = tl.full([], -100, tl.int64)
    tl.device_assert(((t0 >= 0) & (t0 < s0)) | (t0 == t2), "aten::nll_loss_forward: an index is out of range")
    t4 = tl.load(p2 + i0 * s0 + t0 * s1, mask=(t0 >= 0) & (t0 < s0), other=0)
    t5 = t4.to(tl.float32)
    t6 = tl.full([], 1.0, tl.float32)
    t7 = tl.where((t0 >= 0) & (t0 <= 2147483647) & (t0 != t2), t0, -1).to(tl.int32)
    t8 = tl.math.div_rn(t6, t1)
    t9 = tl.full([], 0.0, tl.float32)
    t11 = tl.where((t7 >= 0) & (t7 < a0), -t8, 0.0)
    t12 = -t8
    t13 = tl.load(p2 + i0 * s0 + t7 * s1, mask=(t7 >= 0) & (t7 < s0), other=0)
    t14 = t13.to(tl.float32)
    t15_acc = tl.full([B0, B1 // 8], float("-inf"), tl.float32)
    t16_acc = tl.full([B0, B1 // 8], 0.0, tl.float32)
    for r in tl.range(0, last, B1, num_stages=3):
        i1 = r + tl.arange(0, B1)[None, :]
        t17 = tl.load(p2 + base + i1).to(tl.float32)
        t18 = t17
        t15_in = tl.reshape(t18, [B0, B1 // 8, 8])
        t15_new = tl.maximum(t15_acc, tl.reduce(t15_in, 2, _max), propagate_nan=tl.PropagateNan.ALL)
        t15_base = tl.where(t15_new == float("-inf"), 0.0, t15_new)
        t16_in = tl.reduce(libdevice.fast_expf(t15_in - t15_base[:, :, None]), 2, _add)
        t16_acc = t16_acc * libdevice.fast_expf(t15_acc - t15_base) + t16_in
        t15_acc = t15_new
    i1 = last + tl.arange(0, B1)[None, :]
    m1 = i1 < n1 // 8 * 8
    t17 = tl.load(p2 + base + i1, mask=m1).to(tl.float32)
    t18 = t17
    t15_in = tl.reshape(tl.where(m1, t18, float("-inf")), [B0, B1 // 8, 8])
    t15_new = tl.maximum(t15_acc, tl.reduce(t15_in, 2, _max), propagate_nan=tl.PropagateNan.ALL)
    t15_base = tl.where(t15_new == float("-inf"), 0.0, t15_new)
    t16_in = tl.reduce(libdevice.fast_expf(t15_in - t15_base[:, :, None]), 2, _add)
    t16_acc = t16_acc * libdevice.fast_expf(t15_acc - t15_base) + t16_in
    t15_acc = t15_new
    t15 = tl.reduce(t15_acc, 1, _max, keep_dims=True)
    t15_base = tl.where(t15 == float("-inf"), 0.0, t15)
    t16 = tl.reduce(t16_acc * libdevice.fast_expf(t15_acc - t15_base), 1, _add, keep_dims=True)
    t19 = libdevice.log(t16)
    t20 = t5 - t15 - t19
    t21 = tl.where(t0 != t2, -t20 * t6, 0.0)
    t22 = tl.exp2((t14 - t15) * 1.4426950408889634 - t19 * 1.4426950408889634)
    t23 = t12 - t22 * t11
    t24 = t23.to(tl.bfloat16).to(tl.float32)
    tl.debug_barrier()  # what is picked by an index may be overwritten from here on
    for r in tl.range(0, last, B1, num_stages=3):
        i1 = r + tl.arange(0, B1)[None, :]
        t17 = tl.load(p2 + base + i1).to(tl.float32)
        t18 = t17
        t25 = tl.exp2((t18 - t15) * 1.4426950408889634 - t19 * 1.4426950408889634)
        t26 = t9 - t25 * t11
        t27 = t26.to(tl.bfloat16).to(tl.float32)
        tl.store(p3 + base + i1, t27)
    i1 = last + tl.arange(0, B1)[None, :]
    m1 = i1 < n1 // 8 * 8
    t17 = tl.load(p2 + base + i1, mask=m1).to(tl.float32)
    t18 = t17
    t25 = tl.exp2((t18 - t15) * 1.4426950408889634 - t19 * 1.4426950408889634)
    t26 = t9 - t25 * t11
    t27 = t26.to(tl.bfloat16).to(tl.float32)
    tl.store(p3 + base + i1, t27, mask=m1)
    tl.store(p4 + i0, t21)
    tl.debug_barrier()  # what follows replaces an element that another thread may have stored
    tl.store(p3 + i0 * n1 + t7, t24, mask=(t7 >= 0) & (t7 < n1))
'''


def test_golden_pointwise() -> None:
    x, b = torch.randn(6, 40).bfloat16(), torch.randn(40).bfloat16()
    assert code(only(lambda x, b: torch.relu(x + b), x, b)) == POINTWISE


def test_golden_softmax() -> None:
    assert code(only(lambda x: x.softmax(-1), torch.randn(6, 40))) == SOFTMAX


def test_golden_looped_column_sum() -> None:
    assert code(only(lambda x: x.sum(0), torch.randn(100, 48), tuning=Tuning(column_tile=256))) == COLUMN_SUM


def test_golden_loss_with_its_gradient() -> None:
    target = torch.zeros(64, dtype=torch.int64)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x.float(), target)
        return [loss.detach(), *torch.autograd.grad(loss, x)]

    recording, _ = record(program, torch.zeros(64, 50264, dtype=torch.bfloat16))
    (step,) = [step for step in kernels(plan(recording.graph)) if "nll_loss_backward" in step.kernel.name]
    assert code(step).split(":\n", 1)[1] == LOSS


def test_a_dense_chain_is_flat_whatever_its_shape() -> None:
    step = only(lambda x: x.view(4, 5, 6) * 2, torch.randn(120))
    assert "i0" not in code(step) and "%" not in code(step)


def test_transposing_copies_use_a_square_tile() -> None:
    for rows, side in ((800, 64), (100, 32)):  # smaller ones where there are few
        step = only(lambda x: x.t().contiguous(), torch.randn(rows, 400))
        assert dict(step.kernel.constexprs) == {"B0": side, "B1": side}


def test_divisibility_follows_alignment() -> None:
    base = torch.randn(4 * 48 + 16)

    def attributes(offset: int) -> tuple[int, int]:
        step = only(lambda x: x[offset : offset + 96] * 2, base)
        offsets = [arg.byte_offset for arg in step.args if isinstance(arg, Pointer)]
        return max(offsets), len(step.kernel.divisible)

    assert attributes(4)[0] == 16 and attributes(1)[0] == 4
    assert attributes(4)[1] == attributes(1)[1] + 1


def test_indices_need_64_bits_beyond_2_to_the_31_elements() -> None:
    kinds = []
    for elements in (1 << 30, 1 << 31):
        graph = Graph()
        layout = Layout.contiguous(torch.int8, (elements,))
        source, out = (graph.add_buffer(layout.nbytes, kind, True) for kind in (BufferKind.INPUT, BufferKind.FRESH))
        graph.record("aten::neg.out", [Access(source, layout), Access(out, layout, "w")])
        (step,) = kernels(plan(graph))
        kinds.append({kind for (_, kind), arg in zip(step.kernel.signature, step.args) if isinstance(arg, Size)})
        assert ("tl.int64" in code(step)) == (elements == 1 << 31)
    assert kinds == [{"i32"}, {"i64"}]


def test_shapes_of_one_pattern_share_a_kernel_and_differ_in_arguments_only() -> None:
    steps = [only(lambda x, y: (x * 2 + y).sum(-1), torch.randn(n, 512, 80), torch.randn(80)) for n in (2, 3)]
    assert steps[0].kernel == steps[1].kernel
    assert [arg for arg in steps[0].args if isinstance(arg, Size)] != [arg for arg in steps[1].args if isinstance(arg, Size)]


def test_stores_across_the_rows_come_before_those_of_a_number_for_each_row() -> None:
    """Behind them Triton 3.6 fails to compile this kernel: cosine attention's norms, kept for its gradient."""
    def program(packed: torch.Tensor) -> list[torch.Tensor]:
        query, key, value = packed.view(64, 64, 3, 3, 32).permute(2, 0, 3, 1, 4).unbind(0)
        norms = [torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32) for x in (query, key)]
        sizes = [norm.clamp_min(1e-12) for norm in norms]
        query, key = ((x / size).to(torch.bfloat16) for x, size in zip((query, key), sizes))
        return [*norms, *sizes, query.contiguous(), key.transpose(-2, -1).contiguous(), value.contiguous()]

    step = only(program, torch.randn(64, 64, 288).to(torch.bfloat16))
    stores = [line.split("tl.store(")[1] for line in code(step).splitlines() if "tl.store(" in line]
    across = [number for number, store in enumerate(stores) if "i1 * s" in store]
    of_rows = [number for number, store in enumerate(stores) if "i1" not in store]
    assert across and of_rows and max(across) < min(of_rows)
