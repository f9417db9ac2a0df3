"""The public prototype's test list, as behaviour: outputs, parameter and input gradients are eager's over three iterations, and
segments run in the order that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from lazy_backend import LazyScheduler, register_segment
from tests.device import DEVICE
from tests.towers import pair, same

pytestmark = pytest.mark.usefixtures("no_segments_left")


class Functions(nn.Module):
    """Two functions; `way` says how forward uses them."""

    def __init__(self, way: str, width: int = 8) -> None:
        super().__init__()
        self.way = way
        self.one, self.two = nn.Linear(width, 8), nn.Linear(8 if way in ("chain", "nested dependent") else width, 8)

    def func1(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).relu()

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x).tanh()

    def both(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.way == "nested dependent":
            return self.func2(self.func1(x)).exp()
        return self.func1(x).exp() * self.func2(y)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.way.startswith("nested"):
            return self.both(x, y)
        if self.way == "chain":
            return self.func2(self.func1(x))
        return self.func1(x) + self.func2(y)


@dataclass(frozen=True)
class Case:
    """``names``: segments, "_bwd" at the end for a backward. ``order``: how they run; ``refused``: an order that data forbids."""

    way: str
    names: list[str]
    schedule: list[str]
    order: list[str]
    refused: list[tuple[str, str]] = field(default_factory=list)
    width: int = 8


ALL = ["func1", "func2", "func1_bwd", "func2_bwd"]
CASES: dict[str, Case] = {
    "one forward": Case("chain", ["func1"], ["func1"], ["func1"]),
    "forward and backward": Case("chain", ["func1", "func1_bwd"], ["func1", "func1_bwd"], ["func1", "func1_bwd"]),
    "nested, dependent": Case(
        "nested dependent", ["both", *ALL], ["func1", "func2", "func2_bwd", "func1_bwd"],
        ["both", "func1", "func2", "func2_bwd", "func1_bwd"]),
    "nested, dependent, contradicted": Case(
        "nested dependent", ["both", *ALL], ["func2", "func1"], ["both", "func1", "func2", "func2_bwd", "func1_bwd"],
        [("func2", "func1")]),
    "nested, independent": Case(
        "nested independent", ["both", *ALL], ["func2", "func1"], ["both", "func2", "func1", "func2_bwd", "func1_bwd"]),
    "reordered forward": Case("sum", ["func1", "func2"], ["func2", "func1"], ["func2", "func1"]),
    "reordered forward and backward": Case(
        "sum", ALL, ["func2", "func1", "func1_bwd", "func2_bwd"], ["func2", "func1", "func1_bwd", "func2_bwd"], width=10240),
    "backward only": Case("sum", ALL, ["func1_bwd", "func2_bwd"], ["func1", "func2", "func1_bwd", "func2_bwd"], width=10240),
    "forward contradicted": Case(
        "chain", ALL, ["func2", "func1"], ["func1", "func2", "func2_bwd", "func1_bwd"], [("func2", "func1")]),
    "backward contradicted": Case(
        "chain", ALL, ["func1_bwd", "func2_bwd"], ["func1", "func2", "func2_bwd", "func1_bwd"], [("func1_bwd", "func2_bwd")]),
    "backward before its forward": Case(
        "sum", ALL, ["func1_bwd", "func1"], ["func1", "func2", "func2_bwd", "func1_bwd"], [("func1_bwd", "func1")]),
}


def iterate(model: nn.Module, device: str, width: int) -> list[torch.Tensor]:
    """Outputs, input gradients and parameter gradients of three iterations."""
    found = []
    for step in range(3):
        base = torch.linspace(-1, 1 + step, 4 * width).reshape(4, width)
        x, y = (base.add(shift).to(device).requires_grad_() for shift in (0, 0.5))
        model.zero_grad()
        out = model(x, y)
        out.square().sum().backward()
        found += [out.detach(), *(t.grad for t in (x, y) if t.grad is not None), *(p.grad.clone() for p in model.parameters())]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_prototypes_case(name: str) -> None:
    case = CASES[name]
    model, truth = pair(lambda: Functions(case.way, case.width))
    for segment in case.names:
        register_segment(getattr(model, segment.removesuffix("_bwd")), name=segment, is_backward=segment.endswith("_bwd"))
    with LazyScheduler(schedule=case.schedule) as scheduler:
        got = iterate(model, DEVICE, case.width)
    same(got, iterate(truth, "cpu", case.width))
    order = scheduler.recorded_execution_order()
    iterations = [[one.split("#")[0] for one in order if (one.split("#") + ["0"])[1] == str(number)] for number in range(3)]
    assert iterations == [case.order] * 3
    assert {(str(one.earlier).split("#")[0], str(one.later).split("#")[0]) for one in scheduler.refusals()} == set(case.refused)
