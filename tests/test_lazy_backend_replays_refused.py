"""What cannot be replayed runs as always, with the reason in the metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lazy_backend
from ir_nodes import settings
from tests.replays import DEVICE, Counted, Trainer, inputs, new_refusals, refusals, sgd, started  # noqa: F401 (a fixture)


class Keeps:
    def __init__(self) -> None:
        self.last: Any = torch.zeros(4, 8, device=DEVICE)
        self.count = 0


def case_reads(x: Tensor, kept: Keeps) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


def case_copies(x: Tensor, kept: Keeps) -> Tensor:
    return x + torch.arange(800.0).to(DEVICE)[:8]


def case_copies_what_changes(x: Tensor, kept: Keeps) -> Tensor:
    kept.count += 1
    return x + torch.tensor([float(kept.count)]).to(DEVICE)


def case_writes_over_what_it_copies(x: Tensor, kept: Keeps) -> Tensor:
    total = torch.ones(8).to(DEVICE)
    total += x[0]
    return x + total


def case_replaces(x: Tensor, kept: Keeps) -> Tensor:
    kept.last = kept.last * 0.5 + x
    return kept.last.clone()


def case_replaces_by_the_same(x: Tensor, kept: Keeps) -> Tensor:
    """For now: two calls find the same numbers in it."""
    kept.last = torch.where(x.sum() > 1e3, kept.last + x, kept.last)
    return kept.last + x


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
    "reads a value": case_reads, "it copies from the CPU": case_copies, "replaces": case_replaces,
    "copies from the CPU changes": case_copies_what_changes, "is gone": case_writes_over_what_it_copies,
    "replaces what": case_replaces_by_the_same,
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


def test_an_error_when_the_step_runs_reaches_the_user_and_the_step_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Trainer(DEVICE, sgd)
    step = lazy_backend.replayed(one.step)
    xs = inputs(DEVICE, 6)
    for x in xs[:5]:
        step(x, x)

    def fails(*given: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lazy_backend.api, "run_recorded", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(xs[5], xs[5])
    monkeypatch.undo()
    assert one.runs == 3


def test_a_warning_says_what_ends_the_recording_and_where() -> None:
    kept = Keeps()
    step = lazy_backend.replayed(lambda x: case_reads(x, kept))
    line = case_reads.__code__.co_firstlineno + 1
    with pytest.warns(RuntimeWarning, match=rf"reads a value, .*item\(\).* at .*replays_refused\.py:{line} in case_reads"):
        for x in inputs(DEVICE, 12):
            step(x)
    assert all("\n" not in one for one in refusals())
