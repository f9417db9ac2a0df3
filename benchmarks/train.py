"""Training steps of the zoo's models: eager, torch.compile, lazysched. Imports torch, `benchmarks.common`, `.loop`, `.profiling`.

    python -m benchmarks.train --models gpt2 bert --contestants eager compile+fused lazysched --steps 10

Milliseconds a step, also where the loss is read at every step, cold and warm first step, peak memory, kernels and GPU time by
kind, host time; with ``--curves 200`` the losses of as many new batches, which have to be eager's; with ``--floors`` what a step
would take at best, and where the rest goes. ``--preset launch``: the MLP of 20 layers against CUDA graphs. Each contestant runs
in processes of its own with caches of its own: the first compiles all, the second (``--rounds 2``) finds what the first compiled.
Without a GPU tiny models run.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Budget, add_limits, fresh_caches, hand_in, in_process, save, spread, table
from benchmarks.floors import beyond, told
from benchmarks.floors import floor as measured_floor
from benchmarks.loop import Loop, parts, settings_of
from benchmarks.models import TASKS, sized
from benchmarks.plot import draw
from benchmarks.profiling import Kernel, by_kind, gpu_kernels, listing, peak_on_gpu

READ = 8  # steps of a block whose losses are read
SETTLE = 72  # such steps that are not timed: a loop that begins to read is compiled anew for that
CONTESTANTS = ("eager", "eager+fused", "compile", "compile+fused", "compile+opt", "reduce-overhead+fused", "reduce-overhead+opt",
               "max-autotune+fused", "max-autotune+opt", "lazysched")
PRESETS: dict[str, dict[str, Any]] = {
    "launch": {  # what launching costs, against CUDA graphs, with and without the optimizer's own fused kernel
        "models": ["mlp"], "steps": 100, "blocks": 5, "save": "launch",
        "contestants": ["eager", "eager+fused", "compile", "compile+fused", "compile+opt", "reduce-overhead",
                        "reduce-overhead+fused", "reduce-overhead+opt", "lazysched", "lazysched+fused", "lazysched+replay",
                        "lazysched+fused+replay"]},
}  # fmt: skip
Result = dict[str, Any]


def child(contestant: str, options: argparse.Namespace) -> None:
    """One process: first steps, curve, timed blocks, one profiled step; or what a step costs at the least."""
    name = options.models[0]
    way = "eager" if contestant == "floor" else contestant
    loop = Loop(way, name, sized(name, options.tiny, batch=options.batch), options.dropout, options.resident)
    if contestant == "floor":
        loop.seconds(2)
        hand_in(measured_floor(loop.step, loop.model.parameters(), loop.task.optimizer))
        return
    on_gpu = loop.physical == "cuda"
    first = [loop.seconds(1) for _ in range(3)]
    curve = loop.curve(options.curve) if options.curve else [loop.step().item()]
    loop.seconds(options.warm_up)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [loop.seconds(options.steps) / options.steps for _ in range(options.blocks)]
    peak = peak_on_gpu() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loop.seconds(SETTLE, read=True)
    reading = [loop.seconds(READ, read=True) / READ for _ in range(options.blocks)]
    loop.seconds(options.warm_up)
    hand_in({
        "step_ms": [time * 1e3 for time in times],
        "reading_ms": [time * 1e3 for time in reading],
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


def run(name: str, contestant: str, options: argparse.Namespace, budget: Budget) -> Result:
    """All rounds of one contestant: medians of all timed blocks, first steps by round. Raises RuntimeError where none ended."""
    runs: list[Result] = []
    with fresh_caches() as variables:
        for number in range(options.rounds):
            if number and budget.refuses(f"{name}: {contestant}, round {number + 1}"):
                break
            print(f"{name}: {contestant}, round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            curve = ["--curve", str(options.curve)] if number == 0 else []
            try:
                runs.append(in_process("benchmarks.train", contestant, [*passed_on(name, options), *curve],
                                       variables | settings_of(contestant),
                                       budget.left(options.timeout)))
            except RuntimeError as error:
                if not runs:
                    raise
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    times = [time for one in runs for time in one["step_ms"]]
    return {**runs[-1], "curve": runs[0]["curve"],
            "reading_ms": statistics.median(time for one in runs for time in one["reading_ms"]),
            "step_ms": statistics.median(times), "spread": spread(times), "blocks_ms": times,
            "host_ms": statistics.median(time for one in runs for time in one["host_ms"]),
            "peak_bytes": max(one["peak_bytes"] for one in runs), "reserved_bytes": max(one["reserved_bytes"] for one in runs),
            "cold_s": sum(runs[0]["first_steps_s"]), "warm_s": sum(runs[-1]["first_steps_s"]) if len(runs) > 1 else None}


def passed_on(name: str, options: argparse.Namespace) -> list[str]:
    """The command line of a child."""
    passed = {key: getattr(options, key) for key in ("steps", "blocks", "warm_up", "batch", "dropout")}
    given = [[f"--{key.replace('_', '-')}", str(value)] for key, value in passed.items() if value is not None]
    arguments = ["--models", name, *(word for pair in given for word in pair)]
    return arguments + ["--tiny"] * options.tiny + ["--resident"] * options.resident


def run_all(name: str, options: argparse.Namespace, budget: Budget, results: dict[str, Result], keep: Callable[[], Any]) -> None:
    """Puts what each contestant gave into ``results``; one that fails is told and left out. ``keep`` saves what is there."""
    for contestant in options.contestants:
        if budget.refuses(f"{name}: {contestant}"):
            return
        try:
            results[contestant] = run(name, contestant, options, budget)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        keep()


def floor_of(name: str, options: argparse.Namespace, budget: Budget) -> Result | None:
    """See `benchmarks.floors`; None where it is not asked for or fails."""
    if not options.floors or budget.refuses(f"{name}: floor"):
        return None
    try:
        return in_process("benchmarks.train", "floor", passed_on(name, options), None, budget.left(options.timeout))  # type: ignore[no-any-return]
    except RuntimeError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return None


def distance(curve: list[float], reference: list[float]) -> tuple[float, float]:
    """The largest and the mean relative difference of two curves' means over ten steps."""
    means = [[statistics.fmean(one[i : i + 10]) for i in range(0, len(one), 10)] for one in (curve, reference)]
    away = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(*means)]
    return max(away), statistics.fmean(away)


def show(name: str, results: dict[str, Result], floor: Result | None, options: argparse.Namespace) -> list[str]:
    """Prints the tables of one model. Returns what is wrong."""
    task, base = TASKS[name], next(iter(results.values()))
    items = task.items(sized(name, options.tiny, batch=options.batch))
    compiled = [r["step_ms"] for contestant, r in results.items() if parts(contestant)[0] not in ("eager", "lazysched")]
    best, wrong, rows = min(compiled, default=None), [], []
    for contestant, r in results.items():
        most, mean = distance(r["curve"], base["curve"])
        if not most < options.tolerance:
            wrong.append(f"{name}: {contestant}'s losses are {most:.2%} away from {next(iter(results))}'s")
        busy = sum(time for _, _, time in r["kernels"]) / 1e3
        launched = sum(count for _, count, _ in r["kernels"]) or r["counts"].get("nodes_run", "")
        rows.append([contestant, f"{r['step_ms']:.2f}", f"{r['spread']:.1%}", f"{items / r['step_ms'] * 1e3:,.0f}",
                     f"{base['step_ms'] / r['step_ms']:.2f}", f"{best / r['step_ms']:.2f}" if best else "",
                     f"{r['step_ms'] / floor['ms']['all']:.2f}" if floor else "", f"{r['reading_ms']:.2f}",
                     f"{r['host_ms']:.2f}", f"{busy:.2f}", launched, f"{r['peak_bytes'] / 2**30:.2f}", f"{r['cold_s']:.1f}",
                     "" if r["warm_s"] is None else f"{r['warm_s']:.1f}", f"{r['curve'][-1]:.4f}", f"{most:.2%}", f"{mean:.3%}"])
    print(f"\n{name}: {task.precision}, {sized(name, options.tiny, batch=options.batch)}")
    print(table(["", "ms/step", "spread", f"{task.unit}/s", "x eager", "x best compile", "x floor", "reading ms", "host ms",
                 "GPU ms", "kernels", "peak GiB", "cold s", "warm s", "loss", "off by", "on average"], rows))
    if floor:
        print(told(floor))
    show_kernels({contestant: r for contestant, r in results.items() if r["kernels"]}, floor)
    return wrong


def show_kernels(results: dict[str, Result], floor: Result | None) -> None:
    """Launches and time by kind of kernel, and where the time beyond the floor goes."""
    kinds = {contestant: by_kind(r["kernels"]) for contestant, r in results.items()}
    if not kinds:
        return
    every = sorted({kind for found in kinds.values() for kind in found})
    rows = [[found.get(kind, [0, 0.0]) for found in kinds.values()] for kind in every]
    cells = [[kind, *(f"{count:.0f}: {time / 1e3:.2f}" for count, time in row)] for kind, row in zip(every, rows)]
    print("\nkernels of one step, launches: ms\n" + table(["", *kinds], cells))
    if floor:
        over = {contestant: beyond(found, results[contestant]["step_ms"], floor) for contestant, found in kinds.items()}
        cells = [[kind, *(f"{row[kind]:.2f}" for row in over.values())] for kind in next(iter(over.values()))]
        print("\nbeyond the floor, ms\n" + table(["", *over], cells))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS), metavar="MODEL", help=", ".join(TASKS))
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS,
                        help="the first is the reference; " + ", ".join(CONTESTANTS))
    parser.add_argument("--steps", type=int, default=40,
                        help="of each timed block; a lazy device begins to compute when it has recorded the first")
    parser.add_argument("--blocks", type=int, default=5, help="timed in each process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each contestant; the second finds warm caches")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--curves", "--curve", dest="curve", type=int, default=0,
                        help="steps on new batches before timing, whose losses are compared")
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative, of the curves' means over ten steps")
    parser.add_argument("--floors", action="store_true", help="also times each model's library calls alone")
    parser.add_argument("--preset", choices=PRESETS, help="models, contestants and steps of a question")
    parser.add_argument("--batch", type=int, help="another batch size")
    parser.add_argument("--dropout", type=float, help="another dropout; 0 for none")
    parser.add_argument("--fused", action="store_true", help="adds +fused to every contestant")
    parser.add_argument("--resident", action="store_true", help="batches lie on the device; else each is copied there")
    parser.add_argument("--tiny", action="store_true", default=not on_gpu, help="tiny models; without a GPU always")
    parser.add_argument("--profile", type=Path, help="writes each contestant's GPU kernels of one step here, the longest first")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one process")
    parser.add_argument("--save", metavar="NAME", default="train", help="of the results' file; tiny models are not saved")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    add_limits(parser)
    preset = parser.parse_known_args(arguments)[0].preset
    parser.set_defaults(**PRESETS.get(preset, {}))
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
    budget, wrong, profiles = Budget(options.budget), [], []
    found: dict[str, dict[str, Result]] = {}
    floors: dict[str, Result | None] = {}

    def keep(quiet: bool = True) -> Path | None:
        if options.tiny and not options.output:
            return None
        return save(options.save, summary(options, found, floors), options.output, quiet)

    for name in options.models:
        found[name] = {}
        floors[name] = floor_of(name, options, budget)
        run_all(name, options, budget, found[name], keep)
        if found[name]:
            wrong += show(name, found[name], floors[name], options)
            profiles += [listing(f"{name}, {contestant}", r["kernels"]) for contestant, r in found[name].items() if r["kernels"]]
        if options.profile:  # after each model, so that what is there is kept if a later one is cut short
            options.profile.write_text("\n\n".join(profiles) + "\n")
    path = keep(quiet=False)
    if path:
        draw(path, summary(options, found, floors))
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


def summary(options: argparse.Namespace, found: dict[str, dict[str, Result]], floors: dict[str, Result | None]) -> Result:
    """What is saved, charts included."""
    kept = {key: value for key, value in vars(options).items() if key not in ("child", "profile")}
    times = {name: {c: r["step_ms"] for c, r in one.items()} for name, one in found.items()}
    for name, floor in floors.items():
        times[name] |= {"floor": floor["ms"]["all"]} if floor else {}
    curves = {name: {c: r["curve"] for c, r in one.items()} for name, one in found.items()}
    return {"options": kept, "models": found, "floors": floors, "bars": {"training step, ms": times},
            "lines": {f"loss of {options.curve} new batches": curves} if options.curve else {}}


if __name__ == "__main__":
    sys.exit(main())
