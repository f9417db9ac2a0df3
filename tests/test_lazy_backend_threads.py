"""Several threads record at once; forked children and data loader workers leave the device alone."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lazy_backend
from ir_nodes.locks import Lock

DEVICE = "lazysched"


def run_together(work: Callable[[int], object], count: int) -> list[object]:
    """``work(0)`` ... ``work(count - 1)``, each in its own thread, started at the same moment."""
    gate = threading.Barrier(count)

    def start(index: int) -> object:
        gate.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=120) for future in [pool.submit(start, index) for index in range(count)]]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def test_forward_of_one_model_in_several_threads() -> None:
    truth = small_model()
    model = copy.deepcopy(truth).to(DEVICE)
    inputs = [torch.full((3, 6), index / 10) for index in range(4)]

    def work(index: int) -> list[float]:
        with torch.no_grad():
            return [model(inputs[index].to(DEVICE) + step).sum().item() for step in range(25)]

    with torch.no_grad():
        wanted = [[truth(tensor + step).sum().item() for step in range(25)] for tensor in inputs]
    for got, want in zip(run_together(work, 4), wanted):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_each_thread_trains_its_own_model() -> None:
    def train(index: int, device: str) -> float:
        model = models[index].to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (index + 1))
        x = torch.linspace(-1, 1, 18).reshape(3, 6).to(device)
        for _ in range(15):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    models = [small_model() for _ in range(4)]
    wanted = [train(index, "cpu") for index in range(4)]
    models = [small_model() for _ in range(4)]
    assert run_together(lambda index: train(index, DEVICE), 4) == pytest.approx(wanted, rel=1e-5)


def test_a_tensor_recorded_in_one_thread_is_read_in_another() -> None:
    x = torch.ones(4, device=DEVICE) + 1
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(x * 3))
    thread.start()
    thread.join()
    x.zero_()
    assert made[0].tolist() == [6.0] * 4


def test_barriers_of_one_thread_while_another_records() -> None:
    def record(index: int) -> float:
        x = torch.zeros(8, device=DEVICE)
        for step in range(300):
            x.add_(1) if index else lazy_backend.mark_step()
            if step % 50 == 49:
                x.mul_(1.0)
        return x.sum().item()

    assert run_together(record, 3) == [0.0, 2400.0, 2400.0]


def test_autograd_runs_hooks_and_checkpoints() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)

    def gradients(device: str) -> list[float]:
        leaf = x.clone().to(device).requires_grad_()
        seen: list[float] = []
        leaf.register_hook(lambda grad: seen.append(grad.sum().item()))
        hidden = torch.utils.checkpoint.checkpoint(lambda t: (t * 3).tanh().exp(), leaf, use_reentrant=False)
        hidden.pow(2).sum().backward()
        return [*seen, *leaf.grad.flatten().tolist()]

    assert gradients(DEVICE) == pytest.approx(gradients("cpu"), rel=1e-6)


# ---- processes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_data_loader_with_forked_workers_feeds_the_device(workers: int, pinned: bool) -> None:
    torch.ones(1, device=DEVICE).item()  # the device is in use before the workers are forked
    data = TensorDataset(torch.arange(24.0).reshape(12, 2))
    loader = DataLoader(data, batch_size=4, num_workers=workers, pin_memory=pinned)
    total = sum((batch.to(DEVICE).sum() for (batch,) in loader), torch.zeros((), device=DEVICE))
    assert total.item() == 276.0


def _in_child(work: Callable[[], bool]) -> int:
    """Exit status of a forked child: 0 where ``work`` returned True, 1 where not, 2 where it raised."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive fork")
def test_a_forked_child_goes_on_from_what_was_recorded() -> None:
    x = torch.arange(4.0).to(DEVICE)
    pending = x * 2

    def work() -> bool:
        pending.add_(1)
        return (pending + x).tolist() == [1.0, 4.0, 7.0, 10.0]

    assert _in_child(work) == 0
    assert pending.tolist() == [0.0, 2.0, 4.0, 6.0], "the parent does not see the child's writes"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive fork")
def test_fork_while_other_threads_record() -> None:
    stop = threading.Event()

    def record() -> None:
        x = torch.zeros(4, device=DEVICE)
        while not stop.is_set():
            x.add_(1)
            x.sum().item()

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        statuses = [_in_child(lambda: (torch.ones(3, device=DEVICE) + 1).tolist() == [2.0] * 3) for _ in range(5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert statuses == [0] * 5


COUNTS_WHILE_IT_FORKS = """
import os, signal, threading, torch
from lazy_backend import core
x = torch.ones(3, device="lazysched")
(x + 1).tolist()  # compiled here, for all children
name = "n" * 5_000_000  # looking it up takes torch's metrics some hundred microseconds, in which they hold their lock
stop = threading.Event()
def count():
    while not stop.is_set():
        core.get().count(name)
threads = [threading.Thread(target=count) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    for _ in range(20):
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(0 if (x + 1).tolist() == [2.0] * 3 else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, status
finally:
    stop.set()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive fork")
def test_fork_while_other_threads_count_in_torchs_metrics() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTS_WHILE_IT_FORKS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_can_take_a_lock_that_another_thread_holds() -> None:
    lock, held, done = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    def take() -> bool:
        signal.alarm(30)
        with lock:
            return True

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert _in_child(take) == 0
    finally:
        done.set()
        thread.join()


def test_a_process_that_ends_with_work_pending_ends_well() -> None:
    program = "import torch, lazy_backend\nx = torch.ones(3, device='lazysched')\ny = x + 1\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Error" not in done.stderr


def test_importing_does_not_build_or_start_anything() -> None:
    program = (
        "import sys, torch, lazy_backend\nfrom lazy_backend import core\n"
        "assert not core.is_started()\nassert torch.lazysched.is_available()\nprint(lazy_backend.metrics_report())\n"
        "assert not core.is_started() and 'triton' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "has not been used" in done.stdout
