"""Training steps of small models on a CPU against what else PyTorch offers there. Imports torch, `benchmarks.common` and
`examples.gpt`.

    python -m benchmarks.cpu --threads 2 --rounds 3

Contestants: eager and torch.compile, without and with PyTorch's fused AdamW, torch.compile with the optimizer compiled, LTC, and
lazysched on its aten and its inductor engine, and with fused AdamW and the whole step wrapped in `lazy_backend.replayed`; "ltc",
which takes minutes for the GPT, runs only where it is named. All run once a round, each in a process of its own; the first round
compiles, the others find what it left on disk; why one failed stands below the table. Milliseconds a step
are the median and the smallest of all blocks; beside them the processor's time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import fresh_caches, hand_in, in_process, save, spread, table
from examples.gpt import GPT, SIZES

CONTESTANTS = ("eager", "eager+fused", "compile", "compile+fused", "compile+opt", "lazysched", "lazysched+inductor",
               "lazysched+replay", "lazysched+inductor+replay", "ltc")  # the last only where it is named
STEPS = {"gpt": 4, "mlp": 40}  # of one timed block
Result = dict[str, Any]


def mlp() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    """20 x (Linear 64, LayerNorm, GELU), batch 32."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers)
    return model, lambda x, target: nn.functional.mse_loss(model(x), target), (torch.randn(32, 64), torch.randn(32, 64))


def gpt() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    """The example's GPT, batch 8."""
    model = GPT(SIZES["small"])
    tokens = torch.randint(model.config.vocabulary, (8, model.config.context + 1))
    return model, model.loss, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


MODELS = {"gpt": gpt, "mlp": mlp}


class Loop:
    """One contestant's training loop; every contestant starts from the same weights and data."""

    def __init__(self, contestant: str, model: str) -> None:
        self.way, *extras = contestant.split("+")
        self.lazy = self.way in ("ltc", "lazysched")
        if self.way == "lazysched":
            importlib.import_module("lazy_backend")  # registers the device, in this contestant only
        elif self.way == "ltc":
            start_ltc()
        device = {"lazysched": "lazysched", "ltc": "lazy"}.get(self.way, "cpu")
        torch.manual_seed(0)
        module, self.loss, data = MODELS[model]()
        moved(module, device)
        self.data = tuple(tensor.to(device) for tensor in data)
        fused = True if {"fused", "replay"} & set(extras) else None
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)
        self.update: Callable[[], Any] = self.optimizer.step
        if self.way == "compile":
            self.loss = torch.compile(self.loss)
            self.update = torch.compile(self.optimizer.step) if "opt" in extras else self.update
        self.work: Callable[..., Tensor] = self.on_device
        if "replay" in extras:
            self.work = importlib.import_module("lazy_backend").replayed(self.on_device)

    def step(self) -> Tensor:
        return self.work(*self.data)

    def on_device(self, *data: Tensor) -> Tensor:
        loss = self.loss(*data)
        self.optimizer.zero_grad()
        loss.backward()
        self.update()
        if self.lazy:
            torch._lazy.mark_step()
        return loss.detach()

    def block(self, steps: int) -> tuple[float, float]:
        """Milliseconds a step, of the clock and of the processor."""
        wall, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = self.step()
        loss.item()
        return (time.perf_counter() - wall) / steps * 1e3, (time.process_time() - busy) / steps * 1e3


def moved(module: nn.Module, device: str) -> None:
    """As ``module.to(device)``, and what was tied stays tied, which `to` forgets on the device of PyTorch's lazy tensors."""
    tied: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            tied.setdefault(parameter, []).append((owner, name))
    module.to(device)
    for (first, first_name), *others in tied.values():
        for owner, name in others:
            setattr(owner, name, getattr(first, first_name))


def start_ltc() -> None:
    """Starts PyTorch's own lazy tensors. Of what unpacking such a tensor gives, ops come out on the CPU and the next one that
    mixes both fails ("Input tensor is not a lazy tensor"), so tensors are unpacked by indexing instead, which LTC knows."""
    from torch._lazy import ts_backend

    ts_backend.init()
    torch.Tensor.__iter__ = lambda self: iter([self[index] for index in range(len(self))])  # type: ignore[method-assign]


def child(contestant: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    model = options.models[0]
    loop = Loop(contestant, model)
    first = [loop.block(1)[0] / 1e3 for _ in range(4)]
    loop.block(STEPS[model])
    blocks = [loop.block(STEPS[model]) for _ in range(options.blocks)]
    hand_in({"first_s": first, "wall_ms": [wall for wall, _ in blocks], "busy_ms": [busy for _, busy in blocks],
             "loss": loop.step().item()})


def run(model: str, options: argparse.Namespace) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """What each contestant hands in, per round, and why others failed, which are left out from then on."""
    results: dict[str, list[Result]] = {name: [] for name in options.contestants}
    failed: dict[str, str] = {}
    arguments = ["--models", model, "--threads", str(options.threads), "--blocks", str(options.blocks)]
    with fresh_caches() as variables:
        for number in range(options.rounds):
            for name in list(results):
                print(f"{model}: {name}, round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
                engine = {"LAZYSCHED_ENGINE": "inductor" if "+inductor" in name else "aten"}
                try:
                    results[name].append(in_process("benchmarks.cpu", name, arguments, variables | engine, options.timeout))
                except RuntimeError as error:
                    print(f"{model}: {error}", file=sys.stderr, flush=True)
                    failed[name] = str(error).strip().splitlines()[-1]
                    del results[name]
    return results, failed


def summary(runs: list[Result]) -> Result:
    """Medians over all blocks of all rounds; first steps of the first round and of the last."""
    walls = [time for one in runs for time in one["wall_ms"]]
    return {"wall_ms": statistics.median(walls), "least_ms": min(walls), "spread": spread(walls), "loss": runs[-1]["loss"],
            "busy_ms": statistics.median(time for one in runs for time in one["busy_ms"]),
            "cold_s": sum(runs[0]["first_s"]), "warm_s": sum(runs[-1]["first_s"]) if len(runs) > 1 else None}


def show(model: str, found: dict[str, Result], failed: dict[str, str]) -> None:
    base = next(iter(found.values()), {})
    rows = [[name, f"{r['wall_ms']:.2f}", f"{r['least_ms']:.2f}", f"{r['spread']:.0%}", f"{r['busy_ms']:.2f}",
             f"{base['wall_ms'] / r['wall_ms']:.2f}", f"{r['cold_s']:.1f}", "" if r["warm_s"] is None else f"{r['warm_s']:.1f}",
             f"{r['loss']:.5f}"] for name, r in found.items()]
    print(f"\n{model}")
    print(table(["", "ms/step", "least", "spread", "CPU ms", "x eager", "cold s", "warm s", "loss"], rows))
    for name, why in failed.items():
        print(f"{name} failed: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS[:-1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contestant")
    parser.add_argument("--blocks", type=int, default=8, help="timed in each process")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one process")
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    torch.set_num_threads(options.threads)
    found, failures = {}, {}
    for model in options.models:
        runs, failures[model] = run(model, options)
        found[model] = {name: summary(one) for name, one in runs.items()}
        show(model, found[model], failures[model])
    some = [] if set(options.models) == set(MODELS) else options.models  # a part must not take the place of the whole
    save("-".join(["cpu", *some]), {"options": vars(options), "models": found, "failed": failures})


if __name__ == "__main__":
    main()
