"""After a short warm-up nothing is compiled any more, whatever numbers change from step to step."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._lazy.metrics
from torch import nn

import lazy_backend
from lazy_backend import core, schema

DEVICE = "lazysched"


def compiles() -> int:
    return torch._lazy.metrics.counter_value("UncachedCompile") or 0


pytestmark = pytest.mark.usefixtures("nothing_pending")


class Block(nn.Module):
    """Embedding, attention, dropout, layer norm and a head: what a language model's step is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def test_a_thousand_adam_steps_under_a_schedule_compile_nothing_after_three() -> None:
    torch.manual_seed(0)
    model = Block().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    tokens = torch.arange(10).reshape(2, 5)
    losses, after_warm_up = [], 0
    for step in range(1000):
        batch = ((tokens + step) % 17).to(DEVICE)
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), ((batch + 1) % 17).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step == 2:
            after_warm_up = compiles()
    assert after_warm_up > 0
    assert compiles() == after_warm_up
    assert sum(losses[-20:]) / 20 < 0.5 * losses[0], "it learns"


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    lambda p: torch.optim.RMSprop(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.Adamax(p, lr=0.1),
    lambda p: torch.optim.NAdam(p, lr=0.1),
    lambda p: torch.optim.RAdam(p, lr=0.1),
], ids=["sgd", "adamw foreach", "adamw loop", "rmsprop", "adagrad", "adamax", "nadam", "radam"])  # fmt: skip
def test_every_optimizer_settles(make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(DEVICE)
    optimizer = make(model.parameters())
    x = torch.linspace(-1, 1, 12).reshape(3, 4).to(DEVICE)
    settled = 0
    for step in range(25):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step == 11:  # RAdam changes its formula once, at its sixth step
            settled = compiles()
    assert compiles() == settled


def test_numbers_that_change_are_inputs() -> None:
    x = torch.linspace(0, 1, 5, device=DEVICE)
    lazy_backend.mark_step()
    seen = []
    for step in range(30):
        y = (x * (0.1 * step) + step).clamp(-0.5 * step, 3.25 * step).pow(1.5).add(x, alpha=-0.01 * step)
        y = torch.where(y > 0.3 * step, y, torch.full_like(y, float(step)))
        lazy_backend.mark_step()
        wanted = torch.linspace(0, 1, 5)
        want = (wanted * (0.1 * step) + step).clamp(-0.5 * step, 3.25 * step).pow(1.5).add(wanted, alpha=-0.01 * step)
        want = torch.where(want > 0.3 * step, want, torch.full_like(want, float(step)))
        torch.testing.assert_close(y.cpu(), want)
        seen.append(compiles())
    assert seen[-1] == seen[3]


def test_a_share_that_drops_is_an_input_and_one_of_zero_a_constant() -> None:
    """Kernels that know that nothing drops must not run where something does; of other shares none is worth a program."""
    q = torch.ones(1, 1, 4, 8, device=DEVICE)
    lazy_backend.mark_step()

    def numbers(p: float, scale: float) -> list[float]:
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, p, False, scale=scale)
        found = core.get().trace_for([], 0).scalars()
        del made  # nobody runs it: a CPU's kernel refuses to drop
        lazy_backend.mark_step()
        return found

    for p in (0.1, 0.5, 1.0, 1e-300):
        assert numbers(p, 0.25) == [p, 0.25]
    for p in (0.0, -0.0):
        assert numbers(p, 0.0) == [0.0], "of a scale 0 is a number like any other"


@pytest.mark.parametrize("name", ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"])
def test_forward_and_backward_of_attention_know_shares_of_zero(name: str) -> None:
    for target in (f"aten::{name}", f"aten::{name}_backward"):
        names = [arg.name for arg in torch._C._get_schema(target, "").arguments]
        kinds = dict(zip(names, (kind for kind, _ in schema.read(target).args)))
        assert [one for one in kinds if kinds[one] == schema.ArgKind.SHARE] == ["dropout_p"]


@pytest.mark.parametrize("name", ["cudnn", "efficient", "flash"])
def test_attention_of_which_nothing_drops_draws_nothing(name: str) -> None:
    """So it neither waits for draws before it, nor ends a recording where somebody reads the generator's state."""
    q = torch.ones(1, 2, 64, 64, device=DEVICE, dtype=torch.float16)
    lazy_backend.mark_step()
    attend, between = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention"), () if name == "flash" else (None, True)

    def draws(p: float) -> bool:
        made = attend(q, q, q, *between, p)
        drawn = core.get().trace_for([], 0).instrs()[-1][5] >= 0
        barriers = lazy_backend.stats()["flushes"]
        with contextlib.suppress(NotImplementedError):  # of a CPU, where the draw would have to move the generator on
            torch.lazysched.default_generators[0].get_state()
        assert (lazy_backend.stats()["flushes"] > barriers) is drawn
        del made
        return drawn

    assert [draws(p) for p in (0.5, 0.0, -0.0)] == [True, False, False]


def test_a_seed_that_changes_does_not_compile() -> None:
    seen, draws = [], []
    for seed in range(12):
        torch.manual_seed(seed)
        draw = torch.nn.functional.dropout(torch.randn(6, device=DEVICE), 0.5)
        lazy_backend.mark_step()
        draws.append(tuple(draw.tolist()))
        seen.append(compiles())
    assert seen[-1] == seen[2]
    assert len(set(draws)) == 12


def test_0d_cpu_tensors_are_inputs() -> None:
    x = torch.ones(3, device=DEVICE)
    lazy_backend.mark_step()
    seen = []
    for step in range(10):
        y = x * torch.tensor(float(step))
        lazy_backend.mark_step()
        assert y.tolist() == [float(step)] * 3
        seen.append(compiles())
    assert seen[-1] == seen[1]


def test_what_must_compile_does() -> None:
    """A new shape, dtype, op, dim or liveness is another program; the old ones are still there afterwards."""
    x = torch.linspace(0, 1, 12, device=DEVICE).reshape(3, 4)
    lazy_backend.mark_step()
    programs = {
        "base": lambda: x.sum(0),
        "other dim": lambda: x.sum(1),
        "other shape": lambda: x[:2].sum(0),
        "other dtype": lambda: x.double().sum(0),
        "other op": lambda: x.amax(0),
    }
    results = {}
    for name, program in programs.items():
        before = compiles()
        results[name] = program()
        lazy_backend.mark_step()
        assert compiles() == before + 1, name
    before = compiles()
    for name, program in programs.items():
        again = program()
        lazy_backend.mark_step()
        assert torch.equal(again.cpu(), results[name].cpu()), name
    assert compiles() == before


def test_the_second_step_hits_the_cache_and_counts_it() -> None:
    x = torch.ones(7, device=DEVICE)
    lazy_backend.mark_step()
    kept = []
    for _ in range(5):
        kept.append((x * 2 - 1).exp())
        lazy_backend.mark_step()
    before = torch._lazy.metrics.counter_value("CachedCompile")
    kept.append((x * 2 - 1).exp())
    lazy_backend.mark_step()
    assert torch._lazy.metrics.counter_value("CachedCompile") == before + 1
    assert {float(result[3].item()) for result in kept} == {kept[0][0].item()}


def test_two_models_of_one_shape_share_their_programs() -> None:
    torch.manual_seed(0)
    first, second = (nn.Linear(5, 5).to(DEVICE) for _ in range(2))
    x = torch.ones(2, 5, device=DEVICE)
    lazy_backend.mark_step()
    one = first(x).relu()
    lazy_backend.mark_step()
    before = compiles()
    two = second(x).relu()
    lazy_backend.mark_step()
    assert compiles() == before
    assert not torch.equal(one.cpu(), two.cpu())
    torch.testing.assert_close(two.cpu(), torch.relu(second.to("cpu")(torch.ones(2, 5))))


def test_buffers_that_coincide_are_told_apart_from_buffers_that_do_not() -> None:
    """``a + a`` and ``a + b`` hold the same shapes and ops, but are different programs."""
    a, b = torch.ones(3, device=DEVICE), torch.full((3,), 5.0, device=DEVICE)
    lazy_backend.mark_step()
    for _ in range(2):
        same = a + a
        lazy_backend.mark_step()
        different = a + b
        lazy_backend.mark_step()
        aliased = a[:2] + a[1:]
        lazy_backend.mark_step()
        assert (same.tolist(), different.tolist(), aliased.tolist()) == ([2.0] * 3, [6.0] * 3, [2.0] * 2)
