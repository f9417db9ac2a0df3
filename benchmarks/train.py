"""Training steps of the zoo's models: eager, torch.compile, lazysched. Imports torch, `benchmarks.common`, `.loop`, `.profiling`.

    python -m benchmarks.train --models gpt2 bert --contestants eager compile+fused lazysched --steps 10

Milliseconds a step, cold and warm first step, peak memory, kernels and GPU time by kind, host time, and with ``--curve 200`` the
losses of as many new batches, which have to be eager's. Each contestant runs in processes of its own with caches of its own: the
first compiles all, the second (``--rounds 2``) finds what the first compiled. Without a GPU tiny models run, to try it out.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import fresh_caches, hand_in, in_process, save, spread, table
from benchmarks.loop import Loop, parts
from benchmarks.models import TASKS, sized
from benchmarks.plot import bars
from benchmarks.profiling import Kernel, by_kind, gpu_kernels, listing

CONTESTANTS = ("eager", "eager+fused", "compile", "compile+fused", "compile+opt", "reduce-overhead+fused", "reduce-overhead+opt",
               "max-autotune+fused", "max-autotune+opt", "lazysched")
Result = dict[str, Any]


def child(contestant: str, options: argparse.Namespace) -> None:
    """One process: first steps, curve, timed blocks, one profiled step."""
    name = options.models[0]
    loop = Loop(contestant, name, sized(name, options.tiny, batch=options.batch), options.dropout, options.resident)
    on_gpu = loop.physical == "cuda"
    first = [loop.seconds(1) for _ in range(3)]
    curve = loop.curve(options.curve) if options.curve else [loop.step().item()]
    loop.seconds(options.warm_up)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [loop.seconds(options.steps) / options.steps for _ in range(options.blocks)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    hand_in({
        "step_ms": [time * 1e3 for time in times],
        "first_steps_s": first,
        "host_ms": [time * 1e3 for time in loop.host_seconds()],
        "peak_bytes": peak,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "curve": curve,
        "kernels": kernels(loop),
        "counts": counts(loop),
    })


def kernels(loop: Loop) -> list[Kernel]:
    """Of one step on the GPU; nothing without one."""
    return gpu_kernels(lambda: loop.seconds(1)) if loop.physical == "cuda" else []


def counts(loop: Loop) -> dict[str, int]:
    """What lazysched did for one step; without a GPU it stands for kernels."""
    if loop.way != "lazysched":
        return {}
    import lazy_backend

    before = lazy_backend.stats()
    loop.seconds(1)
    after = lazy_backend.stats()
    return {name: after[name] - before[name] for name in ("recorded", "compiles", "nodes_run", "kernels_run", "flushes")}


def run(name: str, contestant: str, options: argparse.Namespace) -> Result:
    """All rounds of one contestant: medians of all timed blocks, first steps by round."""
    passed = {key: getattr(options, key) for key in ("steps", "blocks", "warm_up", "batch", "dropout")}
    given = [[f"--{key.replace('_', '-')}", str(value)] for key, value in passed.items() if value is not None]
    arguments = ["--models", name, *(word for pair in given for word in pair)]
    arguments += ["--tiny"] * options.tiny + ["--resident"] * options.resident
    runs = []
    with fresh_caches() as variables:
        for number in range(options.rounds):
            print(f"{name}: {contestant}, round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            curve = ["--curve", str(options.curve)] if number == 0 else []
            runs.append(in_process("benchmarks.train", contestant, [*arguments, *curve], variables, options.timeout))
    times = [time for one in runs for time in one["step_ms"]]
    return {**runs[-1], "curve": runs[0]["curve"],
            "step_ms": statistics.median(times), "spread": spread(times), "blocks_ms": times,
            "host_ms": statistics.median(time for one in runs for time in one["host_ms"]),
            "peak_bytes": max(one["peak_bytes"] for one in runs), "reserved_bytes": max(one["reserved_bytes"] for one in runs),
            "cold_s": sum(runs[0]["first_steps_s"]), "warm_s": sum(runs[-1]["first_steps_s"]) if len(runs) > 1 else None}


def run_all(name: str, options: argparse.Namespace) -> dict[str, Result]:
    """What each contestant gave; one that fails is told and left out."""
    results = {}
    for contestant in options.contestants:
        try:
            results[contestant] = run(name, contestant, options)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return results


def distance(curve: list[float], reference: list[float]) -> float:
    """The largest relative difference of two curves' means over ten steps."""
    means = [[statistics.fmean(one[i : i + 10]) for i in range(0, len(one), 10)] for one in (curve, reference)]
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(*means))


def show(name: str, results: dict[str, Result], options: argparse.Namespace) -> list[str]:
    """Prints the tables of one model. Returns what is wrong."""
    task, base = TASKS[name], next(iter(results.values()))
    items = task.items(sized(name, options.tiny, batch=options.batch))
    compiled = [r["step_ms"] for contestant, r in results.items() if parts(contestant)[0] not in ("eager", "lazysched")]
    best, wrong, rows = min(compiled, default=None), [], []
    for contestant, r in results.items():
        away = distance(r["curve"], base["curve"])
        if not away < options.tolerance:
            wrong.append(f"{name}: {contestant}'s losses are {away:.2%} away from {next(iter(results))}'s")
        busy = sum(time for _, _, time in r["kernels"]) / 1e3
        launched = sum(count for _, count, _ in r["kernels"]) or r["counts"].get("nodes_run", "")
        rows.append([contestant, f"{r['step_ms']:.2f}", f"{r['spread']:.1%}", f"{items / r['step_ms'] * 1e3:,.0f}",
                     f"{base['step_ms'] / r['step_ms']:.2f}", f"{best / r['step_ms']:.2f}" if best else "",
                     f"{r['host_ms']:.2f}", f"{busy:.2f}", launched, f"{r['peak_bytes'] / 2**30:.2f}", f"{r['cold_s']:.1f}",
                     "" if r["warm_s"] is None else f"{r['warm_s']:.1f}", f"{r['curve'][-1]:.4f}", f"{away:.2%}"])
    print(f"\n{name}: {task.precision}, {sized(name, options.tiny, batch=options.batch)}")
    print(table(["", "ms/step", "spread", f"{task.unit}/s", "x eager", "x best compile", "host ms", "GPU ms", "kernels",
                 "peak GiB", "cold s", "warm s", "loss", "off by"], rows))
    kinds = {contestant: by_kind(r["kernels"]) for contestant, r in results.items() if r["kernels"]}
    if kinds:
        every = sorted({kind for found in kinds.values() for kind in found})
        told = [[found.get(kind, [0, 0.0]) for found in kinds.values()] for kind in every]
        cells = [[kind, *(f"{count:.0f}: {time / 1e3:.2f}" for count, time in row)] for kind, row in zip(every, told)]
        print("\nkernels of one step, launches: ms\n" + table(["", *kinds], cells))
    return wrong


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS), metavar="MODEL", help=", ".join(TASKS))
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS,
                        help="the first is the reference; " + ", ".join(CONTESTANTS))
    parser.add_argument("--steps", type=int, default=10, help="of each timed block")
    parser.add_argument("--blocks", type=int, default=5, help="timed in each process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each contestant; the second finds warm caches")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--curve", type=int, default=0, help="steps on new batches before timing, whose losses are compared")
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative, of the curves' means over ten steps")
    parser.add_argument("--batch", type=int, help="another batch size")
    parser.add_argument("--dropout", type=float, help="another dropout; 0 for none")
    parser.add_argument("--fused", action="store_true", help="adds +fused to every contestant")
    parser.add_argument("--resident", action="store_true", help="batches lie on the device; else each is copied there")
    parser.add_argument("--tiny", action="store_true", default=not on_gpu, help="tiny models; without a GPU always")
    parser.add_argument("--profile", type=Path, help="writes each contestant's GPU kernels of one step here, the longest first")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one process")
    parser.add_argument("--save", metavar="NAME", default="train", help="of the results' file; tiny models are not saved")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    extra = "+fused" if options.fused else ""
    options.contestants = [one if one.endswith(extra) else one + extra for one in options.contestants]
    for contestant in options.contestants:
        parts(contestant)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.child:
        child(options.child, options)
        return 0
    found, wrong, profiles = {}, [], []
    for name in options.models:
        found[name] = run_all(name, options)
        if found[name]:
            wrong += show(name, found[name], options)
            profiles += [listing(f"{name}, {contestant}", r["kernels"]) for contestant, r in found[name].items() if r["kernels"]]
        if options.profile:  # after each model, so that what is there is kept if a later one is cut short
            options.profile.write_text("\n\n".join(profiles) + "\n")
    if not options.tiny:
        kept = {key: value for key, value in vars(options).items() if key not in ("child", "profile")}
        path = save(options.save, {"options": kept, "models": found})
        bars(path.with_suffix(".png"), "training step, ms", {name: {c: r["step_ms"] for c, r in one.items()}
                                                             for name, one in found.items()})
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
