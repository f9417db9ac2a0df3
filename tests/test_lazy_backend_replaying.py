"""A replayed function records what it recorded before: the same numbers, without its Python, on other arguments."""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterator

import pytest
import torch
import torch._lazy.metrics
from torch import Tensor, nn

import lazy_backend
from ir_nodes import settings

DEVICE = "lazysched"


@pytest.fixture(autouse=True)
def started() -> Iterator[None]:
    torch.ones(1, device=DEVICE)
    lazy_backend.mark_step(wait=True)
    yield
    lazy_backend.mark_step(wait=True)


class Counted:
    """A model with a state of its own, and how often its Python ran."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8).to(device)
        self.total = torch.zeros(4, 8, device=device)
        self.runs = 0

    @torch.no_grad()
    def __call__(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.runs += 1
        y = nn.functional.gelu(self.layer(x)) * scale
        self.total.add_(y)
        return {"y": y, "first": y[:, 0], "same": x, "view": x.t(), "name": "model"}


def inputs(device: str, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator).to(device) for _ in range(count)]


def refusals() -> dict[str, int]:
    names = torch._lazy.metrics.counter_names()
    return {name: torch._lazy.metrics.counter_value(name) for name in names if name.startswith("ReplayRefused")}


def new_refusals(run: Callable[..., Any], *given: Any) -> str:
    before = refusals()
    run(*given)
    return "\n".join(name for name, count in refusals().items() if count > before.get(name, 0))


def test_later_calls_run_no_python_and_give_the_same() -> None:
    lazy, eager = Counted(DEVICE), Counted("cpu")
    step = lazy_backend.replayed(lazy)
    kept = []
    for mine, theirs in zip(inputs(DEVICE, 7), inputs("cpu", 7)):
        found, wanted = step(mine), eager(theirs)
        kept.append((found, wanted))
        assert found["same"] is mine and found["name"] == "model"
    for found, wanted in kept:  # results are new tensors each time, views of them included
        for name in ("y", "first", "view"):
            torch.testing.assert_close(found[name].cpu(), wanted[name])
    torch.testing.assert_close(lazy.total.cpu(), eager.total)
    assert lazy.runs == 3 and eager.runs == 7


def test_views_of_an_argument_are_views_of_the_new_one() -> None:
    step = lazy_backend.replayed(Counted(DEVICE))
    for x in inputs(DEVICE, 6):
        step(x)["view"].zero_()
        assert not x.cpu().any()


def test_nothing_is_compiled_after_the_first_replays() -> None:
    step = lazy_backend.replayed(Counted(DEVICE))
    counts = []
    for x in inputs(DEVICE, 9):
        step(x)
        lazy_backend.mark_step()
        counts.append(lazy_backend.stats()["compiles"])
    assert counts[-1] == counts[4]


def test_what_is_recorded_around_it_is_one_recording_with_it() -> None:
    lazy, eager = Counted(DEVICE), Counted("cpu")
    step = lazy_backend.replayed(lazy)
    for mine, theirs in zip(inputs(DEVICE, 5), inputs("cpu", 5)):
        before = lazy_backend.stats()["flushes"]
        found = step(step(mine * 2)["y"] + 1)["y"].sum()
        flushed = lazy_backend.stats()["flushes"] - before
        torch.testing.assert_close(found.cpu(), eager(eager(theirs * 2)["y"] + 1)["y"].sum())
    assert flushed == 0


def test_other_layouts_and_other_numbers_are_other_calls() -> None:
    lazy = Counted(DEVICE)
    step = lazy_backend.replayed(lazy)
    (x,) = inputs(DEVICE, 1)
    for _ in range(4):
        step(x, scale=2.0)
    assert lazy.runs == 3
    step(x, scale=3.0)
    step(x.t().contiguous().t(), scale=2.0)
    step(x, scale=2)
    assert lazy.runs == 6


def test_draws_go_on() -> None:
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    step = lazy_backend.replayed(noise)
    torch.manual_seed(3)
    found = [step(x).cpu() for x in inputs(DEVICE, 6)]
    torch.manual_seed(3)
    for mine, x in zip(found, inputs(DEVICE, 6)):
        assert torch.equal(mine, noise(x).cpu())


class Trainer:
    """A model and its optimizer; ``step`` is a whole training step."""

    def __init__(self, device: str, make: Callable[[Any], torch.optim.Optimizer], dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8)]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = make(self.model.parameters())
        self.runs = 0

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.runs += 1
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def everything(self) -> dict[str, Tensor]:
        found = {name: value.detach().cpu() for name, value in self.model.state_dict().items()}
        found |= {f"{name}.grad": p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": v.cpu() for name, v in state.items() if isinstance(v, Tensor)}
        return found


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize("make", [adamw(capturable=True), adamw(fused=True), sgd], ids=["capturable", "fused", "sgd"])
def test_a_whole_training_step(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    plain, again = Trainer(DEVICE, make), Trainer(DEVICE, make)
    step = lazy_backend.replayed(again.step)
    for x, y in zip(inputs(DEVICE, 9), reversed(inputs(DEVICE, 9))):
        assert torch.equal(step(x, y).cpu(), plain.step(x, y).cpu())
    wanted, found = plain.everything(), again.everything()
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert again.runs == 3 and plain.runs == 9
    # What was left can be used as after a call: by autograd, by the optimizer, by state dicts.
    (x,) = inputs(DEVICE, 1)
    for one in (plain, again):
        one.model(x).sum().backward()
        one.optimizer.step()
    for name, value in plain.everything().items():
        assert torch.equal(again.everything()[name], value), name


def test_dropout_in_a_training_step_draws_as_without_replays() -> None:
    losses = []
    for wrap in (False, True):
        one = Trainer(DEVICE, adamw(capturable=True), dropout=0.5)
        step = lazy_backend.replayed(one.step) if wrap else one.step
        torch.manual_seed(5)
        losses.append([step(x, x).item() for x in inputs(DEVICE, 7)])
    assert losses[0] == losses[1]


def test_a_learning_rate_that_changes_is_recorded_anew() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)
    step = lazy_backend.replayed(again.step)
    for number, x in enumerate(inputs(DEVICE, 12)):
        if number == 6:
            for one in (plain, again):
                one.optimizer.param_groups[0]["lr"] = 0.01
        assert step(x, x).item() == plain.step(x, x).item()
    assert again.runs == 5


def test_a_tensor_learning_rate_may_change_at_every_step() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2, device=DEVICE), capturable=True)

    plain, again = Trainer(DEVICE, make), Trainer(DEVICE, make)
    step = lazy_backend.replayed(again.step)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one.optimizer, 0.5) for one in (plain, again)]
    for x in inputs(DEVICE, 8):
        assert step(x, x).item() == plain.step(x, x).item()
        for schedule in schedules:
            schedule.step()
    assert again.runs == 3


def test_modes_and_frozen_parameters_are_noticed() -> None:
    plain, again = Trainer(DEVICE, sgd, dropout=0.3), Trainer(DEVICE, sgd, dropout=0.3)
    step = lazy_backend.replayed(again.step)

    def change(number: int, one: Trainer) -> None:
        if number == 4:
            one.model.eval()
        if number == 9:
            one.model[0].requires_grad_(False)
            one.model[0].weight.grad = None

    found, wanted = [], []
    for losses, one, run in ((found, again, step), (wanted, plain, plain.step)):
        torch.manual_seed(2)
        for number, x in enumerate(inputs(DEVICE, 14)):
            change(number, one)
            losses.append(run(x, x).item())
    assert found == wanted
    for name, value in plain.everything().items():
        assert torch.equal(again.everything()[name], value), name


def test_gradients_cleared_outside_run_as_always() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)

    def step(one: Trainer, x: Tensor) -> Tensor:
        one.runs += 1
        loss = one.model(x).square().mean()
        loss.backward()
        one.optimizer.step()
        return loss.detach()

    wrapped = lazy_backend.replayed(lambda x: step(again, x))
    told = []
    with pytest.warns(RuntimeWarning, match="not replayed"):
        for x in inputs(DEVICE, 10):
            for one in (plain, again):
                one.optimizer.zero_grad()
            told.append(new_refusals(wrapped, x))
            step(plain, x)
            for name, value in plain.everything().items():
                assert torch.equal(again.everything()[name], value), name
    assert again.runs == 10 and any("zero_grad() inside" in one for one in told)


def test_accumulated_gradients() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)

    def half(one: Trainer, x: Tensor) -> Tensor:
        loss = one.model(x).square().mean()
        loss.backward()
        return loss.detach()

    wrapped = lazy_backend.replayed(lambda x: half(again, x))
    for number, x in enumerate(inputs(DEVICE, 16)):
        assert wrapped(x).item() == half(plain, x).item()
        if number % 4 == 3:
            for one in (plain, again):
                one.optimizer.step()
                one.optimizer.zero_grad(set_to_none=False)
    for name, value in plain.everything().items():
        assert torch.equal(again.everything()[name], value), name


class Keeps:
    def __init__(self) -> None:
        self.last: Any = torch.zeros(4, 8, device=DEVICE)
        self.count = 0


def case_reads(x: Tensor, kept: Keeps) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


def case_copies(x: Tensor, kept: Keeps) -> Tensor:
    return x + torch.arange(8.0).to(DEVICE)


def case_replaces(x: Tensor, kept: Keeps) -> Tensor:
    kept.last = kept.last * 0.5 + x
    return kept.last.clone()


def case_returns_what_it_keeps(x: Tensor, kept: Keeps) -> Tensor:
    kept.last = x * 2
    return kept.last


def case_returns_a_view_of_what_it_keeps(x: Tensor, kept: Keeps) -> Tensor:
    kept.last = x * 2
    return kept.last[1:]


def case_counts(x: Tensor, kept: Keeps) -> Tensor:
    kept.count += 1
    return x * float(kept.count)


def case_takes_a_host_number(x: Tensor, kept: Keeps) -> Tensor:
    return x * torch.tensor(2.5)


def case_returns_python(x: Tensor, kept: Keeps) -> Any:
    kept.count += 1
    return x * 2, kept.count


def case_runs_at_once(x: Tensor, kept: Keeps) -> Tensor:
    return x.nonzero().sum() + x


CASES = {
    "reads a value": case_reads, "copies from the CPU": case_copies, "replaces": case_replaces,
    "keeps, too": case_returns_what_it_keeps, "that it keeps": case_returns_a_view_of_what_it_keeps,
    "a number changes": case_counts, "from a tensor on the CPU": case_takes_a_host_number,
    "differs from call to call": case_returns_python, "runs at once": case_runs_at_once,
}  # fmt: skip


@pytest.mark.parametrize("why", CASES)
@pytest.mark.filterwarnings("ignore:lazysched.*not replayed")
def test_what_cannot_be_replayed_runs_as_always(why: str) -> None:
    function = CASES[why]
    mine, theirs = Keeps(), Keeps()
    step = lazy_backend.replayed(lambda x: function(x, mine))
    told = []

    def compare(x: Tensor) -> None:
        found, wanted = step(x), function(x, theirs)
        if isinstance(wanted, tuple):
            assert found[1] == wanted[1]
            found, wanted = found[0], wanted[0]
        assert torch.equal(found.cpu(), wanted.cpu())
        assert torch.equal(mine.last.cpu(), theirs.last.cpu())

    for x in inputs(DEVICE, 7):
        told.append(new_refusals(compare, x))
    assert any(why in one for one in told), told


def test_a_result_with_a_graph_runs_as_always() -> None:
    one = Trainer(DEVICE, sgd)
    forward = lazy_backend.replayed(one.model)
    told = []
    for x in inputs(DEVICE, 6):
        told.append(new_refusals(lambda x: forward(x).sum().backward(), x))
        assert one.model[0].weight.grad is not None
        one.optimizer.zero_grad()
    assert any("detach()" in text for text in told)
    with torch.no_grad():
        one.model.eval()
        told = [new_refusals(forward, x) for x in inputs(DEVICE, 6)]
    assert not any(told)


def test_arguments_that_decide_more_than_their_layout_run_as_always() -> None:
    def scale(x: Tensor, by: Tensor) -> Tensor:
        return x * (2.0 if by.tolist()[0] else 3.0)

    step = lazy_backend.replayed(scale)
    (x,) = inputs(DEVICE, 1)
    for number in range(8):
        by = torch.tensor([number % 2])
        assert torch.equal(step(x, by).cpu(), scale(x, by).cpu())


def test_an_argument_that_is_also_found_elsewhere() -> None:
    total = torch.zeros(4, 8, device=DEVICE)

    def add(x: Tensor) -> Tensor:
        total.add_(x)
        return x + total

    step, wanted = lazy_backend.replayed(add), torch.zeros(4, 8)
    for x in (*inputs(DEVICE, 5), total, *inputs(DEVICE, 2)):
        theirs = x.cpu()
        wanted = wanted + theirs if x is not total else wanted * 2
        mine = step(x).cpu()
        torch.testing.assert_close(mine, (theirs if x is not total else wanted) + wanted)


def test_the_step_ends_where_the_optimizers_did() -> None:
    one = Trainer(DEVICE, sgd)
    step = lazy_backend.replayed(one.step)
    counts = []
    for x in inputs(DEVICE, 6):
        before = lazy_backend.stats()["flushes"]
        step(x, x)
        counts.append(lazy_backend.stats()["flushes"] - before)
    assert counts[-1] == 1


def test_state_dicts_that_are_loaded_are_used() -> None:
    plain, again = Trainer(DEVICE, sgd), Trainer(DEVICE, sgd)
    step = lazy_backend.replayed(again.step)
    for number, x in enumerate(inputs(DEVICE, 12)):
        if number == 3:
            saved = [(copy.deepcopy(one.model.state_dict()), copy.deepcopy(one.optimizer.state_dict())) for one in (plain, again)]
        if number == 7:
            for one, (model, optimizer) in zip((plain, again), saved):
                one.model.load_state_dict(model)
                one.optimizer.load_state_dict(optimizer)
        assert step(x, x).item() == plain.step(x, x).item()


def test_an_error_in_the_function_loses_nothing() -> None:
    one = Counted(DEVICE)
    fails = [False]

    def step(x: Tensor) -> Tensor:
        y = one(x)["y"]
        if fails[0]:
            raise ValueError("the user's")
        return y * 2

    wrapped = lazy_backend.replayed(step)
    xs = inputs(DEVICE, 6)
    wrapped(xs[0])
    fails[0] = True
    with pytest.raises(ValueError, match="the user's"):
        wrapped(xs[1])
    fails[0] = False
    eager = Counted("cpu")
    eager(xs[0].cpu()), eager(xs[1].cpu())
    for x in xs[2:]:
        torch.testing.assert_close(wrapped(x).cpu(), eager(x.cpu())["y"] * 2)
    torch.testing.assert_close(one.total.cpu(), eager.total)


def test_the_switch() -> None:
    lazy = Counted(DEVICE)
    step = lazy_backend.replayed(lazy)
    with settings.override(disable="replay"):
        for x in inputs(DEVICE, 5):
            step(x)
    assert lazy.runs == 5


def test_a_schedule_runs_the_function() -> None:
    lazy = Counted(DEVICE)
    step = lazy_backend.replayed(lazy)
    (x,) = inputs(DEVICE, 1)
    for _ in range(4):
        step(x)
    handle = lazy_backend.register_schedule_hook(lambda recorded: [])
    try:
        step(x)
    finally:
        handle.remove()
    assert lazy.runs == 4
