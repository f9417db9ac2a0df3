"""What a segment is, line by line of its specification: arguments, threads, hooks, regions, barriers in between."""

from __future__ import annotations

import re
import threading
from typing import Any, Callable

import pytest
import torch
from torch import nn

import lazy_backend
from barriers.wishes import ContradictionError
from lazy_backend import LazyScheduler, ScheduleError, register_segment, segment
from tests.device import DEVICE
from tests.towers import Tower, name_all, pair, same, train

pytestmark = pytest.mark.usefixtures("no_segments_left")


class Shapes(Tower):
    """Keyword arguments, dicts, tuples, views and results that were changed in place."""

    def func1(self, *, value: torch.Tensor, scales: dict[str, float]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        y = self.a(value) * scales["first"]
        return {"both": (y[:, :3], y[:, 3:])}

    def func2(self, x: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
        y = self.b(x).tanh().clone()
        y[1:].mul_(2)
        into.append(y.t())
        return into[0].t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.func1(value=x, scales={"first": 0.5})["both"]
        return self.join(torch.cat([left, right], 1), self.func2(x, into=[]))


class Hooked(Tower):
    """Hooks of modules and of tensors compute, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.b.register_forward_hook(lambda module, args, out: out + 1)
        self.a.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5,))

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(x)
        y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return y.tanh()


class Quiet(Tower):
    """One part runs without gradients, the other in inference mode's stead, with them again inside."""

    def func1(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.a(x)
            with torch.enable_grad():
                return y + self.a(x.detach()).relu()


class Lowered(Tower):
    """Each part in a region of autocast of its own; one is left again inside."""

    def func1(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.a(x)
            with torch.autocast(x.device.type, enabled=False):
                return y.float().relu() + self.a(x)

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.b(x).tanh().float()


@pytest.mark.parametrize("kind", [Shapes, Hooked, Quiet, Lowered])
def test_whatever_a_segment_does_its_numbers_stay(kind: Callable[[], nn.Module]) -> None:
    model, truth = pair(kind)
    name_all(model)
    with LazyScheduler(schedule=["two", "one", "one_bwd", "two_bwd"], strict=True, debug_mode=True) as scheduler:
        got = train(model, DEVICE)
    wanted = train(truth, "cpu")
    tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if kind is Lowered else {}
    torch.testing.assert_close([one.cpu() for one in got], wanted, **tolerance)
    assert scheduler.recorded_execution_order() == ["two", "one", "join", "one_bwd", "two_bwd"]


def test_what_another_thread_runs_belongs_to_its_segment() -> None:
    model, truth = pair(Tower)
    name_all(model)

    def run(place: str, one: nn.Module) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        worker = threading.Thread(target=lambda: found.extend(train(one, place)))
        worker.start()
        worker.join()
        return found

    with lazy_backend.register_segment_forward_pre_hook("one", "two"), LazyScheduler() as scheduler:
        got = run(DEVICE, model)
    same(got, run("cpu", truth))
    assert scheduler.recorded_execution_order() == ["two", "one", "join", "two_bwd", "one_bwd"]


def test_each_thread_has_a_scheduler_of_its_own() -> None:
    """The threads take turns step by step; each sees its own segments, whose calls are counted by its own steps."""
    schedules = (["two0", "one0"], ["two1", "one1"], [])
    pairs = [pair(Tower) for _ in schedules]
    turns = [threading.Semaphore(int(number == 0)) for number in range(len(schedules))]
    got: dict[int, list[torch.Tensor]] = {}
    orders: dict[int, list[str]] = {}

    def work(number: int) -> None:
        model = pairs[number][0]
        with LazyScheduler(schedule=schedules[number], strict=True) as scheduler:
            for _ in range(2):
                turns[number].acquire()
                got[number] = train(model, DEVICE, steps=1)
                orders[number] = scheduler.recorded_execution_order()
                turns[(number + 1) % len(turns)].release()

    for number, (model, _) in enumerate(pairs):
        register_segment(model.func1, f"one{number}", nth_call=0)
        register_segment(model.func2, f"two{number}", nth_call=0)
    run_all(work, len(schedules))
    for number, (_, truth) in enumerate(pairs):
        train(truth, "cpu", steps=1)
        same(got[number], train(truth, "cpu", steps=1))
        assert orders[number] == [f"{name}{number}" for name in (("one", "two") if number == 2 else ("two", "one"))]


def test_schedulers_of_one_thread_add_up() -> None:
    """As one for each device of a program: what the outer asks for holds inside the inner, and one may end before the other."""
    pairs = [pair(Tower) for _ in range(2)]
    for number, (model, _) in enumerate(pairs):
        register_segment(model.func1, f"one{number}")
        register_segment(model.func2, f"two{number}")

    def step() -> list[torch.Tensor]:
        outs = [model(torch.ones(4, 6, device=DEVICE)).detach() for model, _ in pairs]
        lazy_backend.mark_step()
        return outs

    outer = LazyScheduler(schedule=["two0", "one0"], strict=True).start()
    with LazyScheduler(schedule=["two1", "one1"], strict=True) as inner:
        both = step()
        assert inner.recorded_execution_order() == outer.recorded_execution_order() == ["two0", "one0", "two1", "one1"]
        outer.stop()
        step()
        assert inner.recorded_execution_order() == ["one0", "two0", "two1", "one1"]
        with pytest.raises(ContradictionError, match="one1 before two1 .* two1 before one1|two1 before one1 .* one1 before two1"):
            LazyScheduler(schedule=["one1", "two1"]).start()
    same(both, [truth(torch.ones(4, 6)).detach() for _, truth in pairs])
    step()
    with LazyScheduler() as plain:
        step()
    assert plain.recorded_execution_order() == ["one0", "two0", "one1", "two1"]


def test_threads_that_share_a_device_keep_eagers_numbers() -> None:
    """Without turns: one thread's barrier runs what the others have recorded so far."""
    pairs = [pair(Tower) for _ in range(3)]
    for number, (model, _) in enumerate(pairs):
        register_segment(model.func1, f"one{number}")
        register_segment(model.func2, f"two{number}")
    got: dict[int, list[torch.Tensor]] = {}

    def work(number: int) -> None:
        with LazyScheduler(schedule=[f"two{number}", f"one{number}"]):
            got[number] = unseeded(pairs[number][0], DEVICE)

    run_all(work, 3)
    for number, (_, truth) in enumerate(pairs):
        same(got[number], unseeded(truth, "cpu"))


def unseeded(model: nn.Module, device: str) -> list[torch.Tensor]:
    """As `train`, but without setting the seed, which all threads would share."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(6):
        out = model(torch.full((4, 6), step / 6).to(device))
        optimizer.zero_grad()
        out.square().sum().backward()
        optimizer.step()
        found.append(out.detach())
    return [*found, *(p.detach() for p in model.parameters())]


def run_all(work: Callable[[int], None], count: int) -> None:
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)
            raise

    workers = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not failed and not any(worker.is_alive() for worker in workers), failed


def test_a_barrier_between_two_segments_is_named() -> None:
    def step() -> torch.Tensor:
        x = torch.ones(4, device=DEVICE)
        with segment("a"):
            y = x + 1
        lazy_backend.wait_device_ops()
        with segment("b"):
            z = x * 2
        return y + z

    with LazyScheduler(schedule=["b", "a"]) as scheduler:
        assert step().sum().item() == 16
    words = rf"wanted b before a, but a barrier ran a before b was recorded \(wait: wait_device_ops\(\) at {__file__}"
    assert re.search(words, scheduler.report()), scheduler.report()
    with pytest.raises(ScheduleError, match=words), LazyScheduler(schedule=["b", "a"], strict=True):
        kept = step()
    with LazyScheduler(schedule=["a", "b"], strict=True):
        kept = step()
    assert kept.sum().item() == 16


def test_python_runs_as_it_was_written() -> None:
    """Only tensor work moves: side effects of Python code keep their order, whatever the schedule."""
    seen: list[str] = []

    class Telling(Tower):
        def func1(self, x: torch.Tensor) -> torch.Tensor:
            seen.append("one")
            return super().func1(x)

        def func2(self, x: torch.Tensor) -> torch.Tensor:
            seen.append("two")
            return super().func2(x)

    model, _ = pair(Telling)
    name_all(model)
    with LazyScheduler(schedule=["two", "one"], strict=True) as scheduler:
        train(model, DEVICE, steps=2)
    assert scheduler.recorded_execution_order()[:2] == ["two", "one"] and seen == ["one", "two"] * 2


def test_every_step_begins_anew() -> None:
    """A step that lacks a segment, or has more calls of it, changes nothing for the next one."""
    model, truth = pair(Tower)
    name_all(model)
    x = torch.ones(4, 6)
    scheduler = LazyScheduler(schedule=["two", "one"]).start()
    try:
        found = []
        for calls in (1, 3, 1):
            out = sum(model(x.to(DEVICE)) for _ in range(calls))
            lazy_backend.mark_step()
            found.append((out.detach(), scheduler.recorded_execution_order()))
        model.head(x.to(DEVICE)).sum().item()
        lazy_backend.mark_step()
    finally:
        scheduler.stop()
    one, three, again = found
    assert one[1] == again[1] == ["two", "one", "join"]
    assert [name for name in three[1] if "join" not in name] == ["two", "one", "two#1", "one#1", "two#2", "one#2"]
    same([one[0], three[0], again[0]], [(truth(x) * calls).detach() for calls in (1, 3, 1)])
