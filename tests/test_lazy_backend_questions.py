"""What a replayed function asks of its arguments is asked before each replay; another answer is another kind of call."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from replays import new_refusals
from torch import Tensor, nn

import lazy_backend
from tests.device import CLOSE, DEVICE

pytestmark = pytest.mark.usefixtures("nothing_pending")


class Asks:
    """A function of a mask and numbers, and how often its Python ran."""

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.choose, self.runs = choose, 0

    def __call__(self, mask: Tensor, x: Tensor) -> Tensor:
        self.runs += 1
        return self.choose(mask, x)


def masks(count: int, full: Callable[[int], bool]) -> list[tuple[Tensor, Tensor]]:
    """Masks of ones, with a zero here or there where they are not ``full``, and numbers."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        mask = torch.ones(3, 5, dtype=torch.long)
        mask[number % 3, 4] = int(full(number))
        made.append((mask, torch.randn(3, 5, generator=generator)))
    return made


def compare(choose: Callable[[Tensor, Tensor], Tensor], inputs: list[tuple[Tensor, Tensor]]) -> int:
    """Replayed, it gives what it gives on the CPU. Returns how often its Python ran."""
    asks = Asks(choose)
    replay = lazy_backend.replayed(asks)
    for mask, x in inputs:
        got = replay(mask.to(DEVICE), x.to(DEVICE))
        torch.testing.assert_close(got.cpu(), choose(mask, x), rtol=CLOSE, atol=CLOSE)
    return asks.runs


def by_mask(mask: Tensor, x: Tensor) -> Tensor:
    return x.softmax(-1) if mask.all() else x.masked_fill(mask == 0, float("-inf")).softmax(-1)


def test_an_answer_that_stays_is_replayed() -> None:
    assert compare(by_mask, masks(8, lambda number: False)) == 3


def test_each_answer_has_a_recording() -> None:
    assert compare(by_mask, masks(30, lambda number: number % 3 == 2)) == 6


def two_questions(mask: Tensor, x: Tensor) -> Tensor:
    """The second is asked behind work, and only after the first answer."""
    y = x.tanh()
    if mask.all():
        return y
    return y * 2 if (mask[0].sum() == 5) & (x == x).all() else y - 1


def behind_a_draw(mask: Tensor, x: Tensor) -> Tensor:
    """As where embeddings are dropped before the mask is looked at; nothing may be drawn or written twice."""
    noise = torch.empty_like(x)
    noise.uniform_(2, 3)
    x.add_(1)
    return (noise > 1) * x if mask.all() else (noise > 1) * x - 1


def test_a_question_behind_draws_and_writes() -> None:
    assert compare(behind_a_draw, masks(24, lambda number: number % 4 == 0)) == 6


def test_a_question_draws_nothing() -> None:
    def drawn(replays: bool) -> list[float]:
        def noisy(mask: Tensor) -> Tensor:
            noise = torch.rand(2, device=DEVICE)
            return noise if mask.all() else -noise

        torch.manual_seed(3)
        run = lazy_backend.replayed(noisy) if replays else noisy
        return [value for mask, _ in masks(12, lambda number: number % 4 == 0) for value in run(mask.to(DEVICE)).tolist()]

    assert drawn(replays=True) == drawn(replays=False)


def test_questions_that_follow_from_answers() -> None:
    assert compare(two_questions, masks(40, lambda number: number % 4 == 0)) == 9


def test_a_question_to_a_view_and_to_memory_that_two_arguments_share() -> None:
    def choose(mask: Tensor, x: Tensor) -> Tensor:
        return x + 1 if mask.bool().any() else x

    replay, whole = lazy_backend.replayed(Asks(choose)), torch.arange(10).view(2, 5)
    for number in range(12):
        both = whole.mul(number % 2).to(DEVICE)
        got = replay(both[1], both[0])
        assert got.tolist() == (whole[0] * (number % 2) + number % 2).tolist()


def test_an_argument_that_is_still_recorded_is_computed_first() -> None:
    asks = Asks(by_mask)
    replay = lazy_backend.replayed(asks)
    for number in range(6):
        mask = (torch.arange(15, device=DEVICE).view(3, 5) != number).long() * 1
        got = replay(mask, torch.zeros(3, 5, device=DEVICE))
        wanted = by_mask((torch.arange(15).view(3, 5) != number).long(), torch.zeros(3, 5))
        torch.testing.assert_close(got.cpu(), wanted)
    assert asks.runs == 3


def test_nothing_of_a_call_stays_alive() -> None:
    replay = lazy_backend.replayed(by_mask)

    def held() -> int:
        replay(*(one.to(DEVICE) for one in masks(1, lambda number: False)[0]))
        lazy_backend.mark_step(wait=True)
        return torch.lazysched.memory_allocated()

    for _ in range(4):
        held()
    assert held() == held() == held()


KEPT = nn.Linear(5, 5)
REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "computes": (lambda mask, x: x + 1 if x.mean() > 0 else x, "computes in floating point"),
    "of what it computes of what it keeps": (lambda mask, x: x + 1 if KEPT.weight.sum() > 9 else x, "in floating point"),
    "of what it copies": (lambda mask, x: x + 1 if (mask == torch.tensor([0, 1, 1, 1, 1]).to(DEVICE)).any() else x, "is gone"),
    "behind a write": (lambda mask, x: x + 1 if mask.mul_(1).all() else x, "has written by then"),
    "before a write": (lambda mask, x: x + 1 if (mask.eq(1), mask.add_(0))[0].all() else x, "has written by then"),
    "what is drawn": (lambda mask, x: torch.rand_like(x) if (torch.rand_like(x) < mask + 1).all() else x, "drawn"),
    "a number": (lambda mask, x: x * int(mask.sum()), "reads a value"),
    "much": (lambda mask, x: x + 1 if sum((mask + n for n in range(40)), start=mask).all() else x, "more than 32"),
}


@pytest.mark.parametrize("kind", REFUSED)
@torch.no_grad()
def test_other_questions_are_refused_with_a_reason(kind: str) -> None:
    KEPT.to(DEVICE)
    choose, reason = REFUSED[kind]
    inputs = [(mask.to(DEVICE), x.to(DEVICE)) for mask, x in masks(4, lambda number: False)]
    asks = Asks(choose)
    replay = lazy_backend.replayed(asks)
    assert reason in new_refusals(lambda: [replay(*one) for one in inputs])
    assert asks.runs == len(inputs)


class Begins(nn.Module):
    """Scales by what the first call saw, as activation norms of flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.scale.copy_(1 / x.abs().amax(0))
            self.begun.fill_(True)
        return x * self.scale


@torch.no_grad()
def test_what_a_module_keeps_may_be_asked() -> None:
    lazy, eager = Begins().to(DEVICE), Begins()
    asks = Asks(lambda mask, x: lazy(x))
    replay = lazy_backend.replayed(asks)
    for number, (mask, x) in enumerate(masks(12, lambda number: False)):
        if number == 8:
            lazy.begun.fill_(False), eager.begun.fill_(False)
        torch.testing.assert_close(replay(mask.to(DEVICE), x.to(DEVICE)).cpu(), eager(x), rtol=CLOSE, atol=CLOSE)
    assert asks.runs == 4  # the first, two that are compared, and the ninth, which begins anew


class Padded(nn.Module):
    """Attention over rows that may be padded."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.tokens(ids)
        bias = None if mask.all() else mask[:, None, None].bool()
        h = nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], attn_mask=bias)[:, 0]
        losses = nn.functional.cross_entropy(self.out(h).transpose(1, 2), ids, reduction="none")
        return (losses * mask).sum() / mask.sum()


def train(device: str, replays: bool) -> tuple[list[float], int]:
    """The losses of twelve steps, every fourth on whole rows, and how often Python ran one."""
    torch.manual_seed(0)
    model = Padded().to(device)
    learner = torch.optim.SGD(model.parameters(), 0.1)
    runs, losses = 0, []

    def step(ids: Tensor, mask: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        loss = model(ids, mask)
        loss.backward()
        learner.step()
        learner.zero_grad()
        return loss.detach()

    run = lazy_backend.replayed(step) if replays else step
    for number, (mask, _) in enumerate(masks(12, lambda number: number % 4 == 3)):
        ids = torch.arange(15).view(3, 5).add(number).remainder(11)
        losses.append(run(ids.to(device), mask.to(device)))
    return [float(loss) for loss in losses], runs


def test_steps_on_padded_rows() -> None:
    losses, runs = train(DEVICE, replays=True)
    wanted, always = train("cpu", replays=False)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert (runs, always) == (6, 12)


LOOKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda flag, x: x * flag.item(),
    "tolist": lambda flag, x: x * flag.tolist(),
    "cpu": lambda flag, x: x * float(flag.cpu()),
    "numpy": lambda flag, x: x * float(flag.numpy(force=True)),
    "int": lambda flag, x: x * int(flag),
    "bool": lambda flag, x: x * bool(flag),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_look_at_what_is_there_is_seen(kind: str) -> None:
    """Nothing has to run for it, so no recording ends."""
    replay = lazy_backend.replayed(LOOKS[kind])
    for number in range(8):
        flag, x = torch.tensor(number % 3, dtype=torch.bool if kind == "bool" else torch.float32), torch.arange(1.0, 4)
        assert replay(flag.to(DEVICE), x.to(DEVICE)).tolist() == LOOKS[kind](flag, x).tolist()
