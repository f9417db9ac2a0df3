"""Keeping a random generator's state and putting it back are parts of a recording; who looks at its bytes ends it."""

from __future__ import annotations

import copy
import io
import pickle
import random
from typing import Callable

import pytest
import torch
from replays import new_refusals, refusals
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lazy_backend
from tests.device import DEVICE, ON_GPU

pytestmark = pytest.mark.usefixtures("nothing_pending")

keep, put_back = torch.lazysched.get_rng_state, torch.lazysched.set_rng_state


def draw(count: int = 3) -> Tensor:
    return torch.rand(count, device=DEVICE)


def flushes() -> int:
    return int(lazy_backend.stats()["flushes"])


def test_states_are_kept_and_put_back_inside_one_recording() -> None:
    before = flushes()
    first = keep()
    one, two = draw(), draw()
    put_back(first)
    again = draw()
    with torch.random.fork_rng(device_type=DEVICE):
        inside = draw()
    outside = draw()
    assert flushes() == before
    assert one.tolist() == again.tolist() != two.tolist()
    assert inside.tolist() == outside.tolist() == two.tolist()


@pytest.mark.skipif(ON_GPU, reason="a GPU's states are not the CPU's")
def test_the_bytes_are_those_of_eager_mode() -> None:
    def states(device: str) -> list[Tensor]:
        module = torch.lazysched if device == DEVICE else torch.random
        torch.manual_seed(5)
        found = [module.get_rng_state()]
        torch.rand(7, device=device)
        found.append(module.get_rng_state())
        module.set_rng_state(found[0])
        torch.rand(2, device=device)
        return [*found, module.get_rng_state()]

    for ours, theirs in zip(states(DEVICE), states("cpu")):
        assert torch.equal(ours, theirs) and (ours.device, ours.dtype, ours.shape) == (theirs.device, theirs.dtype, theirs.shape)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda state: state.clone(), "numpy": lambda state: torch.from_numpy(state.numpy().copy()),
    "list": lambda state: torch.tensor(state.tolist(), dtype=torch.uint8), "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)), "slice": lambda state: torch.cat([state[:5], state[5:]]),
    "storage": lambda state: torch.tensor(list(state.untyped_storage()), dtype=torch.uint8), "data": lambda state: state.data,
    "same": lambda state: state,
}


@pytest.mark.parametrize("way", WAYS)
def test_who_looks_at_a_state_sees_its_bytes(way: str) -> None:
    draw()
    state = keep()
    wanted = draw().tolist()
    seen = WAYS[way](state)
    assert way == "same" or type(seen) is Tensor
    put_back(seen)
    assert draw().tolist() == wanted
    draw()
    generator = torch.Generator(DEVICE)
    generator.set_state(state)
    assert torch.rand(3, device=DEVICE, generator=generator).tolist() == wanted


def test_a_state_can_be_saved_and_changed() -> None:
    state, other = keep(), torch.Generator(DEVICE).manual_seed(9).get_state()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.equal(torch.load(file), state)
    state.copy_(other)
    put_back(state)
    wanted = torch.rand(3, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(9)).tolist()
    assert draw().tolist() == wanted


def test_a_state_outlives_its_recording() -> None:
    state = keep()
    wanted = draw()
    lazy_backend.mark_step()
    draw()
    put_back(state)
    assert draw().tolist() == wanted.tolist()
    put_back(state)
    assert draw().tolist() == wanted.tolist()


class Layers(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(share), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor, kept: bool) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if kept else layer(x)
        return x


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_steps_with_checkpointed_layers_are_one_recording_and_replayed(share: float) -> None:
    def losses(kept: bool, replayed: bool) -> list[float]:
        torch.manual_seed(3)
        model = Layers(share).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.linspace(-1, 1, 32).view(4, 8).to(DEVICE)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = model(x, kept).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        lazy_backend.mark_step()
        found, run = [], lazy_backend.replayed(step) if replayed else step
        for _ in range(6):
            before = flushes()
            found.append(run())
            lazy_backend.mark_step()
            assert flushes() == before + 1
        return [one.item() for one in found]

    refused = refusals()
    wanted = losses(False, False)
    assert losses(True, False) == wanted and losses(True, True) == wanted
    assert refusals() == refused


@pytest.mark.parametrize("seed", [torch.manual_seed, torch.lazysched.manual_seed])
def test_steps_that_seed_a_generator_are_not_replayed(seed: Callable[[int], object]) -> None:
    """A replay runs none of their Python, so that they would draw on."""
    def step() -> Tensor:
        seed(0)
        return draw()

    run = lazy_backend.replayed(step)

    def several() -> None:
        assert len({tuple(run().tolist()) for _ in range(6)}) == 1

    assert "seeds a random generator" in new_refusals(several)


def test_replayed_steps_keep_states_and_put_them_back() -> None:
    given = keep()

    def step() -> tuple[Tensor, Tensor, Tensor]:
        put_back(given)
        state = keep()
        one = draw()
        put_back(state)
        return one, draw(), draw()

    run, refused = lazy_backend.replayed(step), refusals()
    found = [tuple(tuple(one.tolist()) for one in run()) for _ in range(6)]
    assert len(set(found)) == 1 and found[0][0] == found[0][1] != found[0][2]
    assert refusals() == refused


def program(seed: int, device: str) -> list[list[float]]:
    """Draws between states that are kept, put back, forked and looked at, and barriers, all drawn from ``seed``."""
    module = torch.random if device == "cpu" else torch.lazysched
    choose = random.Random(seed)
    torch.manual_seed(seed)
    states, found = [module.get_rng_state()], []
    for _ in range(choose.randrange(4, 24)):
        what = choose.choice(["draw", "draw", "keep", "put back", "put back", "fork", "look", "mark", "seed"])
        state = choose.choice(states)
        if what == "draw":
            found.append(torch.rand(choose.randrange(1, 20), device=device))
        elif what == "keep":
            states.append(module.get_rng_state())
        elif what == "put back":
            module.set_rng_state(state)
        elif what == "fork":
            with torch.random.fork_rng([] if device == "cpu" else None, device_type=device):
                module.set_rng_state(state)
                found.append(torch.rand(2, device=device))
        elif what == "look":
            found.append(state.sum().float())
        elif what == "seed":
            torch.manual_seed(choose.randrange(3))
        elif device != "cpu":
            lazy_backend.mark_step()
    return [one.flatten().tolist() for one in (*found, torch.rand(3, device=device), module.get_rng_state()[-16:])]


@pytest.mark.skipif(ON_GPU, reason="a GPU's random numbers are not the CPU's")
def test_random_programs_draw_eager_modes_numbers() -> None:
    for seed in range(60):
        assert program(seed, DEVICE) == program(seed, "cpu"), seed
