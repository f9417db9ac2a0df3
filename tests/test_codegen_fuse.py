"""What becomes one kernel, what must not, and in which order it all runs."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from graphs import check, compile_all, execute, externs, kernels, record, typed, values_named
from recording import Recording

from codegen.fuse import plan
from codegen.kernel import ExternStep, KernelStep, Plan
from codegen.tuning import HOPPER, Tuning
from ir_nodes import Access, BufferKind, Graph, Layout, settings

LOOPED = Tuning(tile=64, persistent=16, looped=16)


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Kernel counts of patterns that training is made of


def test_bias_gelu_residual_is_one_kernel() -> None:
    made = check(lambda x, b, r: F.gelu(x + b) + r, data(6, 5, 32), data(32, seed=1), data(6, 5, 32, seed=2), count=1)
    assert len(values_named(made)) == 2


def test_a_view_between_ops_does_not_end_a_kernel() -> None:
    check(lambda x, b: (x + b).view(2, 3, 16).relu().reshape(6, 4, 4) * 2, data(6, 16), data(16, seed=1), count=1)


def test_softmax_of_scaled_masked_scores_is_one_kernel() -> None:
    mask = torch.ones(8, 8).tril() == 0
    check(lambda x: (x * 0.3).masked_fill(mask, float("-inf")).softmax(-1), data(2, 3, 8, 8), count=1)


def test_residual_and_layer_norm_are_one_kernel() -> None:
    check(lambda x, y, w, b: (x + y, F.layer_norm(x + y, (32,), w, b)), *(data(6, 32, seed=i) for i in range(2)),
          *(data(32, seed=i) for i in range(2)), count=1)


def test_root_mean_square_norm_written_out_is_one_kernel() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    check(program, data(6, 40, dtype=torch.bfloat16), data(40, dtype=torch.bfloat16), count=1)
    check(program, data(6, 40), data(40), count=1, tuning=LOOPED)


def test_cross_entropy_forward_is_two_kernels_and_its_gradient_one() -> None:
    target = torch.randint(0, 20, (9,))

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, target)
        (grad,) = torch.autograd.grad(loss, x)
        return [loss.detach(), grad]

    check(program, data(9, 20), count=3)  # the gradient of the loss, 1, is known and not made
    check(lambda x: F.cross_entropy(x, target), data(9, 20), count=2)


def test_swiglu_reads_halves_of_one_buffer_in_one_kernel() -> None:
    check(lambda x: F.silu(x[:, :16]) * x[:, 16:], data(6, 32), count=1)


def test_an_activation_gradient_and_the_bias_gradient_share_a_kernel() -> None:
    def program(grad: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        inner = torch.ops.aten.gelu_backward(grad, x)
        return [inner, inner.sum(0)]

    check(program, data(40, 24), data(40, 24, seed=1), count=1)
    split = Tuning(split_numel=64, split_column=8, split_rows=8, programs=8)
    check(program, data(40, 24), data(40, 24, seed=1), count=2, tuning=split)


def adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    p.mul_(1 - 1e-3)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, (v.sqrt() / 0.5).add_(1e-8), value=-1e-3)
    return [p, m, v]


def test_an_adamw_step_is_one_kernel_in_place() -> None:
    made = check(adamw, data(6, 7), data(6, 7, seed=1), data(6, 7, seed=2), data(6, 7, seed=3).abs(), count=1)
    stored = [step.writes for step in kernels(made)]
    assert [len(writes) for writes in stored] == [3]


def test_ops_that_only_share_an_input_share_a_kernel() -> None:
    check(lambda x: (x * 2, x.relu(), x + 1), data(6, 7), count=1)


def test_channels_last_chains_walk_memory_in_order() -> None:
    x = data(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    made = check(lambda x: (x * 2).relu(), x, count=1)
    assert "B1: tl.constexpr" in kernels(made)[0].kernel.source and "%" not in kernels(made)[0].kernel.source


# What must stay apart


def refusals(made: Plan) -> str:
    return " / ".join(refusal.reason for refusal in made.refusals)


def test_a_transposed_read_of_what_was_just_written_is_another_kernel_unless_loops_may_turn() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return ((x * 2).t() + 1).contiguous()

    check(program, data(6, 6), count=1)
    with settings.override(disable={"loop_order"}):
        made = check(program, data(6, 6), count=2)
    assert "another order" in refusals(made)


def test_reading_a_shifted_window_while_writing_in_place_is_another_kernel() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x[1:] += x[:-1] * 2
        return x

    made = check(program, data(40))
    assert len(kernels(made)) >= 2 and "another order" in refusals(made)


def test_a_copy_within_one_buffer_that_overlaps_is_not_fused_with_its_reader() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old = x + 1
        x.copy_(x.t().clone())
        return old, x

    made = check(program, data(8, 8))
    assert len(kernels(made)) >= 2


def test_an_overwritten_input_is_read_before() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        total = x.digamma()  # ATen
        x.mul_(2)
        y.add_(x)
        return [total, x, y]

    made = check(program, data(6, 7), data(6, 7, seed=1), extern=1, count=1)
    assert [type(step) for step in made.steps] == [ExternStep, KernelStep]


def test_disjoint_halves_of_one_buffer_may_share_a_kernel() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2, 20)
        out[0] = x * 2
        out[1] = x + 1
        return out

    check(program, data(20), count=1)


def test_a_result_that_an_extern_op_needs_first_cannot_be_delayed() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + y.digamma()

    made = check(program, data(6, 6), count=2, extern=1)
    assert "between" in refusals(made)
    assert [type(step) for step in made.steps] == [KernelStep, ExternStep, KernelStep]


def test_different_shapes_and_different_reductions_stay_apart() -> None:
    made = check(lambda x: (x * 2)[:3].sum(0) + (x * 2).sum(1)[:4], data(6, 4))
    assert "index spaces differ" in refusals(made) or "reduce different" in refusals(made)


def test_dead_values_are_neither_computed_nor_stored() -> None:
    recording, _ = record(lambda x: [x * 3, (x + 1).relu()][1], data(6, 7))
    recording.graph.buffers[1].live = False
    made = plan(recording.graph)
    assert [[node.name for node in step.nodes] for step in kernels(made)] == [["add", "relu"]]


def test_a_filled_tensor_is_a_number_to_its_readers() -> None:
    made = check(lambda x: x + torch.zeros(6, 7) * 2 + torch.full((7,), 0.1), data(6, 7), count=1)
    assert len(kernels(made)[0].reads) == 1

    def accumulate(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(6, 7)
        total[2:4] = 1
        total += x
        return total

    check(accumulate, data(6, 7))


def test_partial_overwrites_keep_the_other_bytes() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        out[1:3] += 5
        out[:, ::2] = 0
        return out

    check(program, data(5, 9))


def test_extra_order_edges_hold() -> None:
    recording, _ = record(lambda x: (x * 2, x.digamma(), x + 1), data(4))
    first, middle, last = recording.graph.nodes
    assert len(kernels(plan(recording.graph))) == 1
    made = plan(recording.graph, order=[(first, middle), (middle, last)])
    assert [step.node if isinstance(step, ExternStep) else step.nodes[0] for step in made.steps] == [first, middle, last]


# Hand-made graphs: `out=` overloads, number inputs


def whole(graph: Graph, dtype: torch.dtype, size: tuple[int, ...], kind: BufferKind, live: bool = False) -> Access:
    layout = Layout.contiguous(dtype, size)
    return Access(graph.add_buffer(layout.nbytes, kind, live), layout)


def test_out_overloads_and_number_inputs() -> None:
    graph = Graph()
    x = whole(graph, torch.float32, (5, 3), BufferKind.INPUT)
    inner, out = (whole(graph, torch.float32, (5, 3), BufferKind.FRESH, live) for live in (False, True))
    number, alpha, low = graph.add_scalar("float"), graph.add_scalar("float"), graph.add_scalar("int")
    graph.record("aten::add.out", [x, number, alpha, Access(inner.buffer, inner.layout, "w")])
    graph.record("aten::clamp.out", [inner, low, None, Access(out.buffer, out.layout, "w")])
    made = plan(graph)
    assert len(kernels(made)) == 1 and not externs(made)
    values = data(5, 3)
    given = {x.buffer.index: values.view(torch.uint8).view(-1)}
    memory = execute(Recording(graph, given, [0.7, 2.0, 1]), made)
    torch.testing.assert_close(typed(memory[out.buffer.index], values), (values + 2.0 * 0.7).clamp(min=1))
    compile_all(made)


def test_numbers_and_sizes_are_not_in_the_source() -> None:
    sources = []
    for rows, columns, number in ((48, 64, 0.3), (96, 128, 0.7)):
        recording, _ = record(lambda x, b, n=number: ((x + b) * n).softmax(-1), data(rows, columns), data(columns))
        (step,) = kernels(plan(recording.graph))
        sources.append((step.kernel.source, step.kernel.signature))
    assert sources[0] == sources[1]


def test_planning_is_deterministic() -> None:
    made = [[step.kernel for step in kernels(plan(record(adamw, *(data(6, 7, seed=i).abs() for i in range(4)))[0].graph))]
            for _ in range(2)]
    assert made[0] == made[1]


def test_sums_of_everything_share_a_kernel_where_the_results_meet_later() -> None:
    """What a number that both sums are multiplied by is made of does not wait for either."""
    def stepped(x: torch.Tensor, y: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = step.abs()
        scaled = x / size
        first = (y * scaled.round()).sum((0, 1), keepdim=True).view(1) * step.sign()
        second = first + (-(y * scaled) / size).sum((0, 1), keepdim=True).view(1) * step.sign()
        return second, y / size

    inputs = torch.empty(2048, 1024), torch.empty(2048, 1024), torch.empty(1)
    assert len(kernels(plan(record(stepped, *inputs)[0].graph))) == 2  # of shares, and of what these add up to
    check(stepped, torch.randn(40, 30), torch.randn(40, 30), torch.tensor([0.5]), tuning=replace(HOPPER, programs=4), rtol=1e-4,
          atol=1e-4)


def test_a_comparison_that_is_counted_holds_no_more_for_its_mask() -> None:
    def ties(x: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        same = x == least
        return same, same.sum(0)

    steps = kernels(plan(record(ties, torch.empty(1 << 14, 512), torch.empty(512))[0].graph))
    assert "tl.int64" not in steps[0].kernel.source and steps[0].kernel.num_warps == 4
    check(ties, torch.randint(0, 3, (40, 30)).float(), torch.ones(30))
