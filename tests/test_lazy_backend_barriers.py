"""What ends a recording, what it says about it, and what it must not change: numbers, memory and the number of compiles."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any, Callable, Iterator

import pytest
import torch
import torch._lazy
import torch._lazy.metrics
from torch import nn

import lazy_backend
from barriers import Barrier
from ir_nodes import settings
from lazy_backend import core

DEVICE = "lazysched"


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch.ones(1, device=DEVICE)
    lazy_backend.mark_step(wait=True)
    yield
    lazy_backend.mark_step(wait=True)


def here() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def pending() -> torch.Tensor:
    """A tensor that is recorded and not computed."""
    return torch.ones(4, device=DEVICE) * 3


def barriers_of(action: Callable[[], Any]) -> list[Barrier]:
    """The barriers that ``action`` caused, those that had something to run."""
    count = _fired()
    action()
    return [barrier for barrier in lazy_backend.barriers()[count:] if barrier.ops]


def _fired() -> int:
    recent = lazy_backend.barriers()
    assert len(recent) < 1000, "the log keeps the last 1000, so a test has to clear it"
    return len(recent)


@pytest.fixture(autouse=True)
def empty_log() -> None:
    lazy_backend.barriers()
    lazy_backend.api.barrier_log.clear()


def _configured(action: Callable[[], Any], **values: Any) -> list[Barrier]:
    """The barriers of ``action`` under other settings, which the core is told of."""
    try:
        with settings.override(**values):
            core.configure(core.get())
            return barriers_of(action)
    finally:
        core.configure(core.get())


def only(barriers: list[Barrier]) -> Barrier:
    assert len(barriers) == 1, [str(barrier) for barrier in barriers]
    return barriers[0]


# ---- each kind, with its reason and the user's line -------------------------------------------------------------------------


VALUE_ACCESSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[0]),
    "bool": lambda t: bool(t[0]),
    "if": lambda t: 1 if t.sum() > 0 else 0,
    "tolist": lambda t: t.tolist(),
    "format": lambda t: f"{t[0]:.2f}",
    "equal": lambda t: torch.equal(t, t + 1),
    "allclose": lambda t: torch.allclose(t, t),
}
COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "copy_": lambda t: torch.zeros(4).copy_(t),
    "numpy": lambda t: t.cpu().numpy(),
}
SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 1],
    "unique": lambda t: t.unique(),
    "masked_select": lambda t: torch.masked_select(t, t > 1),
}


@pytest.mark.parametrize("name", VALUE_ACCESSES)
def test_looking_at_a_number(name: str) -> None:
    tensor = pending()
    fired = barriers_of(lambda: VALUE_ACCESSES[name](tensor))
    assert fired[0].kind.label == "value_access" and fired[0].reason
    assert fired[0].frame is not None and fired[0].frame.file.endswith("test_lazy_backend_barriers.py")


def test_printing_names_the_line_that_prints() -> None:
    tensor = pending()
    line = here() + 1
    fired = barriers_of(lambda: str(tensor))
    assert fired and fired[0].frame is not None and fired[0].frame.line == line


@pytest.mark.parametrize("name", COPIES)
def test_copying_to_another_device(name: str) -> None:
    tensor = pending()
    barrier = only(barriers_of(lambda: COPIES[name](tensor)))
    assert barrier.kind.label == "value_access" and barrier.reason == "copied to cpu"
    assert barrier.frame is not None and barrier.frame.file.endswith("test_lazy_backend_barriers.py")


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_data(name: str) -> None:
    tensor = pending()
    barrier = barriers_of(lambda: SHAPES[name](tensor))[0]
    assert barrier.kind.label == "data_dependent_shape" and "aten::" in barrier.reason


def test_the_frame_is_the_users_line_and_ops_are_counted() -> None:
    x = torch.ones(4, device=DEVICE)
    lazy_backend.mark_step()
    y = x + 1
    y = (y * 2).sum()
    barrier = only(barriers_of(lambda: y.item())); line = here()  # noqa: E702
    assert barrier.frame is not None
    assert (barrier.frame.line, barrier.frame.function) == (line, "<lambda>")
    assert barrier.ops == 3 and barrier.milliseconds > 0


def test_mark_step_from_both_modules() -> None:
    x = pending()
    barrier = only(barriers_of(lazy_backend.mark_step))
    assert barrier.kind.label == "mark_step" and barrier.reason == "lazy_backend.mark_step()"
    y = x + 1
    barrier = only(barriers_of(torch._lazy.mark_step))
    assert barrier.kind.label == "mark_step" and barrier.reason == "torch._lazy.mark_step()"
    assert y.tolist() == [4.0] * 4


def test_mark_step_counts_in_the_metrics_of_torch_lazy() -> None:
    before = torch._lazy.metrics.counter_value("MarkStep") or 0
    lazy_backend.mark_step()
    torch._lazy.mark_step()
    assert torch._lazy.metrics.counter_value("MarkStep") == before + 2


@pytest.mark.parametrize("device", [None, "lazysched", "lazysched:0", 0, torch.device("lazysched", 0)])
def test_mark_step_takes_a_device(device: Any) -> None:
    _kept = pending()
    assert only(barriers_of(lambda: lazy_backend.mark_step(device, wait=True))).kind.label == "mark_step"


def test_mark_step_refuses_another_device() -> None:
    with pytest.raises(ValueError, match="expected a lazysched device, got cpu"):
        lazy_backend.mark_step("cpu")


def test_sync_and_wait() -> None:
    x = pending()
    assert only(barriers_of(lambda: lazy_backend.sync([x]))).kind.label == "sync"
    y = x + 1
    assert only(barriers_of(lambda: lazy_backend.sync(y))).kind.label == "sync"
    z = y + 1
    assert only(barriers_of(lazy_backend.wait_device_ops)).kind.label == "wait"
    assert z.tolist() == [5.0] * 4
    w = z + 1
    assert only(barriers_of(torch._lazy.wait_device_ops)).kind.label == "wait"
    v = w + 1
    assert only(barriers_of(torch.lazysched.synchronize)).kind.label == "wait"
    assert v.tolist() == [7.0] * 4


def test_the_end_of_an_optimizer_step() -> None:
    model = nn.Linear(3, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    barrier = only(barriers_of(optimizer.step))
    assert barrier.kind.label == "optimizer_step" and barrier.reason == "SGD.step() ended"


def test_the_automatic_barrier_can_be_switched_off() -> None:
    model = nn.Linear(3, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    with settings.override(auto_barrier=False):
        assert barriers_of(optimizer.step) == []


def test_an_optimizer_of_another_device_causes_no_barrier() -> None:
    _kept = pending()
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    assert barriers_of(torch.optim.SGD(model.parameters(), lr=0.1).step) == []


def test_a_matmul_or_a_rare_op_is_no_barrier() -> None:
    x = torch.ones(6, 6, device=DEVICE)

    def work() -> torch.Tensor:
        y = (x @ x).softmax(-1)
        y = torch.linalg.vector_norm(y.cumsum(0).sort(-1).values, dim=1)
        return nn.functional.grid_sample(x.view(1, 1, 6, 6), x.view(1, 3, 6, 2) / 8, align_corners=False).sum() + y

    assert barriers_of(work) == []


def test_reading_a_generators_state() -> None:
    _kept = torch.randn(3, device=DEVICE)
    barrier = only(barriers_of(lambda: torch.lazysched.get_rng_state()))
    assert barrier.kind.label == "generator_state"


def test_eager_mode_runs_each_op_at_once() -> None:
    fired = _configured(lambda: pending() + 1, mode="eager")
    assert len(fired) >= 2 and {(barrier.kind.label, barrier.ops) for barrier in fired} == {("eager", 1)}


def test_the_recorded_reasons_reach_the_report() -> None:
    pending().sum().item()
    report = lazy_backend.metrics_report()
    assert "value_access" in report and "test_lazy_backend_barriers.py" in report
    assert "graphs compiled" in report


def test_the_debug_level_prints_each_barrier_with_reason_and_frame() -> None:
    program = "import torch, lazy_backend\nx = torch.ones(3, device='lazysched') + 1\nprint(x.sum().item())\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=settings.child_environment(debug={"barriers"})
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "lazysched: barrier value_access" in line]
    assert len(lines) == 1 and "<string>:3 in <module>" in lines[0]


# ---- limits ----------------------------------------------------------------------------------------------------------------


def test_a_loop_that_never_looks_is_cut_by_the_number_of_ops() -> None:
    x = torch.zeros(2, device=DEVICE)
    lazy_backend.mark_step()

    def loop() -> None:
        for _ in range(1000):
            x.add_(1)

    fired = _configured(loop, max_ops=100)
    assert [(barrier.kind.label, barrier.ops) for barrier in fired] == [("limit", 100)] * 10
    assert "LAZYSCHED_MAX_OPS" in fired[0].reason
    assert x.tolist() == [1000.0, 1000.0]


def test_a_loop_that_keeps_its_results_is_cut_by_their_bytes() -> None:
    kept = [torch.zeros(1024, device=DEVICE)]
    lazy_backend.mark_step()

    def loop() -> None:
        for _ in range(64):
            kept.append(kept[-1] + 1)

    fired = _configured(loop, max_pending_bytes="64K")
    assert 3 <= len(fired) <= 6 and {barrier.kind.label for barrier in fired} == {"limit"}
    assert "LAZYSCHED_MAX_PENDING_BYTES" in fired[0].reason
    assert kept[-1][0].item() == 64.0


def test_the_same_loop_cut_by_a_limit_compiles_once() -> None:
    x = torch.zeros(2, device=DEVICE)
    lazy_backend.mark_step()
    before = lazy_backend.stats()["compiles"]

    def loop() -> None:
        for _ in range(2000):
            x.add_(1)

    _configured(loop, max_ops=100)
    assert lazy_backend.stats()["compiles"] - before <= 2


# ---- dead results ----------------------------------------------------------------------------------------------------------


def test_a_result_that_nobody_holds_is_never_computed() -> None:
    x = torch.ones(8, 8, device=DEVICE)
    lazy_backend.mark_step()
    before = lazy_backend.stats()
    kept = x + 1
    for _ in range(10):
        (x @ x).tanh()
    lazy_backend.mark_step()
    after = lazy_backend.stats()
    assert after["nodes_dead"] - before["nodes_dead"] == 20
    assert after["nodes_run"] - before["nodes_run"] == 1
    assert kept[0, 0].item() == 2.0


def test_what_a_held_result_needs_is_computed_though_nobody_holds_it() -> None:
    x = torch.ones(3, device=DEVICE)
    y = ((x + 1) * 2) ** 2
    del x
    lazy_backend.mark_step()
    assert y.tolist() == [16.0] * 3


def test_a_view_keeps_its_base_alive() -> None:
    view = (torch.ones(4, device=DEVICE) * 5)[1:3]
    lazy_backend.mark_step()
    assert view.tolist() == [5.0, 5.0]


def test_memory_of_dropped_steps_is_given_back() -> None:
    """Allocations on the physical device stay bounded over many steps."""
    x = torch.zeros(1000, 1000, device=DEVICE)
    for step in range(80):
        x = x * 0.5 + 1
        lazy_backend.mark_step(wait=True)
        if step == 20:
            before = _resident_bytes()
    assert _resident_bytes() - before < 60e6, "60 steps of 4 MB each would be 240 MB"


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


# ---- when a loop looks at its loss -------------------------------------------------------------------------------------------


def _losses(device: str, look_every: int, steps: int, pause: Callable[[int], None] = lambda step: None) -> tuple[list[float], torch.Tensor]:
    """Losses seen while training, and the last weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.linspace(-1, 1, 48).reshape(8, 6).to(device)
    y = (torch.arange(8) % 3).to(device)
    seen, total = [], torch.zeros((), device=device)
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if look_every and step % look_every == look_every - 1:
            seen.append(loss.item())
        pause(step)
    return [*seen, total.item()], model[0].weight.detach().cpu()


@pytest.mark.parametrize("look_every", [1, 10, 0], ids=["every step", "once in ten", "never"])
def test_looking_at_the_loss_changes_no_number_and_compiles_a_bounded_number_of_times(look_every: int) -> None:
    wanted, weight = _losses("cpu", look_every, 60)
    before = lazy_backend.stats()["compiles"]
    got, mine = _losses(DEVICE, look_every, 60)
    assert got == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(mine, weight, rtol=1e-6, atol=1e-7)
    assert lazy_backend.stats()["compiles"] - before <= 14


def test_explicit_barriers_anywhere_give_the_same_numbers() -> None:
    wanted, _ = _losses(DEVICE, 10, 20)
    with settings.override(auto_barrier=False):
        without, _ = _losses(DEVICE, 10, 20)
    got, _ = _losses(DEVICE, 10, 20, pause=lambda step: lazy_backend.mark_step() if step % 3 == 0 else None)
    assert got == wanted == without


# ---- step closures -----------------------------------------------------------------------------------------------------------


def test_step_closures_run_after_the_step_that_recorded_what_they_read() -> None:
    x, seen = torch.ones(2, device=DEVICE), []
    y = x * 2
    torch._lazy.add_step_closure(lambda t: seen.append(t.tolist()), args=(y,))
    assert seen == []
    torch._lazy.mark_step()
    assert seen == [[2.0, 2.0]]
    torch._lazy.add_step_closure(lambda: seen.append("second"))
    lazy_backend.mark_step()
    assert seen[1:] == ["second"]


def test_step_closures_run_at_the_end_of_an_optimizer_step() -> None:
    model = nn.Linear(3, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 3, device=DEVICE)).sum()
    loss.backward()
    seen: list[float] = []
    torch._lazy.add_step_closure(lambda value: seen.append(value.item()), args=(loss.detach(),))
    optimizer.step()
    assert seen == [loss.item()]


def test_asynchronous_step_closures_run_in_their_own_thread() -> None:
    done, threads = threading.Event(), []
    y = torch.ones(2, device=DEVICE) * 4

    def closure(tensor: torch.Tensor) -> None:
        threads.append((threading.current_thread(), tensor.sum().item()))
        done.set()

    torch._lazy.add_step_closure(closure, args=(y,), run_async=True)
    torch._lazy.mark_step()
    assert done.wait(timeout=30)
    assert threads[0][1] == 8.0 and threads[0][0] is not threading.main_thread()


# ---- looking without running ---------------------------------------------------------------------------------------------------


def test_the_debug_views_show_what_is_recorded_and_run_nothing() -> None:
    x = torch.ones(3, device=DEVICE)
    lazy_backend.mark_step()
    y = (x + 1).tanh(); line = here()  # noqa: E702
    unrelated = x.exp()

    def look() -> None:
        text = lazy_backend.debug.text(y)
        assert "aten::tanh" in text and "aten::exp" not in text
        assert f"test_lazy_backend_barriers.py:{line} in test_the_debug_views" in text
        assert lazy_backend.debug.dot([y, unrelated]).count("aten::") >= 3
        module = lazy_backend.debug.fx_graph(y)
        numbers = [1.0] * sum(node.name.startswith("s") for node in module.graph.nodes if node.op == "placeholder")
        torch.testing.assert_close(module(torch.ones(3), *numbers)[0], torch.full((3,), 2.0).tanh())

    assert barriers_of(look) == []
    assert unrelated.tolist() == pytest.approx([2.718281828] * 3)


def test_the_debug_views_refuse_other_tensors() -> None:
    with pytest.raises(ValueError, match="expected lazysched tensors"):
        lazy_backend.debug.text(torch.ones(2))
