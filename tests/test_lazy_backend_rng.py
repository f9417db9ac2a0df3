"""Random numbers: on a CPU the device draws what eager CPU draws from the same seed, whatever is dead or reordered."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
from torch import nn

import lazy_backend

DEVICE = "lazysched"
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's random numbers are not the CPU's")


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    torch.lazysched.init()  # PyTorch starts no device for `torch.Generator`, which may be the first call of a process's tests


DRAWS: dict[str, Callable[[str], torch.Tensor]] = {
    "randn": lambda d: torch.randn(5, device=d),
    "randn many": lambda d: torch.randn(40, device=d),
    "rand": lambda d: torch.rand(3, 2, device=d),
    "randint": lambda d: torch.randint(0, 10, (6,), device=d),
    "randperm": lambda d: torch.randperm(9, device=d),
    "rand_like": lambda d: torch.rand_like(torch.empty(4, device=d)),
    "normal_": lambda d: torch.empty(4, device=d).normal_(2.0, 3.0),
    "uniform_": lambda d: torch.empty(4, device=d).uniform_(-1, 1),
    "view of a base": lambda d: torch.zeros(3, 4, device=d).t()[1].uniform_(),
    "bernoulli": lambda d: torch.bernoulli(torch.full((8,), 0.3, device=d)),
    "bernoulli_": lambda d: torch.empty(8, device=d).bernoulli_(0.4),
    "exponential_": lambda d: torch.empty(4, device=d).exponential_(1.5),
    "normal of tensors": lambda d: torch.normal(torch.arange(4.0, device=d), torch.ones(4, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.tensor([0.1, 0.5, 0.4], device=d), 5, replacement=True),
    "poisson": lambda d: torch.poisson(torch.full((4,), 3.0, device=d)),
    "binomial": lambda d: torch.binomial(torch.full((6,), 9.0, device=d), torch.full((6,), 0.4, device=d)),
    "dropout": lambda d: nn.functional.dropout(torch.ones(10, device=d), 0.3),
    "rrelu": lambda d: nn.functional.rrelu(-torch.ones(6, device=d), training=True),
    "attention dropout": lambda d: nn.functional.scaled_dot_product_attention(
        *(torch.ones(1, 1, 4, 4, device=d),) * 3, dropout_p=0.5
    ),
    "trunc_normal_": lambda d: nn.init.trunc_normal_(torch.empty(6, device=d)),
    "kaiming": lambda d: nn.init.kaiming_uniform_(torch.empty(3, 4, device=d)),
}


@needs_cpu
@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_draws_eagers_numbers(name: str) -> None:
    torch.manual_seed(1234)
    wanted = [DRAWS[name]("cpu") for _ in range(3)]
    torch.manual_seed(1234)
    got = [DRAWS[name](DEVICE) for _ in range(3)]
    for mine, theirs in zip(got, wanted):
        assert mine.device.type == DEVICE
        torch.testing.assert_close(mine.cpu(), theirs)
    assert name == "randperm" or not torch.equal(wanted[0], wanted[1]), "each draw is another"


@needs_cpu
def test_draws_that_nobody_reads_still_advance_the_generator() -> None:
    torch.manual_seed(7)
    torch.randn(5)
    torch.rand(3)
    wanted = torch.randn(4)
    torch.manual_seed(7)
    torch.randn(5, device=DEVICE)
    torch.rand(3, device=DEVICE)
    assert torch.equal(torch.randn(4, device=DEVICE).cpu(), wanted)


@needs_cpu
def test_seeding_between_recorded_draws_takes_effect_in_order() -> None:
    draws = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(1)
        first = torch.randn(3, device=device)
        torch.manual_seed(2)
        second = torch.randn(3, device=device)
        torch.manual_seed(1)
        third = torch.randn(3, device=device)
        draws.append([first.tolist(), second.tolist(), third.tolist()])
    assert draws[0] == draws[1]
    assert draws[0][0] == draws[0][2] != draws[0][1]


def test_the_state_of_the_device_can_be_kept_and_put_back() -> None:
    torch.manual_seed(3)
    torch.randn(2, device=DEVICE)
    state = torch.lazysched.get_rng_state()
    first = torch.randn(4, device=DEVICE)
    torch.lazysched.set_rng_state(state)
    second = torch.randn(4, device=DEVICE)
    assert torch.equal(first, second)


@needs_cpu
def test_the_cpu_generator_is_another_one() -> None:
    torch.manual_seed(5)
    wanted = torch.randn(3)
    torch.manual_seed(5)
    torch.randn(3, device=DEVICE)
    lazy_backend.mark_step()
    assert torch.equal(torch.randn(3), wanted)


def test_generators_of_the_device() -> None:
    generator = torch.Generator(device=DEVICE)
    assert generator.device.type == DEVICE
    generator.manual_seed(11)
    first = torch.randn(4, device=DEVICE, generator=generator)
    torch.manual_seed(99)  # another generator's business
    second = torch.randn(4, device=DEVICE, generator=generator)
    generator.manual_seed(11)
    again = torch.randn(8, device=DEVICE, generator=generator)
    assert generator.initial_seed() == 11
    assert not torch.equal(first, second)
    if not torch.cuda.is_available():
        wanted = torch.Generator().manual_seed(11)
        assert torch.equal(first.cpu(), torch.randn(4, generator=wanted))
        assert torch.equal(second.cpu(), torch.randn(4, generator=wanted))
        assert torch.equal(again.cpu(), torch.randn(8, generator=torch.Generator().manual_seed(11)))


def test_the_state_of_a_generator_can_be_kept_and_put_back() -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(4)
    torch.rand(3, device=DEVICE, generator=generator)
    state = generator.get_state()
    first = torch.rand(3, device=DEVICE, generator=generator)
    generator.set_state(state)
    assert torch.equal(first, torch.rand(3, device=DEVICE, generator=generator))


def test_two_generators_do_not_disturb_each_other() -> None:
    one, two = (torch.Generator(device=DEVICE).manual_seed(seed) for seed in (1, 2))
    mixed = [torch.rand(2, device=DEVICE, generator=generator) for generator in (one, two, one, two)]
    one.manual_seed(1)
    alone = [torch.rand(2, device=DEVICE, generator=one) for _ in range(2)]
    assert torch.equal(mixed[0], alone[0]) and torch.equal(mixed[2], alone[1])


@needs_cpu
def test_fork_rng_restores_the_device() -> None:
    torch.manual_seed(8)
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.randn(3, device=DEVICE)
    torch.manual_seed(8)
    wanted = torch.randn(3)
    torch.manual_seed(8)
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.randn(17, device=DEVICE)
    assert torch.equal(torch.randn(3, device=DEVICE).cpu(), wanted)


@needs_cpu
def test_dropout_trains_as_on_the_cpu() -> None:
    losses = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x = torch.linspace(-1, 1, 24).reshape(4, 6).to(device)
        torch.manual_seed(1)
        run = []
        for _ in range(20):
            loss = (model(x) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.append(loss.item())
        losses.append(run)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@needs_cpu
def test_checkpointing_replays_the_same_dropout() -> None:
    torch.manual_seed(0)
    leaf = torch.ones(50, device=DEVICE, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda t: nn.functional.dropout(t, 0.5), leaf, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(leaf.grad, out.detach())
