"""A boolean that came from numbers alone is known when it is asked for again: nothing runs, and the recording goes on."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from programs import Step, interpret, steps
from torch import Tensor, nn

import lazy_backend
from ir_nodes import settings as ours
from tests import ranks
from tests.device import CLOSE, DEVICE

pytestmark = pytest.mark.usefixtures("nothing_pending")


def asked(question: Callable[[], bool], times: int = 3) -> list[tuple[bool, int, int]]:
    """Of each time the answer, how many recordings ended for it, and how many answers were known."""
    told = []
    for _ in range(times):
        before = lazy_backend.stats()
        answer = question()
        after = lazy_backend.stats()
        told.append((answer, *(after[name] - before[name] for name in ("flushes", "values_known"))))
    return told


def packed(length: int = 6, device: str = DEVICE) -> Tensor:
    """Does one sequence follow another in a row? What a model asks of positions that it has just numbered."""
    positions = torch.arange(length, device=device)[None]
    return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)[:, -1].ne(0).any()


def causal(device: str = DEVICE) -> Tensor:
    mask = torch.full((4, 4), float("-inf"), device=device)
    mask.triu_(1)
    return (mask[0, 1:] == float("-inf")).all()


def flags(device: str = DEVICE) -> Tensor:
    made = torch.zeros(3, 3, dtype=torch.bool, device=device)
    made[1:, 0].logical_not_()
    return made[2, 0]


@pytest.mark.parametrize("question", [packed, causal, flags], ids=lambda one: one.__name__)
def test_a_question_to_numbers_alone_is_answered_once(question: Callable[..., Tensor]) -> None:
    wanted = bool(question(device="cpu"))
    assert asked(lambda: bool(question())) == [(wanted, 1, 0), (wanted, 0, 1), (wanted, 0, 1)]


def test_what_follows_is_one_recording_with_what_came_before() -> None:
    x = torch.linspace(-1, 1, 8).to(DEVICE)

    def step() -> Tensor:
        before = x.sin()
        return before.cos() if bool(packed(7)) else before.exp()

    step(), lazy_backend.mark_step()
    before = lazy_backend.stats()
    got = step()
    lazy_backend.mark_step()
    assert lazy_backend.stats()["flushes"] - before["flushes"] == 1
    torch.testing.assert_close(got.cpu(), x.cpu().sin().exp(), rtol=CLOSE, atol=CLOSE)


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: (x > 0).all(),
    "drawn": lambda x: (torch.rand(3, device=DEVICE) < 2).all(),
    "what a tensor that was there is written into": lambda x: x[:2].fill_(1).eq(1).all(),
    "part of what came from elsewhere": lambda x: (torch.zeros(4, device=DEVICE).index_fill_(0, x.long(), 1) < 2).all(),
    "copied from the CPU": lambda x: (torch.arange(3, device=DEVICE) < torch.tensor([7, 8, 9]).to(DEVICE)).all(),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_comes_from_elsewhere_is_looked_at(kind: str) -> None:
    x = torch.arange(1.0, 4).to(DEVICE)
    assert asked(lambda: bool(UNKNOWN[kind](x))) == 3 * [(True, 1, 0)]


def test_an_input_that_changes_is_seen() -> None:
    answers = []
    for value in (1.0, -1.0, 2.0):
        given_now = torch.full((3,), value).to(DEVICE)
        answers.append(bool((torch.zeros(3, device=DEVICE) < given_now).all()))
    assert answers == [True, False, True]


def test_numbers_are_part_of_the_question() -> None:
    def above(number: float, alpha: int = 1) -> bool:
        return bool((torch.arange(3, device=DEVICE).add(1, alpha=alpha) > number).all())

    assert [above(0.5), above(1.5), above(0.5), above(1.5)] == [True, False, True, False]
    assert [above(1.5, 2), above(0.0, -1)] == [True, False]
    assert asked(lambda: above(1.5, 2), 1) == [(True, 0, 1)]


def test_only_booleans_are_known() -> None:
    assert asked(lambda: torch.ones(3, device=DEVICE).sum().item() == 3) == 3 * [(True, 1, 0)]


def test_results_and_elements_have_their_own_answers() -> None:
    def questions() -> list[bool]:
        made = torch.zeros(4, device=DEVICE)
        made[1] = 3
        values, places = made.max(0)
        return [bool(one) for one in (values == 3, places == 3, (made == 3)[1], (made == 3)[0], made[1] == 3, made[2] == 3)]

    wanted = [True, False, True, False, True, False]
    assert [questions() for _ in range(8)] == 8 * [wanted]
    assert asked(lambda: questions() == wanted, 1) == [(True, 0, 6)]


def test_what_is_written_later_is_another_question() -> None:
    def questions() -> list[bool]:
        made = torch.arange(3, device=DEVICE)
        more = made + 1
        made.add_(5)
        first, second = (more < 4).all(), (made < 4).all()
        more.copy_(made)
        return [bool(first), bool(second), bool((more < 4).all())]

    assert [questions() for _ in range(5)] == 5 * [[True, False, False]]


def constants() -> list[Tensor]:
    """As `programs.inputs`, but made by the device itself."""
    base = torch.linspace(-2, 2, 24, device=DEVICE)
    made = [base.reshape(4, 6), torch.linspace(-1, 1, 6, device=DEVICE), base.flip(0).reshape(3, 4, 2)]
    made += [torch.linspace(0.1, 0.4, 4, device=DEVICE).reshape(4, 1), torch.full((2, 6), 0.3, device=DEVICE).double()]
    return [tensor.clone() for tensor in made]


def answers(program: list[Step]) -> list[bool]:
    """What a program's results are asked in the middle and at the end."""
    told: list[bool] = []

    def ask(held: list[Tensor], which: int) -> None:
        told.append(bool((held[which % len(held)].flatten()[:1] > 0.3).any()))

    for one in interpret(program, constants(), ask):
        told += [bool(one.mean(dtype=torch.float64) > 0), bool((one < 0.5).all())]
    return told


@settings(max_examples=12, deadline=None)
@given(steps(barriers=True, max_size=12))
def test_random_programs(program: list[Step]) -> None:
    with ours.override(disable=frozenset({"known_values"})):
        lazy_backend.mark_step()
        before = lazy_backend.stats()["values_known"]
        wanted = answers(program)
        assert lazy_backend.stats()["values_known"] == before
    assert [answers(program) for _ in range(3)] == 3 * [wanted]


class Asks(nn.Module):
    """A model that chooses its way by a mask that it makes, as transformers' decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        return self.layer(x).relu().sum() if mask.all() else self.layer(x).sum()


def train(device: str) -> tuple[list[float], int]:
    """The losses of six steps, and how often Python ran one."""
    torch.manual_seed(0)
    model, x = Asks().to(device), torch.linspace(-1, 1, 32).view(4, 8).to(device)
    learner = torch.optim.SGD(model.parameters(), 1e-2)
    runs = 0

    def step() -> Tensor:
        nonlocal runs
        runs += 1
        loss = model(x)
        loss.backward()
        learner.step()
        learner.zero_grad()
        return loss.detach()

    run = step if device == "cpu" else lazy_backend.replayed(step)
    return [float(run()) for _ in range(6)], runs


def test_steps_that_ask_are_replayed() -> None:
    losses, runs = train(DEVICE)
    assert runs == 3
    assert losses == pytest.approx(train("cpu")[0], rel=1e-5)


def ask_all_ranks() -> None:
    def anywhere() -> bool:
        mine = torch.ones(2, device=DEVICE)
        dist.all_reduce(mine)
        return bool((mine == dist.get_world_size()).all())

    print(asked(anywhere))


def test_what_collectives_bring_is_looked_at() -> None:
    assert all(str(3 * [(True, 1, 0)]) in told for told in ranks.run(ask_all_ranks))
