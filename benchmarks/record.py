"""What it costs to record one op, against what eager and LTC spend on it. Imports torch, lazy_backend, `benchmarks.common`.

    python -m benchmarks.record

Each contestant runs in processes of its own, all of them once a round. Tensors are 4x4: the work is the dispatch. What
lazysched and LTC record is dropped outside the timed part, as dead code. Microseconds per call, medians over rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._lazy
import torch._lazy.ts_backend
from torch import Tensor

from benchmarks.common import geometric_mean, hand_in, in_rounds, save, spread, table

CALLS, REPEATS = 1000, 7  # fewer calls than a GPU queues, than LAZYSCHED_MAX_OPS
TARGET_CPU, TARGET_CUDA = 1.6, 0.4
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "sum": lambda x, y: x.sum(),
    "mm": lambda x, y: x @ y,
    "gelu": lambda x, y: torch.nn.functional.gelu(x),
    "relu": lambda x, y: x.relu(),
    "add_": lambda x, y: x.add_(y),
    "view": lambda x, y: x.view(16),
}
VIEWS = {"view"}
DEVICES = {"lazysched": "lazysched", "cpu": "cpu", "cuda": "cuda", "ltc": "lazy"}


def operands(op: str, grad: bool, device: str) -> tuple[Tensor, Tensor]:
    """Two 4x4 tensors; with ``grad`` the first records a graph, and is no leaf where the op writes to it."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 4, generator=generator).to(device) for _ in range(2))
    x.requires_grad_(grad)
    return (x * 1 if grad and op.endswith("_") else x), y


def settle(contestant: str) -> None:
    """Drop or finish what is pending."""
    if contestant in ("lazysched", "ltc"):
        torch._lazy.mark_step()
    if contestant == "cuda":
        torch.cuda.synchronize()


def check(contestant: str) -> None:
    """Every op gives eager CPU's numbers. Raises AssertionError."""
    for op, call in OPS.items():
        for grad in (False, True):
            x, y = operands(op, grad, DEVICES[contestant])
            expected = call(*operands(op, grad, "cpu"))
            torch.testing.assert_close(call(x, y).detach().cpu(), expected.detach())


def measure(op: str, grad: bool, contestant: str) -> float:
    """Microseconds per call, the median of the repeats."""
    call, times = OPS[op], []
    for _ in range(REPEATS):
        x, y = operands(op, grad, DEVICES[contestant])
        call(x, y)
        settle(contestant)
        start = time.perf_counter()
        for _ in range(CALLS):
            call(x, y)
        times.append((time.perf_counter() - start) / CALLS * 1e6)
        del x, y
        settle(contestant)
    return statistics.median(times)


def child(contestant: str) -> None:
    torch.set_num_threads(1)
    if contestant == "lazysched":
        import lazy_backend  # noqa: F401  (registers the device, in this contestant only)
    elif contestant == "ltc":
        torch._lazy.ts_backend.init()
    check(contestant)
    gc.disable()
    hand_in({f"{op}{' grad' if grad else ''}": measure(op, grad, contestant) for grad in (False, True) for op in OPS})


def summarise(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and spreads per op, geometric means of lazysched's time over each other contestant's."""
    names = list(rounds["lazysched"][0])
    medians = {c: {n: statistics.median(r[n] for r in runs) for n in names} for c, runs in rounds.items()}
    spreads = {c: max(spread([r[n] for r in runs]) for n in names) for c, runs in rounds.items()}
    groups = {
        "all": names,
        "compute": [n for n in names if n.split()[0] not in VIEWS],
        "views": [n for n in names if n.split()[0] in VIEWS],
    }
    ratios = {
        other: {
            group: geometric_mean(medians["lazysched"][n] / medians[other][n] for n in members)
            for group, members in groups.items()
        }
        for other in rounds
        if other != "lazysched"
    }
    return {"microseconds": medians, "largest_spread": spreads, "lazysched_over": ratios, "rounds": rounds}


def show(summary: dict[str, Any]) -> None:
    medians, ratios = summary["microseconds"], summary["lazysched_over"]
    contestants = list(medians)
    others = list(ratios)
    rows = []
    for name in medians["lazysched"]:
        ours = medians["lazysched"][name]
        times = [f"{medians[c][name]:.2f}" for c in contestants]
        rows.append([name, *times, *(f"{ours / medians[o][name]:.2f}" for o in others)])
    for group in ("all", "compute", "views"):
        rows.append([f"geometric mean, {group}", *[""] * len(contestants), *(f"{ratios[o][group]:.2f}" for o in others)])
    spreads = [f"{summary['largest_spread'][c]:.0%}" for c in contestants]
    rows.append(["largest spread", *spreads, *[""] * len(others)])
    print(table(["us per call", *contestants, *(f"ours/{o}" for o in others)], rows))
    if "cuda" in ratios:
        print(f"to reach on a GPU host: compute at most {TARGET_CUDA} of cuda, views at most 1")
    else:
        print(f"to reach on a CPU machine: all at most {TARGET_CPU} of cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=list(DEVICES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    contestants = [name for name in DEVICES if name != "cuda" or torch.cuda.is_available()]
    summary = summarise(in_rounds("benchmarks.record", contestants, options.rounds))
    show(summary)
    save("record", summary)


if __name__ == "__main__":
    main()
