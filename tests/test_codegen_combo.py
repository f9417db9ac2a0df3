"""Which kernels share a launch, which do not and why, what the launch looks like, and that its numbers are right."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import torch
from counting import calls_of
from graphs import CACHE, check, kernels, record

from codegen import combo, triton_compile
from codegen.combo import combine
from codegen.combo_source import COUNTS, MAX_BYTES, MAX_LANES, width
from codegen.fuse import plan
from codegen.kernel import Plan, Size
from codegen.tuning import Tuning
from ir_nodes import Access, BufferKind, Graph, Layout, settings

SIZES: tuple[tuple[int, ...], ...] = ((5,), (3, 4), (16, 16), (16, 2), (64,), (128,), (1,), (1,), (7, 9), (4096,), (10000,), (3,))


def lists(sizes: tuple[tuple[int, ...], ...], count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """``count`` lists of tensors of ``sizes``, flat."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(size, generator=generator) + 0.1).to(dtype) for _ in range(count) for size in sizes]


def adamw(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    count = len(tensors) // 4
    parameters, grads, firsts, seconds = (tensors[i : i + count] for i in range(0, 4 * count, count))
    torch._foreach_mul_(parameters, 1 - 1e-3)
    torch._foreach_lerp_(firsts, grads, 0.1)
    torch._foreach_mul_(seconds, 0.999)
    torch._foreach_addcmul_(seconds, grads, grads, 0.001)
    roots = torch._foreach_sqrt(seconds)
    torch._foreach_div_(roots, [0.5] * count)
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(parameters, firsts, roots, [-1e-3] * count)
    return tensors


def counted(program: Callable[..., Any], *inputs: torch.Tensor) -> tuple[int, Plan]:
    """How many launches the program has without combos, and its plan with them."""
    made = plan(record(program, *inputs)[0].graph)
    return len(kernels(made)), combine(made)


# What shares a launch


def test_adamw_over_twelve_parameters_is_one_launch() -> None:
    check(adamw, *lists(SIZES, 4), count=1, combos=True)
    check(adamw, *lists(SIZES, 4), count=12)
    with settings.override(disable="combo"):
        check(adamw, *lists(SIZES, 4), count=12, combos=True)


def test_many_parameters_take_as_many_launches_as_arguments_need() -> None:
    apart, made = counted(adamw, *lists(((16,),) * 100, 4))
    most = max(sum(width(kind) for _, kind in step.kernel.signature) for step in kernels(made))
    assert apart == 100 and MAX_BYTES // 2 < most <= MAX_BYTES and len(kernels(made)) == 2


def test_a_loop_over_parameters_in_python_is_one_launch() -> None:
    def lion(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for parameter, grad, moment in zip(tensors[:4], tensors[4:8], tensors[8:]):
            update = moment * 0.9 + grad * 0.1
            parameter.mul_(1 - 1e-4).add_(torch.sign(update), alpha=-1e-3)
            moment.mul_(0.99).add_(grad, alpha=0.01)
        return tensors

    check(lion, *lists(((8, 8), (16,), (24,), (4, 8)), 3), count=1, combos=True)


def test_updates_that_wait_for_one_norm_share_a_launch_and_so_do_its_parts() -> None:
    def clipped(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = tensors[4:]
        total = torch.stack([grad.pow(2).sum() for grad in grads]).sum().sqrt()
        for parameter, grad in zip(tensors[:4], grads):
            parameter.sub_(grad * (1.0 / (total + 1e-6)).clamp(max=1.0))
        return tensors[:4]

    made = check(clipped, *lists(((8, 8), (16,), (24,), (4, 8)), 2), extern=None, combos=True)
    assert [step.kernel.name.split("_")[0] for step in kernels(made)].count("combo") == 2


def test_small_kernels_of_different_kinds_share_a_launch() -> None:
    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2, y.relu() + 1, z.tanh()]

    made = check(program, torch.randn(40), torch.randn(3, 50), torch.randn(300).bfloat16(), count=1, combos=True)
    assert kernels(made)[0].kernel.name.startswith("combo_1_1_1")


def test_reductions_of_one_kind_share_a_launch() -> None:
    check(lambda x, y: (x.softmax(-1), y.softmax(-1)), torch.randn(6, 40), torch.randn(9, 40), count=1, combos=True)


def test_second_halves_of_split_reductions_wait_for_one_launch() -> None:
    def program(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        inner = torch.ops.aten.gelu_backward(grad, x)
        outer = torch.ops.aten.gelu_backward(inner.i0(), y)  # ATen needs the first kernel's result, but not the sum
        return [outer, inner.sum(0), outer.sum(0)]

    split = Tuning(split_numel=64, split_column=8, split_rows=8, programs=8)
    made = check(program, *(torch.randn(40, 24) for _ in range(3)), extern=1, count=3, tuning=split, combos=True)
    assert kernels(made)[-1].kernel.name.startswith("combo_2_reduce")


def test_a_launch_holds_a_few_kernels_only() -> None:
    def program(*tensors: torch.Tensor) -> list[torch.Tensor]:
        names = "relu tanh exp sin cos sqrt abs neg floor ceil".split()
        return [getattr(torch, name)(tensor) for name, tensor in zip(names, tensors)]

    made = check(program, *(torch.rand(16 * n) for n in range(1, 11)), count=2, combos=True)
    assert MAX_LANES == 8 and f"more than {MAX_LANES} kernels" in reasons(made)


# What does not


def reasons(made: Plan) -> str:
    return " / ".join(refusal.reason for refusal in made.refusals)


def test_kernels_in_a_chain_stay_apart() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = (x * 2).digamma()
        return x

    made = check(program, torch.randn(40), extern=3, count=3, combos=True)
    assert "what lies between them has to run between them" in reasons(made)


def test_stages_of_a_schedule_stay_apart() -> None:
    recording, _ = record(lambda x, y: (x * 2, y * 2), torch.randn(40), torch.randn(50))
    recording.graph.nodes[1].stage = 1
    assert len(kernels(combine(plan(recording.graph)))) == 2
    recording.graph.nodes[0].stage = 1
    assert len(kernels(combine(plan(recording.graph)))) == 1


def updates(elements: int, between: int) -> Graph:
    """Two results of matrix products, far apart, that are each added to something."""
    graph = Graph()
    layout, square = Layout.contiguous(torch.float32, (elements,)), Layout.contiguous(torch.float32, (between, between))
    work = graph.add_buffer(square.nbytes, BufferKind.INPUT)
    for _ in range(2):
        source, total = (graph.add_buffer(layout.nbytes, BufferKind.INPUT, True) for _ in range(2))
        made, result = graph.add_buffer(layout.nbytes), graph.add_buffer(square.nbytes, live=True)
        graph.record("aten::digamma", [Access(source, layout)], [Access(made, layout, "w")])
        graph.record("aten::add_.Tensor", [Access(total, layout, "rw"), Access(made, layout), 1])
        graph.record("aten::mm", [Access(work, square), Access(work, square)], [Access(result, square, "w")])
    return graph


def test_large_results_do_not_wait_for_a_shared_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(kernels(combine(plan(updates(1 << 19, 1 << 13))))) == 1
    monkeypatch.setattr(combo, "HELD", 1 << 20)
    assert len(kernels(combine(plan(updates(1 << 10, 1 << 13))))) == 1
    assert len(kernels(combine(plan(updates(1 << 19, 1 << 4))))) == 1
    made = combine(plan(updates(1 << 19, 1 << 13)))
    assert len(kernels(made)) == 2 and "large results would be held for longer" in reasons(made)
    monkeypatch.setattr(combo, "WAITING", 6 << 10)
    assert len(kernels(combine(plan(updates(1 << 10, 1 << 13))))) == 2, "small ones are many"


def test_results_that_few_programs_read_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second halves of norms' column sums, which leave most of a GPU idle."""
    monkeypatch.setattr(combo, "HELD", 1 << 10)
    few, many = updates(1 << 14, 1 << 13), updates(1 << 19, 1 << 13)
    assert len(kernels(combine(plan(few)))) == 1 and len(kernels(combine(plan(many)))) == 2
    monkeypatch.setattr(combo, "HELD_BY_FEW", 1 << 10)
    assert len(kernels(combine(plan(few)))) == 2
    monkeypatch.undo()
    monkeypatch.setattr(combo, "HELD", 1 << 10)
    monkeypatch.setattr(combo, "WAITING", 6 << 10)
    assert len(kernels(combine(plan(few)))) == 2, "together they hold too much"


def test_large_neighbours_wait_no_longer_than_they_do() -> None:
    """As a rotary embedding's queries and keys: what they are made of lies far apart, but nothing lies between them."""
    def embedded(apart: bool) -> Plan:
        graph, layout = Graph(), Layout.contiguous(torch.float32, (1 << 22,))
        square = Layout.contiguous(torch.float32, (1 << 13, 1 << 13))
        work, source = (graph.add_buffer(one.nbytes, BufferKind.INPUT) for one in (square, layout))
        totals = [graph.add_buffer(layout.nbytes, BufferKind.INPUT, True) for _ in range(2)]
        made = [graph.add_buffer(layout.nbytes) for _ in range(2)]
        for one in made:
            graph.record("aten::digamma", [Access(source, layout)], [Access(one, layout, "w")])
        for one, total in zip(made, totals):
            graph.record("aten::add_.Tensor", [Access(total, layout, "rw"), Access(one, layout), 1])
            if apart:
                result = graph.add_buffer(square.nbytes, live=True)
                graph.record("aten::mm", [Access(work, square), Access(work, square)], [Access(result, square, "w")])
        return combine(plan(graph))

    assert len(kernels(embedded(False))) == 1
    assert len(kernels(embedded(True))) == 2 and "large results would be held for longer" in reasons(embedded(True))


# How it is written


GOLDEN = '''@triton.jit
def lane0(program, n1, p0, a0, p1, B0: tl.constexpr, B1: tl.constexpr):
    cuda.gdc_wait()  # for the kernel before this one
    pid = program
    i1 = pid * B1 + tl.arange(0, B1)
    m1 = i1 < n1
    t0 = tl.load(p0 + i1, mask=m1)
    t2 = t0 * a0
    tl.store(p1 + i1, t2, mask=m1)


@triton.jit
def combo_3_pointwise_foreach_mul(from0, from1, from2, n1_0, n1_1, n1_2, p0_0, p0_1, p0_2, a0, BLOCKS):
    pid = tl.program_id(0)
    at = _range_of(pid, "combo_3_pointwise_foreach_mul_param_0", 3, 2)
    first = _argument32(at, "combo_3_pointwise_foreach_mul_param_0")
    n1 = _argument32(at, "combo_3_pointwise_foreach_mul_param_3") // 16 * 16
    p0 = tl.multiple_of(_argument64(at, "combo_3_pointwise_foreach_mul_param_6").to(tl.pointer_type(tl.float32)), 16)
    lane0(pid - first, n1, p0, a0, p0, B0, B1)
'''.replace("BLOCKS", "B0: tl.constexpr, B1: tl.constexpr")


def scaled(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    torch._foreach_mul_(tensors, 0.5)
    return tensors


def test_golden_combo() -> None:
    (step,) = kernels(check(scaled, *lists(((32,), (64,), (48,)), 1), combos=True))
    assert step.kernel.source.endswith("\n\n\n" + GOLDEN)


def test_sizes_are_arguments_and_few_counts_arise() -> None:
    choices = (((32,),) * 5, ((64,), (16,), (2048,), (80,), (80,), (80,)))
    one, two = (kernels(counted(scaled, *lists(sizes, 1))[1])[0] for sizes in choices)
    assert one.kernel == two.kernel
    assert [arg for arg in one.args if isinstance(arg, Size)] != [arg for arg in two.args if isinstance(arg, Size)]
    assert all(small * 2 >= large for small, large in zip(COUNTS, COUNTS[1:]))


def test_what_is_loaded_in_wide_vectors_alone_is_so_in_a_combo() -> None:
    (step,) = kernels(counted(adamw, *lists(((1024,), (2048,), (4096,)), 4))[1])
    text = triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"]
    loads, stores = (re.findall(kind + r"\.global[.\w:]*", text) for kind in ("ld", "st"))
    assert len(loads) >= 4 and len(stores) >= 3 and all(".v4" in one for one in (*loads, *stores))


def test_branches_choose_among_few_large_tensors() -> None:
    """All arguments that branches choose from lie in registers."""
    large = [torch.ones(1).expand(1).new_empty(1 << 23) for _ in range(9)]
    assert len(kernels(counted(scaled, *large)[1])) == 1
    with settings.override(disable={"numbered_arguments"}):
        assert len(kernels(counted(scaled, *large)[1])) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    tensors = lists(((8, 8), (16, 12), (5, 7)), 1, dtype)
    check(scaled, *(tensor.t() for tensor in tensors), tensors[0].clone()[:, ::2], count=1, combos=True)


def test_planning_is_linear() -> None:
    few, many = (calls_of(lambda made=made: combine(made)) for made in (
        plan(record(scaled, *(torch.ones(16) for _ in range(count)))[0].graph) for count in (250, 2000)))
    assert many < 1.5 * few * 2000 / 250
