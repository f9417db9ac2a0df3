"""Peak memory of a training, lazysched against eager. Imports torch, `benchmarks.common` and `benchmarks.training`.

    python -m benchmarks.memory

Counted by the allocators: on a GPU PyTorch's and what CUDA graphs keep, on the CPU torch's own record of each allocation, as
the profiler reports it. Beside it the process's peak resident bytes above those before the model was made.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import hand_in, in_rounds, save, table
from benchmarks.profiling import peak_on_gpu
from benchmarks.training import Task, Trainer

TASKS = {
    "fp32": Task("small", batch=16),
    "bf16": Task("small", batch=16, bf16=True),
    "dropout": Task("small", batch=16, dropout=0.1),
    "wide vocabulary": Task("small", batch=8, vocabulary=8192),
}
CONTESTANTS = ("eager", "lazysched")


def resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(contestant: str, task: Task, steps: int) -> None:
    trainer = Trainer(contestant, task)
    trainer.seconds(steps)


def counted_on_cpu(contestant: str, task: Task, steps: int) -> int:
    """The most bytes that torch's CPU allocator had handed out at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(contestant, task, steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    told = [event["args"] for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    return max(args["Total Allocated"] for args in told)


def child(contestant: str, task: Task, steps: int, how: str) -> None:
    if contestant == "lazysched":
        import lazy_backend  # noqa: F401  (its own code is no part of the model's memory)

        torch.zeros(1, device="lazysched").cpu()
    before = resident_peak()
    if torch.cuda.is_available():
        run(contestant, task, steps)
        hand_in({"allocated": peak_on_gpu(), "resident": resident_peak() - before})
    elif how == "counted":
        hand_in({"allocated": counted_on_cpu(contestant, task, steps)})
    else:
        run(contestant, task, steps)
        hand_in({"resident": resident_peak() - before})


def measure(task: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Per contestant the medians of bytes allocated and bytes resident at the peak."""
    shared = ["--task", task, "--steps", str(options.steps)]
    counted = in_rounds("benchmarks.memory", CONTESTANTS, 1, [*shared, "--how", "counted"])  # exact: once is enough
    resident = in_rounds("benchmarks.memory", CONTESTANTS, options.rounds, [*shared, "--how", "resident"])
    return {c: {"allocated": counted[c][0]["allocated"], "resident": statistics.median(r["resident"] for r in resident[c])}
            for c in CONTESTANTS}


def row(task: str, result: dict[str, dict[str, float]]) -> list[str]:
    cells = [task]
    for what in ("allocated", "resident"):
        eager, ours = result["eager"][what], result["lazysched"][what]
        cells += [f"{eager / 2**20:.1f}", f"{ours / 2**20:.1f}", f"{ours / eager:.3f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", choices=list(TASKS), help="only this one")
    parser.add_argument("--how", choices=["counted", "resident"], default="counted", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, TASKS[options.task], options.steps, options.how)
        return
    results: dict[str, Any] = {task: measure(task, options) for task in ([options.task] if options.task else TASKS)}
    header = ["MiB at the peak", "eager allocated", "lazysched", "ratio", "eager resident", "lazysched", "ratio"]
    print(table(header, [row(task, result) for task, result in results.items()]))
    print("to reach: allocated at most 1 of eager")
    save("memory", results)


if __name__ == "__main__":
    main()
