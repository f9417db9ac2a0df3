"""What a value access runs and what it leaves recorded under a schedule, end to end. Imports lazy_backend."""

from __future__ import annotations

import random
import threading
import time
from typing import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import lazy_backend
from lazy_backend import LazyScheduler, register_segment
from tests.device import CLOSE, DEVICE, ON_GPU, PHYSICAL


class Three(nn.Module):
    """Three branches that share nothing, and what the caller looks at between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def run_a(self, x: Tensor) -> Tensor:
        return self.a(x).relu()

    def run_b(self, x: Tensor) -> Tensor:
        return self.b(x).tanh()

    def run_c(self, x: Tensor) -> Tensor:
        return self.c(x).sigmoid()


@pytest.fixture
def three() -> Iterator[Three]:
    torch.manual_seed(0)
    model = Three().to(DEVICE)
    names = ("a", "b", "c")
    handles = [register_segment(method, name) for name, method in zip(names, (model.run_a, model.run_b, model.run_c))]
    lazy_backend.mark_step()
    yield model
    for handle in handles:
        handle.remove()
    lazy_backend.mark_step()


def eager_of(model: Three) -> Three:
    twin = Three()
    twin.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return twin.to(PHYSICAL)


def close(got: object, wanted: object) -> None:
    on_host = torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, (got, wanted))
    torch.testing.assert_close(*on_host, rtol=CLOSE, atol=CLOSE)


def test_looking_at_another_tensor_leaves_the_delayed_segment_recorded(three: Three) -> None:
    x = torch.randn(3, 4, device=PHYSICAL)
    y = x.to(DEVICE)
    with LazyScheduler(["b", "a"]) as s:
        a = three.run_a(y)
        seen = three.run_c(y).sum().item()
        assert recorded_ops() > 0
        b = three.run_b(y)
        lazy_backend.mark_step()
    assert s.recorded_execution_order() == ["c", "b", "a"]
    eager = eager_of(three)
    close(seen, eager.run_c(x).sum().item())
    close((a, b), (eager.run_a(x), eager.run_b(x)))


def test_looking_at_the_delayed_segment_runs_it_and_the_report_names_the_line(three: Three) -> None:
    y = torch.randn(3, 4).to(DEVICE)
    with LazyScheduler(["b", "a"]) as s:
        a = three.run_a(y)
        a.sum().item()  # here
        b = three.run_b(y)
        lazy_backend.mark_step()
    assert s.recorded_execution_order() == ["a", "b"] and b.shape == a.shape
    assert "a ran before its turn, because" in s.report() and "test_lazy_backend_holding.py:" in s.report()


def test_strict_schedules_do_not_let_a_value_access_pass(three: Three) -> None:
    y = torch.randn(3, 4).to(DEVICE)
    too_early = pytest.raises(lazy_backend.ScheduleError, match="a ran before its turn, because")
    with too_early, LazyScheduler(["b", "a"], strict=True):
        kept = [three.run_a(y)]
        kept[0].sum().item()
        kept.append(three.run_b(y))
        lazy_backend.mark_step()


def test_what_is_held_back_costs_no_compile_from_the_second_step_on(three: Three) -> None:
    y = torch.randn(3, 4).to(DEVICE)

    def step() -> None:
        with LazyScheduler(["b", "a"]):
            a = three.run_a(y)
            three.run_c(y).sum().item()
            (a + three.run_b(y)).sum().backward()
            lazy_backend.mark_step()

    step(), step()  # the second finds gradients
    before = lazy_backend.stats()["compiles"]
    step(), step()
    assert lazy_backend.stats()["compiles"] == before


def test_an_input_that_changes_meanwhile_is_read_as_it_was(three: Three) -> None:
    x = torch.randn(3, 4, device=PHYSICAL)
    y = x.to(DEVICE)
    with LazyScheduler(["b", "a"]):
        a = three.run_a(y)
        y.mul_(2)  # has to wait for the delayed segment, which reads the old values
        seen = three.run_c(y).sum().item()  # so this needs it
        y.add_(1)
        b = three.run_b(y)
        lazy_backend.mark_step()
    eager = eager_of(three)
    close(seen, eager.run_c(x * 2).sum().item())
    close((a, b, y), (eager.run_a(x), eager.run_b(x * 2 + 1), x * 2 + 1))


def test_what_a_waiting_segment_reads_survives_its_tensor(three: Three) -> None:
    x = torch.randn(3, 4, device=PHYSICAL)
    y = x.to(DEVICE)
    with LazyScheduler(["b", "a"]):
        inner = y * 3  # runs now, and only the waiting segment needs it
        a = three.run_a(inner)
        del inner
        three.run_c(y).sum().item()
        lazy_backend.mark_step()
    close(a, eager_of(three).run_a(x * 3))


def test_other_threads_go_on_recording_behind_it(three: Three) -> None:
    x = torch.randn(3, 4, device=PHYSICAL)
    y = x.to(DEVICE)
    stop, results = threading.Event(), []

    def other() -> None:
        total = torch.zeros(3, 4, device=DEVICE)
        count = 0
        while not stop.is_set() or count < 10:
            total += 1
            count += 1
            time.sleep(1e-4)  # thousands are enough: all of them run in the end
        results.append((total, count))

    thread = threading.Thread(target=other)
    thread.start()
    with LazyScheduler(["b", "a"]):
        for _ in range(20):
            a = three.run_a(y)
            three.run_c(y).sum().item()
            b = three.run_b(y)
            lazy_backend.mark_step()
    stop.set()
    thread.join()
    eager = eager_of(three)
    close((a, b), (eager.run_a(x), eager.run_b(x)))
    total, count = results[0]
    assert total.cpu().unique().tolist() == [count]


def recorded_ops() -> int:
    return len(lazy_backend.core.get().trace_for([], 0).instrs())


class Mixed(nn.Module):
    """Four methods over shared state, each a random mix of pure ops, mutations, random numbers and views."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.choice = random.Random(seed)
        self.plans = [[self.choice.randrange(7) for _ in range(3)] for _ in range(4)]
        self.register_buffer("state", torch.arange(6.0).view(2, 3))
        self.register_buffer("other", torch.ones(2, 3))

    def work(self, plan: int, x: Tensor) -> Tensor:
        out = x
        for op in self.plans[plan]:
            out = OPS[op](self, out)
        return out

    def part0(self, x: Tensor) -> Tensor:
        return self.work(0, x)

    def part1(self, x: Tensor) -> Tensor:
        return self.work(1, x)

    def part2(self, x: Tensor) -> Tensor:
        return self.work(2, x)

    def part3(self, x: Tensor) -> Tensor:
        return self.work(3, x)


def _read(m: Mixed, x: Tensor) -> Tensor:
    return x + m.state


def _write(m: Mixed, x: Tensor) -> Tensor:
    m.state.mul_(0.5).add_(x)
    return x


def _write_part(m: Mixed, x: Tensor) -> Tensor:
    m.state[:, 1:].copy_(x[:, :2])
    return x * 2


def _change_input(m: Mixed, x: Tensor) -> Tensor:
    return x.add_(m.other)


def _draw(m: Mixed, x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def _swap(m: Mixed, x: Tensor) -> Tensor:
    m.other.copy_(m.state.sin())
    return x - m.other


def _pure(m: Mixed, x: Tensor) -> Tensor:
    return x.cos()


OPS: list[Callable[[Mixed, Tensor], Tensor]] = [_read, _write, _write_part, _change_input, _draw, _swap, _pure]


def run_mixed(model: Mixed, x: Tensor, seed: int) -> list[object]:
    """Two steps that call the parts in order, and look at something random after some of them."""
    choice = random.Random(seed)
    seen: list[object] = []
    kept: list[Tensor] = []
    for _ in range(2):
        for part in (model.part0, model.part1, model.part2, model.part3):
            source = kept[-1] if kept and choice.random() < 0.4 else x
            kept.append(part(source.clone() if choice.random() < 0.7 else source))
            if choice.random() < 0.6:
                seen.append(choice.choice([*kept, model.state, x]).sum().item())
            if choice.random() < 0.2:
                kept.pop(choice.randrange(len(kept)))
        if x.device.type == DEVICE:
            lazy_backend.mark_step()
    return [*seen, *(t.cpu() for t in (*kept, model.state, model.other, x))]


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_give_eager_numbers_whatever_is_looked_at(seed: int) -> None:
    order = ["p0", "p1", "p2", "p3"]
    random.Random(seed).shuffle(order)
    results = []
    for device in (PHYSICAL, DEVICE):
        model = Mixed(seed).to(device)
        x = torch.linspace(-1, 1, 6).view(2, 3).to(device)
        torch.manual_seed(seed)
        if device == PHYSICAL:
            results.append(run_mixed(model, x, seed))
            continue
        handles = [register_segment(getattr(model, f"part{i}"), f"p{i}") for i in range(4)]
        with LazyScheduler(order):
            results.append(run_mixed(model, x, seed))
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(results[1], results[0], rtol=CLOSE if ON_GPU else 0, atol=CLOSE if ON_GPU else 0)
