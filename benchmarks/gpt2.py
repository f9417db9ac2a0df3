"""Training GPT-2 small under autocast: eager, torch.compile, lazysched. Imports torch and `benchmarks` parts below it.

    python -m benchmarks.gpt2 --compile

Tokens/s, peak memory, first step, kernels per step by kind; each contestant in processes of its own, in rounds. Without a
GPU a tiny model runs instead, to try the benchmark out, and steps of the executable stand for kernels.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from typing import Any

import torch

from benchmarks.common import hand_in, in_rounds, save, table
from benchmarks.profiling import by_kind, gpu_kernels, peak_on_gpu
from benchmarks.training import CONTESTANTS, Task, Trainer


def executable_steps(trainer: Trainer) -> dict[str, list[float]]:
    """Of one lazysched step without a GPU: steps of the executables and microseconds of the whole."""
    import lazy_backend

    before = lazy_backend.stats()["nodes_run"]
    microseconds = trainer.seconds(1) * 1e6
    return {"executable steps": [lazy_backend.stats()["nodes_run"] - before, microseconds]}


def child(contestant: str, options: argparse.Namespace) -> None:
    task = Task(options.size, options.batch, options.context, options.vocabulary, bf16=True, fused=options.fused)
    trainer = Trainer(contestant, task)
    on_gpu = trainer.physical == "cuda"
    first = trainer.seconds(1)
    trainer.seconds(options.warm_up)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [trainer.seconds(options.steps) / options.steps for _ in range(3)]
    peak = peak_on_gpu() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loss = trainer.step().item()  # before the profiled step, which not every contestant makes
    tokens = options.batch * trainer.config.context
    launched: dict[str, list[float]] = {}
    if on_gpu:
        launched = by_kind(gpu_kernels(lambda: trainer.seconds(1)))
    elif contestant == "lazysched":
        launched = executable_steps(trainer)
    hand_in({
        "tokens_per_second": tokens / statistics.median(times),
        "step_ms": statistics.median(times) * 1e3,
        "first_step_s": first,
        "peak_bytes": peak,
        "loss": loss,
        "kernels": launched,
    })


def show(summary: dict[str, dict[str, Any]]) -> None:
    """One row per contestant, then kernels per step."""
    base = summary["eager"]
    rows = []
    for name, r in summary.items():
        faster = r["tokens_per_second"] / base["tokens_per_second"]
        speed = [f"{r['step_ms']:.1f}", f"{r['tokens_per_second']:,.0f}", f"{faster:.2f}"]
        peak = [f"{r['peak_bytes'] / 2**30:.2f}", f"{r['peak_bytes'] / base['peak_bytes']:.2f}"]
        rows.append([name, *speed, *peak, f"{r['first_step_s']:.1f}", f"{r['loss']:.4f}"])
    print(table(["", "ms/step", "tokens/s", "x eager", "peak GiB", "x eager", "first step s", "loss"], rows))
    kinds = list(dict.fromkeys(row for r in summary.values() for row in r["kernels"]))
    if kinds:
        cell = {name: {k: r["kernels"].get(k, [0, 0.0]) for k in kinds} for name, r in summary.items()}
        rows = [[k, *(f"{cell[n][k][0]:.0f} ({cell[n][k][1] / 1e3:.2f} ms)" for n in summary)] for k in kinds]
        total = [[sum(cell[n][k][i] for k in kinds) for i in (0, 1)] for n in summary]
        rows.append(["all", *(f"{count:.0f} ({time / 1e3:.2f} ms)" for count, time in total)])
        print("\nper step\n" + table(["", *summary], rows))


def summarise(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Per contestant the round of median speed. Raises RuntimeError where losses differ by more than bfloat16 explains."""
    middle = {}
    for name, runs in rounds.items():
        middle[name] = sorted(runs, key=lambda run: run["tokens_per_second"])[len(runs) // 2]
    for name, run in middle.items():
        if abs(run["loss"] - middle["eager"]["loss"]) > 0.03 * abs(middle["eager"]["loss"]) + 0.01:
            raise RuntimeError(f"{name} ends at loss {run['loss']}, eager at {middle['eager']['loss']}")
    return middle


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="run torch.compile too")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) for every contestant")
    parser.add_argument("--size", default="gpt2" if on_gpu else "tiny")
    parser.add_argument("--batch", type=int, default=16 if on_gpu else 4)
    parser.add_argument("--context", type=int, default=0, help="0: the size's own")
    parser.add_argument("--vocabulary", type=int, default=50304 if on_gpu else 256)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of each of three timed parts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    contestants = [name for name in CONTESTANTS if name != "compile" or options.compile]
    passed = ["size", "batch", "context", "vocabulary", "warm_up", "steps"]
    arguments = [word for name in passed for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    arguments += ["--fused"] * options.fused
    summary = summarise(in_rounds("benchmarks.gpt2", contestants, options.rounds, arguments))
    show(summary)
    if on_gpu:  # a dry run says nothing worth keeping
        kept = {name: getattr(options, name) for name in [*passed, "fused"]}
        save(f"gpt2-vocabulary{options.vocabulary}", {"options": kept, "contestants": summary})


if __name__ == "__main__":
    main()
