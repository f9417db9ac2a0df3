"""A recommendation model (DLRM) on 2 ranks whose exchange of embeddings is to run beside its dense part.

    python -m benchmarks.dlrm            # 2 GPUs; --small: 2 processes on a CPU, gloo

Each rank holds 13 of 26 tables. A step looks up the next batch's embeddings (of all ranks' rows), exchanges them with one
all_to_all_single of several hundred MB, arranges what arrived, and trains the over-arch on the current batch's. As written, the
exchange stands at the step's begin and is waited for at once. Contestants run in turn, in one process group:

    eager                 as written, on the physical device
    hand-written          the same with a side stream, async_op and a wait at the end
    lazysched             as written
    lazysched, scheduled  as written, with two hooks: arranging comes after the over-arch's backward
    lazysched, policy     as written, with the hook `overlap_communication` that comes with lazysched
    exchange alone, eager alone, lazysched alone: communication and computation by themselves

Floor of a contestant: the larger of the exchange alone and its own computation alone. The tables are not trained: the exchange
of their gradients would come at the end of backward, where there is nothing left to hide it. Megahertz and watts are medians
while a contestant runs. Imports torch, lazy_backend, `examples.launch`, `benchmarks.clocks` and `benchmarks.common`.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.clocks import Clocks, seen
from benchmarks.common import save, spread, table
from examples import launch
from lazy_backend import LazyScheduler, overlap_communication, register_segment, register_segment_backward_hook

Tensor = torch.Tensor
TABLES, DENSE = 26, 13
SCHEDULED, POLICY = "lazysched, scheduled", "lazysched, policy"
COMMUNICATION = "exchange alone"
ALONE = {"eager": "eager alone", "hand-written": "eager alone", "lazysched": "lazysched alone", SCHEDULED: "lazysched alone",
         POLICY: "lazysched alone"}


class SparseDistribution(nn.Module):
    """Looks rows up in this rank's tables and brings them to the ranks whose batch they belong to."""

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.ranks, self.group = dist.get_world_size(), group
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(options.rows, options.dim) * 0.1, requires_grad=False)
                                       for _ in range(TABLES // self.ranks))

    def look_up(self, indices: Tensor) -> Tensor:
        """[tables of this rank, ranks * batch] -> [ranks * batch, tables of this rank * dim]"""
        return torch.cat([nn.functional.embedding(one, weight) for one, weight in zip(indices, self.tables)], dim=1)

    def exchange(self, found: Tensor, async_op: bool = False) -> tuple[Tensor, Any]:
        arrived = torch.empty_like(found)
        return arrived, dist.all_to_all_single(arrived, found, group=self.group, async_op=async_op)

    def arrange(self, arrived: Tensor, dtype: torch.dtype) -> Tensor:
        """[ranks * batch, tables of one rank * dim] -> [batch, tables * dim]"""
        return torch.cat(arrived.chunk(self.ranks), dim=1).to(dtype)

    def forward(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        return self.arrange(self.exchange(self.look_up(indices))[0], dtype)


class OverArch(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 512), nn.ReLU(), nn.Linear(512, options.dim), nn.ReLU())
        widths = [(TABLES + 1) * options.dim, *[options.width] * options.layers]
        pairs = [part for a, b in zip(widths, widths[1:]) for part in (nn.Linear(a, b), nn.ReLU())]
        self.top = nn.Sequential(*pairs, nn.Linear(widths[-1], 1))

    def forward(self, dense: Tensor, features: Tensor, clicks: Tensor) -> Tensor:
        logits = self.top(torch.cat([self.bottom(dense), features], dim=1))
        return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1).float(), clicks)


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.sdd, self.overarch = SparseDistribution(options, group), OverArch(options)

    def forward(self, dense: Tensor, features: Tensor, clicks: Tensor, next_indices: Tensor) -> tuple[Tensor, Tensor]:
        next_features = self.sdd(next_indices, dense.dtype)
        return self.overarch(dense, features, clicks), next_features


class Trainer:
    """One contestant's model, data and optimizer; the same numbers for all."""

    def __init__(self, device: torch.device | str, options: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(0)
        self.model = Model(options, group)
        dtype = getattr(torch, options.dtype)
        self.model.overarch.to(dtype)
        self.model.to(device)
        self.optimizer = torch.optim.SGD(self.model.overarch.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        ranks, rows = dist.get_world_size(), options.batch
        shape = (TABLES // ranks, ranks * rows)
        self.indices = [torch.randint(options.rows, shape, generator=generator).to(device) for _ in range(2)]
        self.dense = torch.randn(rows, DENSE, generator=generator).to(dtype).to(device)
        self.clicks = torch.randint(2, (rows,), generator=generator).float().to(device)
        self.side = torch.cuda.Stream() if torch.device(device).type == "cuda" else None
        self.found = self.model.sdd.look_up(self.indices[1])
        self.features = self.model.sdd(self.indices[1], dtype)
        self.step = 0

    def finish_step(self, loss: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def next_indices(self) -> Tensor:
        return self.indices[self.step % 2]

    def as_written(self) -> Tensor:
        loss, self.features = self.model(self.dense, self.features, self.clicks, self.next_indices())
        return self.finish_step(loss)

    def by_hand(self) -> Tensor:
        sdd, features = self.model.sdd, self.features
        main = torch.cuda.current_stream() if self.side else None
        with torch.cuda.stream(self.side):  # None: does nothing
            if self.side:
                self.side.wait_stream(main)
            arrived, work = sdd.exchange(sdd.look_up(self.next_indices()), async_op=True)
        loss = self.finish_step(self.model.overarch(self.dense, features, self.clicks))
        with torch.cuda.stream(self.side):
            work.wait()
            self.features = sdd.arrange(arrived, self.dense.dtype)
        if main:
            main.wait_stream(self.side)
            self.features.record_stream(main)
        return loss

    def computation(self) -> Tensor:
        """Everything but the exchange. What was looked up is arranged a step later: it lies in memory as if it were exchanged
        meanwhile, or a compiler could look up and arrange in one kernel, which no exchange would allow."""
        sdd, features = self.model.sdd, self.features
        self.features = sdd.arrange(self.found, self.dense.dtype)
        self.found = sdd.look_up(self.next_indices())
        return self.finish_step(self.model.overarch(self.dense, features, self.clicks))


def name_segments(model: Model) -> None:
    """Two hooks: what arrived is arranged after the over-arch's backward."""
    register_segment(model.overarch.forward, name="overarch_bwd", is_backward=True)
    register_segment(model.sdd.arrange, name="sdd_arrange")
    register_segment_backward_hook("overarch_bwd", "sdd_arrange")


def contestants(options: argparse.Namespace) -> tuple[dict[str, Callable[[], Tensor | None]], dict[str, Trainer]]:
    """What to measure, and the trainers of those that train."""
    physical, plain = launch.physical_device(), launch.plain_group(options.channels)
    eager, by_hand, alone = (Trainer(physical, options, plain) for _ in range(3))
    written, scheduled, policy, lazy_alone = (Trainer("lazysched", options, None) for _ in range(4))
    name_segments(scheduled.model)
    launch.finish()
    found = eager.model.sdd.look_up(eager.indices[0])

    def exchange() -> None:
        eager.model.sdd.exchange(found)

    def under(scheduler: LazyScheduler, step: Callable[[], Tensor]) -> Tensor:
        with scheduler:
            return step()

    runs: dict[str, Callable[[], Tensor | None]] = {
        "eager": eager.as_written,
        "hand-written": by_hand.by_hand,
        "lazysched": written.as_written,
        SCHEDULED: scheduled.as_written,
        POLICY: functools.partial(under, LazyScheduler(hooks=[overlap_communication]), policy.as_written),
        COMMUNICATION: exchange,
        "eager alone": alone.computation,
        "lazysched alone": lazy_alone.computation,
    }
    return runs, {"eager": eager, "hand-written": by_hand, "lazysched": written, SCHEDULED: scheduled, POLICY: policy}


def check(runs: dict[str, Callable[[], Tensor | None]], trainers: dict[str, Trainer],
          options: argparse.Namespace) -> dict[str, list[float]]:
    """The losses of four steps, which have to be eager's, and so, bit by bit, has what was exchanged for the fifth. What runs
    alone is not compared. Raises AssertionError."""
    losses: dict[str, list[float]] = {}
    wanted = None
    for name, trainer in trainers.items():
        losses[name] = [float(runs[name]().item()) for _ in range(4)]
        near = all(math.isclose(a, b, rel_tol=options.tolerance) for a, b in zip(losses[name], losses["eager"]))
        assert near, f"{name} trains to {losses[name]}, eager to {losses['eager']}"
        got = trainer.features.cpu()
        wanted = got if wanted is None else wanted  # eager is the first
        assert torch.equal(got, wanted), f"{name} exchanges other features than eager"
    return losses


def measure(runs: dict[str, Callable[[], Tensor | None]], options: argparse.Namespace
            ) -> tuple[dict[str, list[float]], dict[str, Clocks]]:  # fmt: skip
    """Milliseconds a step of each round, on the slowest rank, and this rank's clocks. Each round runs every contestant, each
    after as many steps that are not timed, and another one first: at the limit of its power a GPU is slower after a busy one."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    clocks = {name: Clocks() for name in runs}
    names = list(runs)
    for number in range(options.rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with seen(clocks[name]):
                block(runs[name], options.steps)
            seconds = torch.tensor(block(runs[name], options.steps))
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:  # the first warms up
                taken[name].append(seconds.item() * 1e3 / options.steps)
    return taken, clocks


def block(step: Callable[[], Tensor | None], steps: int) -> float:
    """Seconds that ``steps`` steps take this rank from when all ranks begin."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    launch.finish()
    return time.perf_counter() - start


def worker(options: argparse.Namespace) -> None:
    runs, trainers = contestants(options)
    losses = check(runs, trainers, options)
    taken, clocks = measure(runs, options)
    if dist.get_rank():
        return
    median = {name: statistics.median(times) for name, times in taken.items()}
    floor = {name: max(median[COMMUNICATION], median[alone]) for name, alone in ALONE.items()}
    sent = options.batch * TABLES * options.dim * 4
    print(f"{options.ranks} ranks, each exchanges {sent / 2**20:.0f} MiB, {options.dtype} over-arch of {options.layers} layers")
    rows = [[name, f"{median[name]:.3f}", f"{spread(taken[name]):.1%}", *ratios(name, median, floor), *clocks[name].told()]
            for name in runs]
    print(table(["", "ms a step", "spread", "of its floor", "of eager", "of hand-written", "MHz", "watts"], rows))
    if not options.no_save:
        save("dlrm-small" if options.small else "dlrm", {"options": vars(options), "bytes": sent, "losses": losses, "ms": taken,
                                                         "median": median, "floor": floor,
                                                         "clocks": {name: vars(one) for name, one in clocks.items()}})


def ratios(name: str, median: dict[str, float], floor: dict[str, float]) -> list[str]:
    if name not in floor:
        return ["", "", ""]
    return [f"{median[name] / other:.3f}" for other in (floor[name], median["eager"], median["hand-written"])]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, help="rows of one rank; 32768, small: 512")
    parser.add_argument("--rows", type=int, help="of each table; 100000, small: 1000")
    parser.add_argument("--dim", type=int, help="of an embedding; 128, small: 16")
    parser.add_argument("--width", type=int, help="of the over-arch; 2048, small: 128")
    parser.add_argument("--layers", type=int, default=3, help="of the over-arch")
    parser.add_argument("--dtype", help="of the over-arch; bfloat16, small: float32")
    parser.add_argument("--channels", type=int, default=0,
                        help="of NCCL's at most, for all: each takes a multiprocessor from what runs beside it; 0: its choice")
    parser.add_argument("--steps", type=int, help="in a row; 40, small: 2")
    parser.add_argument("--rounds", type=int, help="of all contestants; 15, small: 5")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args(arguments)
    sizes = {"batch": (32768, 512), "rows": (100_000, 1000), "dim": (128, 16), "width": (2048, 128),
             "dtype": ("bfloat16", "float32"), "steps": (40, 2), "rounds": (15, 5)}
    for name, (big, small) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, small if options.small else big)
    options.tolerance = 1e-2 if options.dtype == "bfloat16" else 1e-4
    return options


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    launch.spawn(worker, given.ranks, given, channels=given.channels)
