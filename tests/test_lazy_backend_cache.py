"""What the cache of executables keeps and what is compiled again: numbers never, sizes without kernels. Each in a process of
its own, because the cache is the process's."""

from __future__ import annotations

from typing import Any, Callable

import children
import pytest
import torch

import lazy_backend
from benchmarks.training_programs import PROGRAMS
from codegen import loading, triton_engine
from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("built")


def compiles() -> int:
    return int(lazy_backend.stats()["compiles"])


def loaded() -> int:
    return len(triton_engine._interpreted) + len(loading._loaded)


def run(program: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``program`` as one recording."""
    result = program(*args)
    lazy_backend.mark_step()
    return result


def fusible(x: torch.Tensor, number: float = 0.5) -> torch.Tensor:
    """One pointwise kernel and one reduction."""
    return ((x * number).tanh() + 1).softmax(-1)


def five_programs() -> None:
    x = torch.linspace(-1, 1, 12, device=DEVICE)
    wanted = torch.linspace(-1, 1, 12)
    made: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.tanh,
        torch.exp,
        lambda t: t * 2 + 1,
        torch.sin,
        lambda t: t.sum(0),
    ]
    for _ in range(4):
        for program in made:
            torch.testing.assert_close(run(program, x).cpu(), program(wanted))
    assert lazy_backend.stats()["evicted"] >= 10
    before = compiles()
    for _ in range(6):
        run(torch.sin, x)
        run(torch.tanh, x)
    assert compiles() <= before + 2, "two programs fit"


def test_a_full_cache_drops_the_least_recently_used() -> None:
    children.call(five_programs, cache_size=2)


def only_numbers_change() -> None:
    x = torch.linspace(-1, 1, 12, device=DEVICE)

    def program(step: int, rate: float) -> torch.Tensor:
        return torch.nn.functional.dropout(fusible(x, rate), 0.5).add(float(step)).mul_(1 - rate**step)

    run(program, 1, 0.5)
    run(program, 2, 0.25)
    before = compiles()
    for step in range(3, 9):
        torch.manual_seed(step)
        run(program, step, 1 / step)
    _other_line = program(9, 0.75)
    lazy_backend.mark_step()
    with torch.no_grad():
        run(program, 10, 0.1)
    torch.set_num_threads(2)
    run(program, 11, 0.2)
    assert compiles() == before


@pytest.mark.parametrize("engine", ["aten", "triton"])
def test_numbers_seeds_steps_and_lines_are_not_compiled_in(engine: str) -> None:
    children.call(only_numbers_change, engine=engine)


def another_batch_size() -> None:
    weight = torch.linspace(-1, 1, 96, device=DEVICE)

    def program(x: torch.Tensor) -> torch.Tensor:
        return fusible(x * weight).sum(0)

    counts = []
    for rows in (3072, 4096, 5120):
        x = torch.linspace(-1, 1, rows * 96).reshape(rows, 96)
        mine = x.to(DEVICE)
        lazy_backend.mark_step()
        before = compiles(), loaded()
        got = run(program, mine)
        counts.append((compiles() - before[0], loaded() - before[1]))
        torch.testing.assert_close(got.cpu(), fusible(x * weight.cpu()).sum(0), rtol=1e-4, atol=1e-4)
    assert counts[0][1] >= 1
    more = 1 if torch.cuda.is_available() else 0  # the sum is cut into as many parts as fill the multiprocessors
    assert [planned for planned, _ in counts] == [1, 1, 1], "a new size is planned again"
    assert sum(made for _, made in counts[1:]) <= more, f"and compiles no kernel: {counts}"


def test_another_batch_size_is_planned_again_and_compiles_no_kernel() -> None:
    children.call(another_batch_size, engine="triton")


def learned_by_learning(steps: int) -> list[int]:
    """Compilations of each step of a program that differentiates gradients, as meta-learning does."""
    step, found = PROGRAMS["learning_to_learn"](DEVICE, False), []
    for _ in range(steps):
        before = compiles()
        run(step)
        found.append(compiles() - before)
    return found


def test_gradients_of_gradients_come_in_the_same_order_every_step() -> None:
    """Nodes made by backward are numbered by a thread of autograd's own, others by this one."""
    assert sum(learned_by_learning(12)[3:]) == 0
