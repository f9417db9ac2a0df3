"""Cached steps that replay as CUDA graphs give eager's numbers whatever changes between them. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazy_backend
from tests import children

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def mlp(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(*layers)


def replays() -> int:
    return lazy_backend.stats()["graphs_replayed"]


def train(device: str, steps: int, dropout: float = 0.0, set_to_none: bool = True, keep: bool = False) -> torch.Tensor:
    """Losses of a small model whose learning rate changes at every step."""
    model = mlp(dropout=dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(11)
    losses, kept = [], []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        x = torch.randn(8, 32, generator=generator).to(device)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if step == steps // 2:
            with torch.no_grad():
                next(iter(model.parameters())).mul_(0.5)
        losses.append(loss.detach())
        if keep:
            kept.append(x)
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("options", [{}, {"set_to_none": False}, {"keep": True}, {"dropout": 0.1}])
def test_training_replays_and_equals_eager(options: dict[str, float | bool]) -> None:
    eager = train("cuda", 24, **options)  # type: ignore[arg-type]
    before, compiles = replays(), lazy_backend.stats()["compiles"]
    lazy = train("lazysched", 24, **options)  # type: ignore[arg-type]
    assert replays() - before >= 12
    assert lazy_backend.stats()["compiles"] - compiles < 12
    torch.testing.assert_close(lazy, eager, rtol=2e-4, atol=2e-5)


def test_results_that_are_kept_are_not_overwritten() -> None:
    model, inputs = mlp().to("lazysched"), torch.randn(12, 8, 32)
    twin = mlp().cuda()
    before = replays()
    with torch.no_grad():
        kept = []
        for x in inputs:
            kept.append(model(x.to("lazysched")))
            lazy_backend.mark_step()
        assert replays() - before >= 6
        for x, y in zip(inputs, kept):
            torch.testing.assert_close(y.cpu(), twin(x.cuda()).cpu(), rtol=1e-4, atol=1e-5)


def test_what_another_library_sees_stays_as_it_was() -> None:
    model, x = mlp().to("lazysched"), torch.randn(8, 32, device="lazysched")
    with torch.no_grad():
        for _ in range(6):
            y = model(x)
            lazy_backend.mark_step()
        seen = torch.from_dlpack(y)
        copy = seen.clone()
        for scale in (2.0, 3.0):
            x.mul_(scale)
            lazy_backend.mark_step()
            y = model(x)
            lazy_backend.mark_step()
        torch.cuda.synchronize()
        assert torch.equal(seen, copy)


def test_a_stream_of_its_own() -> None:
    model, x = mlp().to("lazysched"), torch.randn(8, 32, device="lazysched")
    with torch.no_grad():
        for _ in range(5):
            y = model(x)
            lazy_backend.mark_step()
        with torch.lazysched.stream(torch.lazysched.Stream()):
            z = model(x)
            lazy_backend.mark_step()
        torch.lazysched.synchronize()
        torch.testing.assert_close(y.cpu(), z.cpu())


def test_graphs_of_one_stream_share_their_memory() -> None:
    """What one uses between its launches and then drops, the next uses too."""
    from lazy_backend import graphs

    def body(_: int) -> None:
        torch.empty(1 << 26, dtype=torch.uint8, device="cuda").fill_(1)

    lazy_backend.mark_step()
    kept = [graphs.capture(0, [], body)]
    before = torch.cuda.memory_reserved()
    kept += [graphs.capture(0, [], body) for _ in range(3)]
    assert torch.cuda.memory_reserved() == before


def test_results_survive_the_replays_of_other_graphs() -> None:
    """Graphs of one stream share the memory of their intermediate results, whichever was captured first."""
    models, twins = ([mlp(seed).to(device) for seed in range(3)] for device in ("lazysched", "cuda"))
    held = []
    before = replays()
    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(8, 32)
            for which in (0, 1, 2, 1, 0):
                held.append((models[which](x.to("lazysched")), twins[which](x.cuda())))
                lazy_backend.mark_step()
    assert replays() - before >= 15
    for ours, theirs in held:
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-5)


def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """ATen calls alone, so that a program has nothing but a graph to launch."""
    for _ in range(6):
        x = x @ w
    return x


def test_a_program_without_kernels_runs_on_the_current_stream() -> None:
    w, eager = torch.eye(64) * 1.25, torch.ones(64, 64)
    ours, x = w.to("lazysched"), eager.to("lazysched")
    stream = torch.lazysched.Stream()
    stream.wait_stream(torch.lazysched.current_stream())
    before = replays()
    with torch.no_grad(), torch.lazysched.stream(stream):
        for _ in range(8):
            torch.cuda._sleep(20_000_000)  # what runs on another stream would not wait for it
            x.mul_(0.5)
            lazy_backend.mark_step()
            y = products(x, ours)
            lazy_backend.mark_step()
            eager = eager * 0.5
            torch.testing.assert_close(y.cpu(), products(eager, w), rtol=1e-3, atol=1e-6)
    assert replays() - before >= 4


def test_a_capture_that_fails_leaves_the_allocator_and_the_generator_as_they_were() -> None:
    """The histogram asks for the smallest and the largest element, which a capture cannot."""
    w = torch.randn(32, 32, device="lazysched")
    refused = sum(name.startswith("CudaGraphRefused") for name in torch._lazy.metrics.counter_names())
    held: list[int] = []
    for _ in range(60):
        x = torch.randn(256, 32).to("lazysched")  # copied on a stream of its own: memory of two streams
        counts = torch.histc((x @ w).relu() @ w, 8)
        scaled = (counts.sin() @ torch.ones(8, 4, device="lazysched")).exp()
        lazy_backend.mark_step()
        drawn = torch.bernoulli(torch.full((64,), 0.5, device="lazysched"))
        assert set(drawn.tolist()) <= {0.0, 1.0} and torch.isfinite(scaled).all().item()
        held.append(torch.cuda.memory_stats()["active_bytes.all.current"])
    assert sum(name.startswith("CudaGraphRefused") for name in torch._lazy.metrics.counter_names()) > refused
    assert held[-1] <= held[20] + (1 << 16)
    assert torch.rand(4, device="cuda").shape == (4,), "the generator of CUDA itself draws, too"


def test_an_op_that_no_graph_can_hold_runs_between_two() -> None:
    """The histogram fails the first capture; the step is planned once more, with it left out."""
    torch.manual_seed(0)
    w, rows = torch.eye(64) * 1.25, torch.randn(12, 64, 64)
    ours, theirs, mix = w.to("lazysched"), w.cuda(), torch.randn(8, 64)
    ours_mix, theirs_mix, before = mix.to("lazysched"), mix.cuda(), replays()

    def step(x: torch.Tensor, w: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        return products(torch.histc(products(x, w), 8)[None] @ mix, w)

    with torch.no_grad():
        for row in rows:
            y = step(row.to("lazysched"), ours, ours_mix)
            lazy_backend.mark_step()
            torch.testing.assert_close(y.cpu(), step(row.cuda(), theirs, theirs_mix).cpu(), rtol=1e-4, atol=1e-3)
    assert replays() - before >= 8
    assert any(name.startswith("CudaGraphRefused: aten::histc") for name in torch._lazy.metrics.counter_names())


@pytest.mark.parametrize("set_to", [True, False])
def test_replays_follow_the_switch_for_tf32(set_to: bool) -> None:
    """A graph holds the kernels that cuBLAS chose when it was captured."""
    x = torch.randn(256, 256)
    ours, theirs = x.to("lazysched"), x.cuda()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for on in (set_to, not set_to, set_to):
            torch.backends.cuda.matmul.allow_tf32 = on
            for _ in range(5):
                y = products(ours, ours / 16)
                lazy_backend.mark_step()
            eager = products(theirs, theirs / 16).cpu()
            assert (y.cpu() - eager).norm() < 1e-5 * eager.norm(), "TF32 is a hundred times as far off"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_or_all_does_not_move_the_generator(p: float) -> None:
    x = torch.ones(64, device="lazysched")
    torch.lazysched.manual_seed(3)
    torch.nn.functional.dropout(x, p)
    got = torch.rand(8, device="lazysched").cpu()
    torch.cuda.manual_seed(3)
    torch.nn.functional.dropout(torch.ones(64, device="cuda"), p)
    assert torch.equal(got, torch.rand(8, device="cuda").cpu())


OUTSIDE = """
import torch, torch.nn.functional as F
table, ids = torch.ones(8, 4, device="lazysched"), torch.tensor([0, {index}]).to("lazysched")
print("sum", (F.embedding(ids, table) + 1).sum().item())
"""


def test_an_index_out_of_range_is_a_device_side_assertion() -> None:
    fine, wrong = (children.run("import lazy_backend\n" + OUTSIDE.format(index=index)) for index in (7, 8))
    assert fine.returncode == 0 and "sum 16.0" in fine.stdout, fine.stderr
    assert wrong.returncode != 0 and "an index is out of range" in wrong.stderr + wrong.stdout, wrong.stderr
    read = children.run("import lazy_backend\n" + OUTSIDE.format(index=8), check_indices=False)
    assert read.returncode == 0 and "sum 12.0" in read.stdout, read.stderr


def test_no_graph_is_made_where_memory_runs_short(monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = torch.cuda.mem_get_info()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total // 20, total))
    x, w = torch.randn(48, 48, device="lazysched"), torch.eye(48, device="lazysched")
    before = replays()
    for _ in range(6):
        y = products(x, w)
        lazy_backend.mark_step()
    assert replays() == before and torch.isfinite(y).all().item()
    assert any("memory is free" in name for name in torch._lazy.metrics.counter_names())
