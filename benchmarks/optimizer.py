"""What a whole optimizer step costs, against the memory's bandwidth. Imports torch, `benchmarks.common` and, for lazysched,
lazy_backend.

    python -m benchmarks.optimizer [--parameters gpt2] [--rounds 3] [--steps 50]

Every contestant updates the parameters of GPT-2 small (148 tensors, 124 million numbers in float32) from gradients that stay the
same. The floor is the bytes that an update has to move, at the rate of a large copy on the same machine. Contestants: eager
PyTorch with `foreach` and with `fused`, `torch.compile` of the step, lazysched with both, and without combos.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import hand_in, in_rounds, save, table
from benchmarks.plot import bars
from benchmarks.timing import copy_rate
from ir_nodes import settings

TASKS = {"adamw": 28, "sgd": 20, "adamw, clipped": 36}
"""Bytes that each parameter's update moves, by task: what it reads and what it writes, each once."""

CONTESTANTS = ("eager", "eager+fused", "compile", "compile+fused", "lazysched", "lazysched+fused", "lazysched-combo",
               "lazysched+fused-combo")


def sizes(name: str) -> list[tuple[int, ...]]:
    """The shapes of a GPT-2's parameters: "gpt2" is the small one, "tiny" is for trying things out."""
    vocabulary, context, layers, width = {"gpt2": (50257, 1024, 12, 768), "tiny": (64, 32, 2, 16)}[name]
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
             (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def make_step(contestant: str, task: str, parameters: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """One step of the optimizer, clipping included where the task clips."""
    fused = "+fused" in contestant
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    optimizer: torch.optim.Optimizer = (torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, **how) if task == "sgd"
                                        else torch.optim.AdamW(parameters, lr=1e-4, **how))

    def step() -> None:
        if "clipped" in task:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return torch.compile(step) if contestant.startswith("compile") else step


def child(contestant: str, task: str, parameters: str, steps: int) -> None:
    """Hands in milliseconds a step, seconds of the first two, and launches a step where lazysched counts them."""
    ours = contestant.startswith("lazysched")
    if ours:
        import lazy_backend
    physical = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("lazysched" if ours else physical)
    wait = lazy_backend.wait_device_ops if ours else torch.cuda.synchronize if physical == "cuda" else lambda: None
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(size, device=device)) for size in sizes(parameters)]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    step = make_step(contestant, task, made)
    with settings.override(disable={"combo"} if contestant.endswith("-combo") else set()):
        wait()
        start = time.perf_counter()
        for _ in range(2):  # the first makes the optimizer's state
            step()
        wait()
        first = time.perf_counter() - start
        for _ in range(3):
            step()
        wait()
        before = lazy_backend.stats() if ours else {}
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        spent = time.perf_counter() - start
    result: dict[str, float] = {"milliseconds": spent / steps * 1e3, "first": first}
    if ours:
        result["launches"] = (lazy_backend.stats()["nodes_run"] - before["nodes_run"]) / steps
    hand_in(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", choices=("gpt2", "tiny"), default="gpt2")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--no-save", dest="save", action="store_false")
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.tasks[0], options.parameters, options.steps)
        return
    rate = copy_rate()
    count = sum(torch.Size(size).numel() for size in sizes(options.parameters))
    results: dict[str, dict[str, dict[str, float]]] = {}
    for task in options.tasks:
        shared = ["--tasks", task, "--parameters", options.parameters, "--steps", str(options.steps)]
        told = in_rounds("benchmarks.optimizer", options.contestants, options.rounds, shared)
        results[task] = {name: {key: statistics.median(one[key] for one in found) for key in found[0]}
                         for name, found in told.items()}
        floor = TASKS[task] * count / rate * 1e3
        rows = [[name, f"{one['milliseconds']:.3f}", f"{floor / one['milliseconds']:.2f}", f"{one['first']:.2f}",
                 f"{one['launches']:.0f}" if "launches" in one else ""] for name, one in results[task].items()]
        print(f"\n{task}: {TASKS[task] * count / 1e6:.0f} MB, {floor:.3f} ms at {rate / 1e12:.2f} TB/s")
        print(table(["contestant", "ms a step", "of the floor", "first two steps, s", "calls and launches"], rows))
    if options.save:
        path = save("optimizer", {"copy bytes a second": rate, "parameters": options.parameters, "tasks": results})
        bars(path.with_suffix(".png"), "An optimizer's step, ms",
             {task: {name: one["milliseconds"] for name, one in found.items()} for task, found in results.items()})


if __name__ == "__main__":
    main()
