"""What a CUDA graph's replay may write over, with a driver made for the test whose graphs run on the CPU. Needs no GPU.

A capture runs the steps once. A replay, `cuGraphLaunch`, calls back into the test, which computes the same into the same memory.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Sequence

import pytest
import torch

import lazy_backend
from codegen import memory_plan
from ir_nodes import settings
from lazy_backend import core, flush
from tests.children import ROOT
from tests.test_lazy_backend_driver import build

FAKE = r"""
#include <stdint.h>
static void (*replay)(void*, void*);
void on_replay(void (*f)(void*, void*)) { replay = f; }
int cuGetErrorString(int code, const char** text) { *text = "an error"; return 0; }
int cuGraphLaunch(void* exec, void* stream) { replay(exec, stream); return 0; }
"""
SIZE = 64


def waves(x: torch.Tensor) -> torch.Tensor:
    return (((x * 2) + 1).sin() * 3).cos()


def norm(x: torch.Tensor) -> torch.Tensor:
    """ATen allocates its result."""
    return torch.nn.functional.layer_norm((x.sin() * 2 + 1).cos(), (SIZE,))


def memory(tensor: torch.Tensor) -> int:
    """Where the tensor's bytes lie now."""
    return int(core.get().lend(tensor, 0).data_ptr())


def at(address: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * SIZE).from_address(address), dtype=torch.float32)


def products(x: torch.Tensor) -> torch.Tensor:
    """The first product is gone before the last one is made."""
    m = x.view(8, 8)
    return m.mm(m).mm(m).mm(m).mm(m).view(SIZE)


class Driver:
    """Counts captures and replays; computes a replay where ``made`` says that the graph's result lies."""

    def __init__(self, formula: Callable[[torch.Tensor], torch.Tensor] = waves) -> None:
        self.captures = self.replays = self.made = 0
        self.formula, self.number, self.baked = formula, 2.0, 2.0  # the number of a formula's ATen call, and the graph's
        self.x = torch.linspace(-1, 1, SIZE).to("lazysched")
        lazy_backend.mark_step()
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(self._replay)
        ctypes.CDLL("libcuda.so.1").on_replay(self._callback)
        core.get().set_capturer(self._capture)
        flush.replays = lambda: True

    def _capture(self, device: int, states: Sequence[object], body: Callable[[int], None]) -> tuple[int, Callable[[], None]]:
        assert not states, "a CPU's draws do not count"
        self.captures, self.made, self.baked = self.captures + 1, 0, self.number
        body(0x55)
        return 0x20, lambda: None

    def _replay(self, exec: Any, stream: Any) -> None:
        self.replays += 1
        if self.made:  # else the capture has just computed it
            now, self.number = self.number, self.baked
            at(self.made).copy_(self.formula(at(memory(self.x))))
            self.number = now

    def step(self) -> torch.Tensor:
        """The formula of ``x``, which changes at every step."""
        self.x.add_(0.25)
        lazy_backend.mark_step()
        y = self.formula(self.x)
        lazy_backend.mark_step()
        if self.captures and not self.made:
            self.made = memory(y)
        torch.testing.assert_close(y.cpu(), self.formula(self.x.cpu()))
        return y

    def warm(self) -> torch.Tensor:
        """Until steps replay."""
        for _ in range(5):
            y = self.step()
        assert (self.captures, memory(y)) == (1, self.made) and self.replays >= 2
        return y


def held_results() -> None:
    driver = Driver()
    driver.warm()
    held = [(driver.step(), driver.x.cpu()) for _ in range(5)]
    assert driver.captures == 1
    for y, x in held:
        torch.testing.assert_close(y.cpu(), waves(x))


def results_of_aten() -> None:
    driver = Driver(norm)
    driver.warm()
    held = [(driver.step(), driver.x.cpu()) for _ in range(3)]
    for y, x in held:
        torch.testing.assert_close(y.cpu(), norm(x))
    assert driver.captures == 1


def results_side_by_side() -> None:
    """They are parts of a block in which other values lie before, and each can be moved out of it."""
    memory_plan.GUEST = 1
    plans: list[memory_plan.MemoryPlan] = []
    plan = memory_plan.Planner.plan
    memory_plan.Planner.plan = lambda self, pieces: plans.append(plan(self, pieces)) or plans[-1]  # type: ignore[assignment, func-returns-value]
    driver = Driver(products)
    y = driver.warm()
    blocks = [block for made in plans for block in made.blocks.values()]
    assert blocks and all(block.nbytes >= y.nbytes and block.guests for block in blocks)
    held = [(y, driver.x.cpu()), *((driver.step(), driver.x.cpu()) for _ in range(4))]
    for y, x in held:
        torch.testing.assert_close(y.cpu(), products(x))
    assert driver.captures == 1 and len({memory(y) for y, _ in held}) == len(held) and memory(held[-1][0]) == driver.made
    held[-1][0].add_(1)
    lazy_backend.mark_step()
    y = driver.step()
    assert not torch.equal(y.cpu(), held[-1][0].cpu())
    torch.testing.assert_close(held[-1][0].cpu(), products(held[-1][1]) + 1)


def numbers_of_calls() -> None:
    """A graph holds the numbers of its ATen calls: with others it is captured anew, once they have stayed for a step."""
    driver = Driver()
    driver.formula = lambda x: (((x * driver.number) + 1).sin() * 3).cos()
    driver.warm()
    for number, captures in ((5.0, 2), (2.0, 3)):
        driver.number = number
        driver.step()
        assert driver.captures == captures - 1, "it runs by itself first"
        driver.step()
        driver.step()
        assert driver.captures == captures


def lent_results() -> None:
    driver = Driver()
    y = driver.warm()
    seen, copy = torch.from_dlpack(y), y.cpu()
    del y
    driver.step()
    assert driver.captures == 2 and torch.equal(seen, copy), "the graph has memory of its own"
    del seen
    for _ in range(3):
        driver.step()
    assert driver.captures == 2


def addresses() -> None:
    """Those who keep an address hold the lazy tensor."""
    driver = Driver()
    y = driver.warm()
    address, copy = core.get().lend(y, 2).data_ptr(), y.cpu()
    driver.step()
    driver.step()
    assert memory(y) == address and torch.equal(at(address), copy) and driver.captures == 2


def collectives() -> None:
    """A collective in flight fills memory by its address while the program goes on."""
    driver = Driver()
    y = driver.warm()
    flying = core.get().lend(y, 0)
    core.get().pin(flying, 1)
    driver.step()
    flying.fill_(7.0)  # it arrives
    core.get().pin(flying, -1)
    assert y.cpu().eq(7).all() and driver.captures == 2
    del flying
    z = driver.step()
    driver.step()
    assert driver.captures == 2
    core.get().pin(core.get().lend(z, 0), 1)
    core.get().pin(core.get().lend(z, 0), -1)  # it has arrived before the next step
    driver.step()
    assert driver.captures == 2


def every_result_lent() -> None:
    driver = Driver()
    driver.warm()
    seen = []
    for _ in range(8):
        y = driver.step()
        seen.append((torch.from_dlpack(y), y.cpu()))
        del y
    assert all(torch.equal(*pair) for pair in seen)
    assert driver.captures == 3, "then the stretch is left alone"
    assert any("others keep what it makes" in name for name in torch._lazy.metrics.counter_names())


class Parted(Driver):
    """Every capture in which there is a digamma fails. What is before it becomes the second one, what is behind it the third."""

    error = "Cannot copy between CPU and CUDA tensors during CUDA graph capture. Please use tensor.pin_memory()"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.capturing = 0, torch.empty(SIZE), False
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("digamma.out", self._digamma, "CPU")

    def _digamma(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.capturing:
            raise RuntimeError(f"{self.error}\nmore of it")
        self.first, self.between = x.data_ptr(), x * 0.5 - 1
        return out.copy_(self.between)

    def _capture(self, device: int, states: Sequence[object], body: Callable[[int], None]) -> tuple[int, Callable[[], None]]:
        self.captures, self.first, self.capturing = self.captures + 1, 0 if self.captures < 2 else self.first, True
        try:
            body(0x55)
        finally:
            self.capturing = False
        return self.captures, lambda: None

    def _replay(self, exec: Any, stream: Any) -> None:
        self.replays += 1
        if exec == 2 and self.first:
            at(self.first).copy_(waves(at(memory(self.x))))
        elif self.made:
            at(self.made).copy_(waves(self.between))

    def step(self) -> torch.Tensor:
        self.x.add_(0.25)
        lazy_backend.mark_step()
        y = waves(waves(self.x).digamma())
        lazy_backend.mark_step()
        if self.captures < 3 or self.made:  # else a capture has computed it, from what it is copied to later
            torch.testing.assert_close(y.cpu(), waves(waves(self.x.cpu()) * 0.5 - 1))
        self.made = memory(y) if self.captures == 3 else 0
        return y


def an_op_that_no_graph_can_hold() -> None:
    """It is told by name, and runs between two graphs from then on."""
    driver = Parted()
    driver.step()
    compiles = lazy_backend.stats()["compiles"]
    driver.step()
    driver.step()
    assert (driver.captures, driver.replays, lazy_backend.stats()["compiles"] - compiles) == (1, 0, 0)
    reason = f"CudaGraphRefused: aten::digamma.out: RuntimeError: {driver.error}"
    assert torch._lazy.metrics.counter_value(reason) == 1
    for _ in range(6):
        driver.step()
    assert (driver.captures, driver.replays, lazy_backend.stats()["compiles"] - compiles) == (3, 8, 1)
    lines = [line for line in str(lazy_backend.explain(driver.step)).splitlines() if line.startswith("CUDA graphs: ")]
    assert any(line.endswith("not in one: a capture of aten::digamma.out has failed") for line in lines), lines


SCENES = (held_results, results_of_aten, results_side_by_side, numbers_of_calls, lent_results, addresses, collectives,
          every_result_lent, an_op_that_no_graph_can_hold)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_memory_that_others_see_is_not_written_over(scene: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "fake.c").write_text(FAKE)
    build(tmp_path / "fake.c", tmp_path / "libcuda.so.1")
    program = f"from tests.test_lazy_backend_replays import {scene.__name__} as scene; scene()"
    environment = settings.child_environment(engine="aten", device="cpu") | {
        "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}  # fmt: skip
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
