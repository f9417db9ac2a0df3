"""A loss over classes makes its gradient in the kernel that reduces the logits: numbers, memory, and when it does not."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, assert_same, check, compile_all, execute, kernels, record, typed, uses_of
from recording import Recorder

from codegen import triton_compile
from codegen.fuse import plan
from codegen.kernel import KernelStep, Plan
from codegen.memory_plan import MemoryPlan, plan_memory
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

ROW = Tuning()
LOOP = Tuning(persistent=16, once=16, looped=16, online=16, tile=64, peeled=16, covered=16, pointwise_block=32, rewalked=0)
COVERED = Tuning(covered=16, peeled=16)
MIXED = Tuning(split_numel=64, mixed_rows=8, mixed_tile=64, cores=2, split_column=8, split_rows=8, programs=8)
TUNINGS = pytest.mark.parametrize("tuning", [ROW, LOOP, COVERED], ids=["row", "loop", "covered"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
NEAR = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-3},
        torch.float16: {"rtol": 2e-3, "atol": 2e-4}}
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {}, "sum": {"reduction": "sum"}, "ignored": {"ignore_index": 5}, "weighted": {"weight": None},
    "weighted sum": {"weight": None, "reduction": "sum"}, "smooth": {"label_smoothing": 0.1},
}


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def targets(rows: int, classes: int, none: int = -100) -> torch.Tensor:
    found = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1))
    found[2] = none
    return found


def training(target: torch.Tensor, **options: Any) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Loss and gradient of logits, which 16-bit ones are widened for, as language models do."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x.float(), target, **options)
        (grad,) = torch.autograd.grad(loss, x)
        return [loss.detach(), grad]

    return program


def readers(made: Plan, nbytes: int) -> int:
    """Kernels that read something of at least so many bytes."""
    return sum(any(value.buffer.nbytes >= nbytes for value in step.reads if hasattr(value, "buffer")) for step in kernels(made))


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    enabled = settings.enabled
    monkeypatch.setattr(settings, "enabled", lambda asked: asked != name and enabled(asked))


@TUNINGS
@DTYPES
@pytest.mark.parametrize("columns", [71, 128])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradient(options: dict[str, Any], columns: int, dtype: torch.dtype, tuning: Tuning) -> None:
    if "weight" in options:
        options = {**options, "weight": data(columns, seed=2).abs() + 0.1}
    target = targets(9, columns, options.get("ignore_index", -100))
    made = check(training(target, **options), data(9, columns, dtype=dtype), tuning=tuning, **NEAR[dtype])
    if "label_smoothing" not in options:
        assert readers(made, 9 * columns * dtype.itemsize) == 1
        assert len(kernels(made)) == (2 if options.get("reduction") == "sum" else 3)


def test_switched_off_another_kernel_reads_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    program, x = training(targets(9, 71)), data(9, 71)
    together = check(program, x)
    without(monkeypatch, "one_pass_loss")
    apart = check(program, x)
    assert (readers(together, 9 * 71 * 4), readers(apart, 9 * 71 * 4)) == (1, 2)
    assert any("one_pass_loss is switched off" in str(refusal) for refusal in apart.refusals)


@pytest.mark.parametrize("rows, columns", [(64, 40), (64, 24), (72, 17)])
def test_a_short_rows_gradient_and_its_columns_share_the_pass(rows: int, columns: int) -> None:
    target = targets(rows, columns)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        loss, grad = training(target)(x)
        return [loss, grad, grad.sum(0)]

    made = check(program, data(rows, columns), tuning=MIXED, rtol=1e-4, atol=1e-5)
    assert readers(made, rows * columns * 4) == 1


def test_a_long_rows_gradient_stays_with_its_columns() -> None:
    target = targets(70, 71)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        loss, grad = training(target)(x)
        return [loss, grad, grad.sum(0)]

    made = check(program, data(70, 71), tuning=MIXED.changed("mixed_row=8"), rtol=1e-4, atol=1e-5)
    assert any("columns are summed where it is made" in str(refusal) for refusal in made.refusals)
    assert readers(made, 70 * 71 * 4) == 2


def test_a_gradient_is_not_held_while_a_forward_goes_on() -> None:
    target = targets(9, 71)

    def program(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        first = F.cross_entropy(x, target)
        second = F.cross_entropy(y @ w, target)
        (first + second).backward()
        assert x.grad is not None and y.grad is not None
        return [first.detach(), x.grad, y.grad]

    made = check(program, data(9, 71), data(9, 8), data(8, 71), extern=None, rtol=1e-4, atol=1e-5)
    assert any("the gradient would be held" in str(refusal) for refusal in made.refusals)
    assert sum("nll_loss_backward" in step.kernel.name and step.kernel.name.startswith("reduce") for step in kernels(made)) == 1


def test_segments_that_a_schedule_names_stay_apart() -> None:
    recording, _ = record(training(targets(9, 71)), data(9, 71))
    for node in recording.graph.nodes:
        node.stage = int("backward" in node.name)
    made = plan(recording.graph)
    assert any("the schedule keeps their segments apart" in str(refusal) for refusal in made.refusals)
    assert readers(made, 9 * 71 * 4) == 2


def memory_of(made: Plan, recording: Any) -> MemoryPlan:
    return plan_memory(recording.graph, uses_of(made), [temporary.nbytes for temporary in made.temporaries])


@TUNINGS
@pytest.mark.parametrize("columns", [71, 128])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}], ids=["mean", "sum"])
def test_the_gradient_is_written_over_the_logits(options: dict[str, Any], columns: int, tuning: Tuning) -> None:
    x, w, target = data(9, 8, dtype=torch.bfloat16), data(8, columns, dtype=torch.bfloat16), targets(9, columns)
    with Recorder() as recorder:
        product = x @ w
        loss, grad = training(target, **options)(product)
        result = grad @ w.t()
        del product, grad
    wanted, outs = result.clone(), [loss, result]
    recording = recorder.finish([*outs, x, w, target])
    made = plan(recording.graph, tuning=tuning)
    (step,) = [step for step in kernels(made) if "nll_loss_backward" in step.kernel.name]
    places = memory_of(made, recording)
    assert step.reuses and places.reused, "as large as the logits, and there while they are"
    source = step.kernel.source
    assert source.index("tl.debug_barrier()") < source.index("tl.store"), "a thread may have yet to pick its row's class"
    memory = execute(recording, made, places)
    index = max(value.buffer.index for value in recording.graph.outputs() if value.buffer.nbytes == wanted.nbytes)
    assert_same(typed(memory[index], wanted), wanted, 2e-2, 2e-2)
    compile_all(made)


@TUNINGS
def test_the_logit_of_a_class_is_computed_for_it_alone(tuning: Tuning) -> None:
    """Of capped, scaled or sliced logits, too: no row is summed to find one of its elements."""
    target = targets(9, 70)

    def capped(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.tanh(x.float() / 30) * 30, target)

    def sliced(x: torch.Tensor) -> list[torch.Tensor]:
        return training(target)(x[:, 1:])

    for program in (capped, sliced):
        made = check(program, data(9, 71, dtype=torch.bfloat16), tuning=tuning, rtol=2e-2, atol=2e-3)
        (loss,) = [step for step in kernels(made) if "_log_softmax" in step.kernel.name]
        assert loss.kernel.source.count("_add,") <= 1 and loss.kernel.source.count("other=0") == 1


def test_what_the_kernel_overwrites_itself_is_not_picked_from_memory() -> None:
    target = targets(9, 70)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        loss = F.cross_entropy(x.float() * 2, target)
        return [loss, x.zero_()]

    check(program, data(9, 70, dtype=torch.bfloat16), rtol=1e-4, atol=1e-5)


def of_size(rows: int, columns: int, dtype: torch.dtype) -> KernelStep:
    target, logits = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, columns, dtype=dtype)
    made = plan(record(training(target), logits)[0].graph, tuning=HOPPER)
    compile_all(made)
    (step,) = [step for step in kernels(made) if "nll_loss_backward" in step.kernel.name]
    return step


@pytest.mark.parametrize("columns, warps", [(10000, 32), (30522, 16), (50257, 16), (128256, 32)])
def test_rows_that_are_worked_on_stay_in_the_cache(columns: int, warps: int) -> None:
    """With 64 registers a thread, 1024 threads of a multiprocessor work on 1024 / 32 / ``warps`` rows."""
    step = of_size(64, columns, torch.bfloat16)
    assert step.kernel.num_warps == warps
    assert ("tl.range" in step.kernel.source) == (columns > HOPPER.once)
    assert columns <= HOPPER.once or 132 * 32 // warps * columns * 2 < 36e6


def test_a_threads_neighbours_have_a_maximum_of_their_own() -> None:
    """So threads exchange numbers once a row, not once a block."""

    def shuffles(changes: str) -> int:
        recording, _ = record(training(torch.zeros(64, dtype=torch.int64)), torch.zeros(64, 50264, dtype=torch.bfloat16))
        made = plan(recording.graph, tuning=HOPPER.changed(changes))
        (step,) = [step for step in kernels(made) if "nll_loss_backward" in step.kernel.name]
        return str(triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"]).count("shfl.sync")

    assert shuffles("near=1") < shuffles("near=0")
    assert "[B0, B1 // 8, 8]" in of_size(64, 50257, torch.bfloat16).kernel.source
    assert "[B0, B1 // 4, 4]" in of_size(64, 50257, torch.float32).kernel.source


@pytest.mark.parametrize("near", [0, 2])
def test_rows_with_infinities(near: int) -> None:
    target = targets(9, 71)
    x = data(9, 71)
    x[0, :70] = x[1] = x[3, 5:9] = -torch.inf
    x[4, 7] = torch.inf
    x[5, 8] = torch.nan

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        aten = torch.ops.aten
        share = torch.log_softmax(x, 1)
        _, weight = aten.nll_loss_forward(share, target, None, 1, -100)
        lost = aten.nll_loss_backward(torch.ones(()), share, target, None, 1, -100, weight)
        grad = aten._log_softmax_backward_data(lost, share, 1, torch.float32)
        return grad, x.logsumexp(1), x.softmax(1)

    check(program, x, tuning=LOOP.changed(f"near={near}"), rtol=1e-4, atol=1e-5)
