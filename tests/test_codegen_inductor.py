"""The inductor engine: layouts as views, nodes as functional ops, runs; and compiled programs against the CPU, in processes of
their own, because a program in the cache keeps the engine that made it."""

from __future__ import annotations

import logging
import random
import tempfile
import warnings
from typing import Any, Callable

import children
import hypothesis
import programs
import pytest
import torch
from graphs import record
from recording import Recording
from torch import nn

import lazy_backend
from codegen import inductor_engine, views
from codegen.inductor_trace import Traced, Untraceable, trace
from codegen.runs import part, stored
from ir_nodes import Layout, settings
from ir_nodes.reference import window
from ir_nodes.replay import Replay
from tests.device import DEVICE

CPU = torch.device("cpu")


# ---- a layout as a chain of views ---------------------------------------------------------------------------------------


def some_view(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """A few views of ``tensor``, one on the other."""
    for _ in range(draw.randint(0, 4)):
        kind, dim = draw.randrange(6), draw.randrange(max(tensor.dim(), 1))
        if kind == 0:
            tensor = tensor.permute(draw.sample(range(tensor.dim()), tensor.dim()))
        elif kind == 1 and tensor.dim():
            start = draw.randrange(tensor.shape[dim])
            tensor = tensor.narrow(dim, start, draw.randint(1, tensor.shape[dim] - start))
        elif kind == 2:
            tensor = tensor.unsqueeze(dim)
        elif kind == 3 and tensor.dim():
            tensor = tensor.select(dim, 0) if draw.random() < 0.5 else tensor.expand(2, *tensor.shape)
        elif kind == 4 and tensor.dim():
            tensor = tensor[..., ::2]
        elif tensor.is_contiguous():
            tensor = tensor.reshape(-1)
    return tensor


def test_a_layout_is_read_and_written_through_functional_views() -> None:
    draw, reached = random.Random(0), 0
    for _ in range(300):
        size = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
        base = torch.arange(float(torch.Size(size).numel())).reshape(size)
        held = base.permute(draw.sample(range(base.dim()), base.dim()))
        seen = some_view(draw, base)
        try:
            chain = views.chain(*(Layout(t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in (held, seen)))
        except views.NotAView:
            continue
        reached += 1
        assert torch.equal(views.read(chain, held), seen)
        if any(isinstance(view, views.Expand) for view in chain):
            continue
        new, wanted = torch.rand(seen.shape), base.clone()
        wanted.as_strided(seen.shape, seen.stride(), seen.storage_offset()).copy_(new)
        assert torch.equal(views.write(chain, base if held is base else held, new), wanted.as_strided(held.shape, held.stride()))
    assert reached > 270


# ---- nodes as functional ops, whole runs as FX ---------------------------------------------------------------------------


def execute(recording: Recording, refused: str = "") -> tuple[Replay, list[Traced]]:
    """Run a recording as the engine would, its runs as FX that nobody compiles."""
    graph = recording.graph
    left = [node for node in graph.nodes if inductor_engine.refusal(node, False) or node.name == refused]
    replay, made = Replay(graph, recording.inputs, recording.scalars, CPU), []
    for run in part(graph, [node for node in graph.nodes if node not in left]):
        if not run.together:
            for node in run.nodes:
                replay.execute(node)
            continue
        traced = trace(run.nodes, stored(graph, run), recording.scalars, CPU)
        inputs = [replay.window(place.buffer.index, place.layout) for place in traced.places]
        for pack, dtype in ((traced.floats, torch.float64), (traced.ints, torch.int64)):
            inputs += [torch.tensor([recording.scalars[index] for index in pack], dtype=dtype)] if pack else []
        traced.module(*inputs)
        made.append(traced)
    return replay, made


def check(program: Callable[..., Any], *inputs: torch.Tensor, refused: str = "") -> list[Traced]:
    """What ``program`` leaves in memory as runs equals what eager mode leaves. Gives the runs."""
    recording, _ = record(program, *inputs)
    replay, made = execute(recording, refused)
    for value in recording.graph.outputs():
        layout = next(write.layout for write in value.producer.writes if write.value is value)
        got, wanted = (window(memory[value.buffer.index], layout) for memory in (replay.memory, recording.expected))
        bound = 4e-2 if layout.dtype in (torch.bfloat16, torch.float16) else 1e-4
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound, equal_nan=True)
    return made


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(programs.steps(barriers=False))
def test_random_programs_as_functional_runs_equal_eager_mode(program: list[programs.Step]) -> None:
    check(lambda *tensors: programs.interpret(program, list(tensors)), *programs.inputs("cpu"))


def updates(weight: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor) -> list[torch.Tensor]:
    """Each way in which an optimizer says a number."""
    torch._foreach_mul_([weight, mean.view(-1)[:4]], 0.9)
    torch._foreach_add_([weight, mean.view(-1)[:4]], [gradient, gradient.view(-1)[4:8]], alpha=-0.1)
    torch._foreach_lerp_([mean], [gradient], 0.25)
    torch._foreach_addcmul_([mean], [gradient], [gradient], 0.5)
    root = torch._foreach_sqrt([mean.abs()])
    torch._foreach_div_(root, [1.5])
    torch._foreach_add_(root, 1e-8)
    torch._foreach_addcdiv_([weight], [mean], root, [-0.01])
    weight.add_(gradient, alpha=0.5).clamp_(-1.5, 2.5).masked_fill_(gradient > 0.5, 0.25)
    return root


def test_numbers_of_an_optimizer_stay_inputs() -> None:
    (made,) = check(updates, torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 4))
    assert not made.constants and len(made.floats) > 8


def test_a_list_whose_tensors_share_memory_is_left_to_aten() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch._foreach_mul_([x, x.view(-1)[:4]], 0.9)
        return x

    with pytest.raises(Untraceable, match="share memory"):
        check(program, torch.randn(3, 4))


def test_what_a_meta_kernel_refuses_is_left_to_aten_without_a_log() -> None:
    """ATen multiplies groups in float32 as well; the Meta kernel takes 16 bits only."""
    told: list[logging.LogRecord] = []
    log, handler = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(Untraceable, match="BF16"):
            check(torch._grouped_mm, torch.randn(8, 16), torch.randn(2, 16, 8), torch.tensor([3, 8], dtype=torch.int32))
        assert not told
        log.error("another matter")
        assert [record.getMessage() for record in told] == ["another matter"]
    finally:
        log.removeHandler(handler)


def test_numbers_that_only_a_constant_can_be_are_told() -> None:
    (made,) = check(lambda x: torch.nn.functional.layer_norm(x, (4,), eps=1e-3) * 0.5, torch.randn(3, 4))
    assert list(made.constants.values()) == [1e-3] and len(made.floats) == 1


def test_16_bit_tensors_meet_numbers_in_32_bits() -> None:
    x = torch.randn(64, dtype=torch.bfloat16)
    (made,) = check(lambda t: t * 0.1 + 1.0009765625, x)
    assert "float32" in str([node.meta["val"].dtype for node in made.module.graph.nodes if "val" in node.meta])


def test_models_as_runs_equal_eager_mode() -> None:
    def program(x: torch.Tensor, image: torch.Tensor, *weights: torch.Tensor) -> Any:
        first, second, kernel, scale, shift, mean, var = weights
        y = torch.nn.functional.gelu(torch.addmm(shift[:4], x, first.t()), approximate="tanh")
        q, k, v = (y @ second).view(2, 3, 4, 3).unbind(2)[:3]
        attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        z = torch.nn.functional.batch_norm(torch.conv2d(image, kernel, padding=1), mean, var, scale, shift, training=True)
        pooled = torch.nn.functional.max_pool2d(z.relu(), 2)
        return attended, pooled, torch.cat([pooled.flatten(1)[:, :5], y[:1, :3].expand(2, 3)], 1).log_softmax(-1)

    check(program, torch.randn(6, 4), torch.randn(2, 3, 8, 8), torch.randn(4, 4), torch.randn(4, 12), torch.randn(5, 3, 3, 3),
          torch.rand(5), torch.randn(5), torch.zeros(5), torch.ones(5))


# ---- runs ------------------------------------------------------------------------------------------------------------------


def test_what_aten_calls_stands_where_it_must_and_leaves_as_few_runs_as_possible() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sorted_first = w.sort().values  # needs nothing of the runs
        y = (x * 2).tanh()
        x.add_(1)  # after what read it
        z = y.cumsum(0).sin()
        return z + sorted_first

    assert len(check(program, torch.randn(5), torch.randn(5))) == 1
    assert len(check(program, torch.randn(5), torch.randn(5), refused="cumsum")) == 2


# ---- compiled, end to end --------------------------------------------------------------------------------------------------


def count(name: str) -> int:
    return int(lazy_backend.stats()[name])


def scaled(x: torch.Tensor, factor: float, eps: float = 1e-5) -> torch.Tensor:
    x.view(-1)[::2].mul_(factor)
    y = torch.nn.functional.layer_norm(x.t(), (3,), eps=eps)
    return (y.bfloat16() * factor).float() + x.t().sum(0)


def both(factor: float, eps: float = 1e-5) -> None:
    mine, theirs = (torch.linspace(-1, 1, 12).reshape(3, 4).to(device, copy=True) for device in (DEVICE, "cpu"))
    lazy_backend.mark_step()
    got, wanted = scaled(mine, factor, eps), scaled(theirs, factor, eps)
    torch.testing.assert_close(got.cpu(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(mine.cpu(), theirs)


def numbers_that_change() -> None:
    traced: list[Any] = []
    original = inductor_engine.trace
    inductor_engine.trace = lambda *args: traced.append(args) or original(*args)
    both(0.5)
    before = len(traced), count("compiles")
    both(0.25)
    assert (len(traced), count("compiles")) == before, "a number is an input"
    both(0.5, eps=1e-2)
    assert (len(traced), count("compiles")) == (before[0] + 1, before[1]), "a constant makes a variant"
    inductor_engine.MAX_VARIANTS = 2
    both(0.5, eps=1e-1)
    assert len(traced) == before[0] + 1, "ATen runs what would be too many"


def test_a_changed_number_compiles_nothing_and_a_changed_constant_gives_its_own_numbers() -> None:
    assert "gives up" not in children.call(numbers_that_change, engine="inductor").stderr


def trained(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, target = torch.randn(16, 8).to(device), torch.randint(3, (16,)).to(device)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.detach().cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]


def a_training() -> None:
    torch.testing.assert_close(trained(DEVICE), trained("cpu"), rtol=1e-3, atol=1e-5)
    assert count("compiles") <= 3


def test_a_training_step_is_one_compiled_run() -> None:
    assert "gives up" not in children.call(a_training, engine="inductor").stderr


def no_compiler() -> None:
    x = torch.linspace(-1, 1, 12)
    x.to(DEVICE)  # the native core is built with the compiler that is there
    folder = tempfile.mkdtemp()
    with warnings.catch_warnings(record=True) as seen, settings.override(cxx="/nowhere/g++", cache_dir=folder):
        warnings.simplefilter("always")
        got = (x.to(DEVICE).tanh() * 2).exp().cpu()
    torch.testing.assert_close(got, (x.tanh() * 2).exp())
    (text,) = [str(warning.message) for warning in seen if warning.category is RuntimeWarning]
    assert "torch._inductor gives up on 3 nodes, which ATen runs instead: no C++ compiler is found" in text


def test_without_a_compiler_a_warning_says_so_and_aten_runs() -> None:
    children.call(no_compiler, engine="inductor", device="cpu")  # for a GPU it needs none
