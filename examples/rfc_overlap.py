"""The model of the LazyScheduler RFC: an exchange between ranks placed under the backward of a matrix product, by hooks only.

    python examples/rfc_overlap.py

The model is written without a thought of overlap. It exchanges features of the next batch (SDD, sparse data distribution) and
then runs its dense part. `schedule` below says that the exchange is to start right before the backward of `func2`, which then
runs while data travels. With NCCL where there are enough GPUs, else with gloo. Imports torch, lazy_backend and `launch`.
"""

from __future__ import annotations

import argparse
import functools
import sys

import launch
import torch
import torch.distributed as dist
from torch import nn

from lazy_backend import LazyScheduler, register_segment, register_segment_backward_pre_hook


class SDD(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        arrived = torch.empty_like(features)
        dist.all_to_all_single(arrived, features, group=self.group)
        return arrived


class OverArch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def func1(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    def func2(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.func2(self.func1(x))


class Model(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.sdd, self.overarch = SDD(group), OverArch(width)

    def forward(self, x: torch.Tensor, next_features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        arrived = self.sdd(next_features)
        return self.overarch(x), arrived


Step = functools.partial[list[torch.Tensor]]


def make(device: torch.device | str, options: argparse.Namespace, group: dist.ProcessGroup | None) -> Step:
    """A function that does one training step and returns what it computed. The same numbers on every device."""
    torch.manual_seed(0)
    model = Model(options.width, group).to(device)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(options.batch, options.width).to(device).requires_grad_()
    features = torch.randn(options.features, options.width).to(device)
    return functools.partial(step, model, x, features)


def step(model: Model, x: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x.grad = None
    output, arrived = model(x, features)
    loss = output.square().mean()
    loss.backward()
    weight = model.overarch.weight
    assert x.grad is not None and weight.grad is not None
    return [loss.detach(), x.grad, weight.grad, arrived * 0.5]  # the next batch's dense part would read `arrived`


def schedule(model: Model) -> None:
    """The RFC's lines, and two more so that reports show the forward and func1's backward too."""
    register_segment(model.sdd.forward, name="sdd_fwd")
    register_segment(model.overarch.forward, name="overarch_fwd")
    register_segment(model.overarch.func1, name="overarch_func1_bwd", is_backward=True)
    register_segment(model.overarch.func2, name="overarch_func2_bwd", is_backward=True)
    register_segment_backward_pre_hook("overarch_func2_bwd", "sdd_fwd")


def worker(options: argparse.Namespace) -> None:
    eager = make(launch.physical_device(), options, launch.plain_group())
    unscheduled, scheduled = (make("lazysched", options, None) for _ in range(2))
    wanted = [tensor.cpu() for tensor in eager()]
    before = [tensor.cpu() for tensor in unscheduled()]

    schedule(scheduled.args[0])
    scheduler = LazyScheduler(strict=True)
    with scheduler:
        after = [tensor.cpu() for tensor in scheduled()]
        launch.finish()
    launch.say(scheduler.report())
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(wanted, after))
    same = all(torch.equal(a, b) for a, b in zip(before, after))
    launch.say(f"numbers: scheduled {'equal' if same else 'DIFFER FROM'} unscheduled bit for bit, "
               f"and {'equal' if close else 'DIFFER FROM'} eager's")
    assert close and same

    with LazyScheduler():
        launch.say_medians({"eager": eager, "lazysched": unscheduled, "lazysched, scheduled": scheduled}, options.rounds)


def parse(arguments: list[str]) -> argparse.Namespace:
    big = torch.cuda.device_count() >= 2
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=8192 if big else 512, help="of the matrix product")
    parser.add_argument("--batch", type=int, default=8192 if big else 512, help="rows of the dense part")
    parser.add_argument("--features", type=int, default=16384 if big else 1024, help="rows that are exchanged")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    print(f"torch {torch.__version__}, {launch.transport(given.ranks)}, {given.ranks} ranks")
    launch.spawn(worker, given.ranks, given)
