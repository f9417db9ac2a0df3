"""Ops whose sizes grow from recording to recording run at once, and what stands around them compiles once."""

from __future__ import annotations

from typing import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import lazy_backend
from ir_nodes import settings
from tests.device import DEVICE

STEPS = 12


pytestmark = pytest.mark.usefixtures("nothing_pending")


def layers(device: str, count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(count) for part in (nn.Linear(8, 8), nn.GELU()))).to(device)


def start(device: str, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device)


def late_compiles(steps: Iterator[Tensor]) -> tuple[int, list[Tensor]]:
    """Compiles in the second half of the steps, each of which is a recording, and what the steps gave."""
    found, before = [], 0
    for number, made in enumerate(steps):
        lazy_backend.mark_step()
        found.append(made)
        if number == STEPS // 2 - 1:
            before = lazy_backend.stats()["compiles"]
    return lazy_backend.stats()["compiles"] - before, [made.cpu() for made in found]


def appending(device: str, rows: int = 2) -> Iterator[Tensor]:
    """What was made joins a history that nothing in between reads a value of."""
    model, x = layers(device), start(device, rows, 8)
    history = x
    with torch.no_grad():
        for _ in range(STEPS):
            x = model(x)
            history = torch.cat([history, x])
            yield history


def growing_cache(device: str) -> Iterator[Tensor]:
    """Attention over all that came before."""
    model, x = layers(device), start(device, 1, 2, 1, 8)
    keys = x
    with torch.no_grad():
        for _ in range(STEPS):
            keys = torch.cat([keys, x], dim=2)
            x = model(nn.functional.scaled_dot_product_attention(x, keys, keys))
            yield x


def by_position(device: str) -> Iterator[Tensor]:
    """A cache of fixed size, whose places a Python number picks."""
    model, x, cache = layers(device), start(device, 2, 8), torch.zeros(STEPS, 2, 8, device=device)
    with torch.no_grad():
        for position in range(STEPS):
            cache[position] = x
            x = model(x + cache[: position + 1].mean(0))
            yield x


@pytest.mark.parametrize("loop", [appending, growing_cache, by_position])
def test_growth_compiles_nothing_after_a_few_recordings(loop: Callable[[str], Iterator[Tensor]]) -> None:
    late, found = late_compiles(loop(DEVICE))
    assert late == 0
    for mine, theirs in zip(found, loop("cpu"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_it_can_be_switched_off() -> None:
    with settings.override(disable={"varying"}):
        assert late_compiles(appending(DEVICE, rows=3))[0] == STEPS // 2


def test_the_reason_is_told() -> None:
    late_compiles(appending(DEVICE, rows=4))
    assert any("aten::cat.out: its sizes at this line are new with every recording" in barrier.reason
               for barrier in lazy_backend.barriers())


def test_no_op_is_asked_about_twice() -> None:
    for _ in appending(DEVICE, rows=6):
        lazy_backend.mark_step()
    before = lazy_backend.stats()
    for _ in appending(DEVICE, rows=6):
        lazy_backend.mark_step()
    now = lazy_backend.stats()
    assert now["fallbacks"] > before["fallbacks"]
    assert [now[count] - before[count] for count in ("shape_inferences", "compiles")] == [0, 0]


def test_what_grows_inside_a_recording_is_recorded() -> None:
    def step(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.cat([x, x[:, :2].tanh()], dim=1)
        return x

    before = lazy_backend.stats()["fallbacks"]
    with torch.no_grad():
        for _ in range(STEPS):
            step(start(DEVICE, 2, 8))
            lazy_backend.mark_step()
    assert lazy_backend.stats()["fallbacks"] == before


def test_other_batches_are_recorded() -> None:
    model = layers(DEVICE)
    before = lazy_backend.stats()["fallbacks"]
    with torch.no_grad():
        for number in range(STEPS):
            model(start(DEVICE, number + 1, 8))
            lazy_backend.mark_step()
    assert lazy_backend.stats()["fallbacks"] == before


def test_a_program_of_few_ops_is_recorded_for_every_size() -> None:
    before = lazy_backend.stats()["fallbacks"]
    with torch.inference_mode():
        for number in range(STEPS):
            start(DEVICE, number + 1, 8).exp().softmax(-1)
            lazy_backend.mark_step()
    assert lazy_backend.stats()["fallbacks"] == before


def test_training_is_left_alone() -> None:
    model = layers(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    before = lazy_backend.stats()["fallbacks"]
    kept = torch.zeros(1, 8, device=DEVICE)
    for _ in range(STEPS):
        made = model(start(DEVICE, 2, 8))
        kept = torch.cat([kept, made.detach()[:1]])
        optimizer.zero_grad()
        made.square().mean().backward()
        optimizer.step()
    assert lazy_backend.stats()["fallbacks"] == before


def attend(device: str, heads: int, length: int, queries: int) -> Tensor:
    """One line that several programs run."""
    x = start(device, 1, heads, length, 8)
    return nn.functional.scaled_dot_product_attention(x[:, :, -queries:].contiguous(), x, x)


def test_a_line_where_one_program_grows_is_recorded_for_others() -> None:
    model = layers(DEVICE)
    with torch.no_grad():
        for number in range(STEPS):  # grows: one query to ever more keys
            model(attend(DEVICE, 2, number + 2, 1))
            lazy_backend.mark_step()
        before = lazy_backend.stats()["fallbacks"]
        assert before
        for heads, length, queries in ((4, STEPS + 3, 1), (2, STEPS + 3, STEPS + 3), (2, STEPS + 4, STEPS + 4)):
            model(attend(DEVICE, heads, length, queries))
            lazy_backend.mark_step()
    assert lazy_backend.stats()["fallbacks"] == before


def test_sizes_that_grew_at_one_line_are_recorded_at_others() -> None:
    late_compiles(appending(DEVICE, rows=5))
    before = lazy_backend.stats()["fallbacks"]
    history = start(DEVICE, 5 * STEPS - 5, 8)
    for _ in range(2):
        weight = torch.ones(5, 8, device=DEVICE, requires_grad=True)
        torch.cat([history, weight]).square().sum().backward()
        lazy_backend.mark_step()
    with torch.no_grad():
        torch.cat([history, start(DEVICE, 5, 8)])
        lazy_backend.mark_step()
    assert lazy_backend.stats()["fallbacks"] == before
