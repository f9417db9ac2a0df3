"""What the passes over an ordered graph save on the device, each switched off and on. Imports lazy_backend."""

from __future__ import annotations

from typing import Callable

import pytest
import torch

import lazy_backend
from ir_nodes import settings
from tests.device import DEVICE, ON_GPU


def ran(program: Callable[[torch.Tensor], torch.Tensor], width: int, disable: str) -> int:
    """How many ops ran without the optimisations ``disable``. Each width is compiled anew: settings are not a part of its key."""
    x = torch.linspace(-1, 1, 3 * width).reshape(3, width).bfloat16()
    with settings.override(engine="aten", disable=disable):
        there = x.to(DEVICE)
        lazy_backend.mark_step()
        before = lazy_backend.stats()["nodes_run"]
        result = program(there)
        lazy_backend.mark_step()
        near = {} if ON_GPU else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(result.cpu(), program(x), **near)
        return lazy_backend.stats()["nodes_run"] - before


@pytest.mark.parametrize(("name", "saved", "width", "program"), [
    ("cse", 2, 21, lambda x: (x.float().sin() + 1) * x.float().sin()),
    ("fold", 2, 23, lambda x: x.float().bfloat16().exp()),
    ("fold", 1, 25, lambda x: x.exp().clone()),
], ids=["cse", "casts", "a copy"])  # fmt: skip
def test_what_a_pass_saves(name: str, saved: int, width: int, program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert ran(program, width, disable=name) - ran(program, width + 1, disable="") == saved
