"""Prefetching by hook only: the second microbatch's all-gather runs under the first one's backward, the model unchanged.

    python examples/prefetch.py

Each rank holds a part of each weight. A layer gathers its weight from all ranks, multiplies, and in backward scatters the sums of
its gradient back: fully sharded data parallelism, written as plainly as it goes. A step runs two microbatches, one after the
other. `hooks` says that the second microbatch's gathers start right before the first one's backward: its own forward then finds
the weights there. With NCCL where there are enough GPUs, else with gloo. Imports torch, lazy_backend and `launch`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import launch
import torch
import torch.distributed as dist
from torch import nn

from lazy_backend import LazyScheduler, register_segment, register_segment_backward_pre_hook

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name, from torch 2.13 on
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather(torch.autograd.Function):
    """A weight from its parts; its gradient back to the parts."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty(part.shape[0] * dist.get_world_size(), part.shape[1])
        all_gather(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        part = grad.new_empty(grad.shape[0] // dist.get_world_size(), grad.shape[1])
        reduce_scatter(part, grad, group=ctx.group)
        return part, None


class Layer(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        whole = torch.randn(width, width) / width**0.5
        self.part = nn.Parameter(whole.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.group = group

    def gather(self) -> torch.Tensor:
        return Gather.apply(self.part, self.group)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.gather())


Step = functools.partial[list[torch.Tensor]]


def make(device: torch.device | str, options: argparse.Namespace, group: dist.ProcessGroup | None) -> Step:
    """A function that does one training step and returns what it computed. The same numbers on every device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(options.width, group) for _ in range(options.layers))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    batches = torch.randn(2, options.batch, options.width).to(device)
    return functools.partial(step, model, optimizer, batches)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> list[torch.Tensor]:
    optimizer.zero_grad()
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def hooks(model: nn.Sequential) -> None:
    """The second microbatch's gather of layer i right before the first one's backward through a layer: the last goes first."""
    last = len(model) - 1
    for index, layer in enumerate(model):
        register_segment(layer.gather, name=f"gather{index}_second", nth_call=1)
        register_segment(layer.multiply, name=f"multiply{index}_bwd_first", is_backward=True, nth_call=0)
    for index in range(len(model)):
        register_segment_backward_pre_hook(f"multiply{last - index}_bwd_first", f"gather{index}_second")


def worker(options: argparse.Namespace) -> None:
    eager = make(launch.physical_device(), options, launch.plain_group())
    unscheduled, scheduled = (make("lazysched", options, None) for _ in range(2))
    hooks(scheduled.args[0])
    scheduler = LazyScheduler(strict=True)
    for number in range(options.steps):
        wanted, before = eager(), unscheduled()
        with scheduler:
            after = scheduled()
            launch.finish()
        close = all(torch.allclose(a.cpu(), b.cpu(), rtol=1e-4, atol=1e-5) for a, b in zip(wanted, after))
        # Another order fuses other ops, and a fused multiply-add rounds once: on a GPU the last bit may differ.
        rounding = 1e-6 if launch.on_gpus() else 0.0
        same = all(torch.allclose(a.cpu(), b.cpu(), rtol=rounding, atol=rounding / 100) for a, b in zip(before, after))
        losses = ", ".join(f"{loss.item():.6f}" for loss in after[:2])
        launch.say(f"step {number}: losses {losses}; {'equal' if same else 'NOT EQUAL'} to unscheduled, "
                   f"{'equal' if close else 'NOT EQUAL'} to eager")
        assert close and same
    launch.say(scheduler.report())
    with LazyScheduler():
        launch.say_medians({"eager": eager, "lazysched": unscheduled, "lazysched, prefetched": scheduled}, options.rounds)


def parse(arguments: list[str]) -> argparse.Namespace:
    big = torch.cuda.device_count() >= 2
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=8192 if big else 256)
    parser.add_argument("--batch", type=int, default=4096 if big else 256, help="rows of a microbatch")
    parser.add_argument("--steps", type=int, default=3, help="checked steps")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    print(f"torch {torch.__version__}, {launch.transport(given.ranks)}, {given.ranks} ranks")
    launch.spawn(worker, given.ranks, given)
