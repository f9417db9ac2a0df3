"""Generators of the device as objects, forks of the random state, and activation checkpointing that replays it."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lazy_backend
from lazy_backend import core, kernels
from tests.children import call
from tests.device import DEVICE, ON_GPU

needs_cpu = pytest.mark.skipif(ON_GPU, reason="a GPU's random numbers are not the CPU's")


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    torch.lazysched.init()  # torch 2.11 does not start a device when a generator is its first use


def draw(generator: torch.Generator | None = None, count: int = 4) -> list[float]:
    return torch.rand(count, device=DEVICE, generator=generator).tolist()


COPIES: dict[str, Callable[[torch.Generator], torch.Generator]] = {
    "clone_state": lambda g: g.clone_state(),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deepcopy": copy.deepcopy,
    "get and set state": lambda g: torch.Generator(device=DEVICE).set_state(g.get_state()),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_goes_on_from_where_the_generator_was(name: str) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(12)
    torch.rand(3, device=DEVICE, generator=generator)  # recorded, not drawn yet
    twin = COPIES[name](generator)
    assert twin.device.type == DEVICE and (name == "get and set state" or twin.initial_seed() == 12)
    assert draw(twin) == draw(generator)
    draw(twin)
    assert draw(twin) != draw(generator), "they are two"


def test_the_physical_generator_gives_the_same_numbers() -> None:
    physical = lazy_backend.core.physical_device(0)
    wanted = torch.rand(7, device=physical, generator=torch.Generator(physical).manual_seed(5)).tolist()
    assert draw(torch.Generator(device="lazysched:0").manual_seed(5), 7) == wanted


def test_states_of_all_indices() -> None:
    torch.lazysched.manual_seed(3)
    states = torch.lazysched.get_rng_state_all()
    assert len(states) == torch.lazysched.device_count() == len(torch.lazysched.default_generators)
    first = draw()
    torch.lazysched.set_rng_state_all(states)
    assert draw() == first
    state = torch.lazysched.get_rng_state(torch.device(DEVICE, 0))
    assert state.device.type == "cpu" and state.dtype is torch.uint8
    torch.lazysched.set_rng_state(state, 0)


def test_seeds() -> None:
    torch.lazysched.manual_seed_all(42)
    assert torch.lazysched.initial_seed() == 42 == torch.lazysched.default_generators[0].initial_seed()
    torch.lazysched.seed_all()
    first = torch.lazysched.initial_seed()
    assert torch.lazysched.seed() == torch.lazysched.initial_seed() != first
    torch.manual_seed(7)
    assert torch.lazysched.initial_seed() == 7
    torch.seed()
    assert torch.lazysched.initial_seed() != 7
    torch.manual_seed(0)


def test_fork_rng_without_naming_devices() -> None:
    torch.manual_seed(1)
    wanted = draw()
    torch.manual_seed(1)
    with torch.random.fork_rng(device_type=DEVICE):
        torch.manual_seed(99)
        torch.randn(17, device=DEVICE)
    assert draw() == wanted


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.first(x).tanh()) + torch.rand(16, device=x.device))


def run(device: str, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[list[float]]:
    """Output, gradients and the draw after them."""
    torch.manual_seed(0)
    model = Noisy()
    model.to(device)
    x = torch.linspace(-1, 1, 12).reshape(3, 4).to(device).requires_grad_()
    torch.manual_seed(1)
    out = call(model, x)
    between = torch.rand(3, device=device)
    out.square().sum().backward()
    after = torch.rand(3, device=device)
    return [t.detach().flatten().tolist() for t in (out, x.grad, model.first.weight.grad, between, after)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_every_number(reentrant: bool) -> None:
    wanted = run(DEVICE, lambda model, x: model(x))
    got = run(DEVICE, lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    assert got == wanted

    def with_barrier(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: (lazy_backend.mark_step(), model(t))[1], x, use_reentrant=reentrant)

    assert run(DEVICE, with_barrier) == wanted


@needs_cpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_what_the_cpu_draws(reentrant: bool) -> None:
    wanted = run("cpu", lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    got = run(DEVICE, lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    assert got == [pytest.approx(numbers, rel=1e-6) for numbers in wanted]


def test_without_preserving_the_state_the_replay_draws_anew() -> None:
    plain = run(DEVICE, lambda model, x: model(x))
    got = run(DEVICE, lambda model, x: checkpoint(model, x, use_reentrant=False, preserve_rng_state=False))
    assert got[0] == plain[0] and got[4] != plain[4]


def test_checkpointing_a_sequence_under_autocast() -> None:
    results = []
    for segments in (0, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(4))).to(DEVICE)
        x = torch.ones(2, 4, device=DEVICE, requires_grad=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            out = checkpoint_sequential(model, segments, x, use_reentrant=False) if segments else model(x)
        out.float().sum().backward()
        results.append((out.dtype, out.tolist(), x.grad.tolist(), model[0][0].weight.grad.tolist()))
    assert results[0] == results[1] and results[0][0] is torch.bfloat16


def dropout_as_on_cuda() -> None:
    """Runs in a process of its own. CUDA's dropout is PyTorch's own form, which draws only where something may be dropped."""
    kernels.core = SimpleNamespace(physical_is_cuda=lambda: True, get=core.get)  # type: ignore[assignment]
    x = torch.ones(8, 8, device=DEVICE)
    lazy_backend.mark_step()
    for form in (F.dropout, F.alpha_dropout, F.dropout1d):
        for p, training, draws in ((0.0, True, 0), (1.0, True, 0), (0.5, False, 0), (0.5, True, 1)):
            graph = lazy_backend.debug.graph([form(x, p, training)])
            assert sum(bool(node.effects) for node in graph.nodes) == draws, (form, p, training)
            lazy_backend.mark_step()


def test_dropout_of_nothing_or_all_draws_nothing_on_cuda() -> None:
    call(dropout_as_on_cuda)
