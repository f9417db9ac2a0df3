"""Whole training programs, a step at a time, on all contestants. Imports torch and `benchmarks` parts.

    python -m benchmarks.programs
    python -m benchmarks.programs --programs soft_actor --contestants lazysched+replay lazysched+replay+without_product_bias

Contestants: eager; compile: the step as a whole given to torch.compile, which takes what it can of it; lazysched: a barrier
behind each step; lazysched+replay: the step wrapped in `lazy_backend.replayed`, too. Each runs in a process and with caches of
its own. The losses of the first six steps have to be eager mode's. Without a GPU small programs run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks import reading_programs  # noqa: F401  (its programs join the table)
from benchmarks.common import Budget, add_limits, fresh_caches, hand_in, in_process, save, spread, table
from benchmarks.loop import parts, settings_of
from benchmarks.profiling import gpu_kernels, peak_on_gpu
from benchmarks.timing import wall_seconds
from benchmarks.training_programs import PROGRAMS, Step

WAYS = ("eager", "compile", "lazysched")
CONTESTANTS = (*WAYS, "lazysched+replay")
FIRST, MOST = 6, 20
"""Steps whose losses are compared, and steps of a timed block at most."""
Result = dict[str, Any]


def child(contestant: str, options: argparse.Namespace) -> None:
    """One process: one program."""
    ours, on_gpu = parts(contestant)[0] == "lazysched", torch.cuda.is_available()
    if ours:
        import lazy_backend  # noqa: F401  (registers the device, in this contestant only)
    torch.manual_seed(0)
    step = made(contestant, PROGRAMS[options.programs[0]]("lazysched" if ours else "cuda" if on_gpu else "cpu", not options.tiny))

    def block(steps: int) -> float:
        return 1e3 * wall_seconds(lambda number: step(), steps, ours)

    start = time.perf_counter()
    losses = [float(step()) for _ in range(FIRST)]
    first = time.perf_counter() - start
    block(3)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()  # compiling and measuring kernels takes memory of its own
    times = [block(max(2, min(MOST, int(150 / block(1))))) for _ in range(options.blocks)]
    kernels = gpu_kernels(lambda: block(1)) if on_gpu else []
    hand_in({"ms": statistics.median(times), "spread": spread(times), "losses": losses, "first_s": first, "kernels": kernels,
             "peak_bytes": peak_on_gpu() if on_gpu else 0, "refused": refusals() if ours else ""})


def made(contestant: str, step: Step) -> Step:
    """``step`` as the contestant runs it."""
    way, extras = parts(contestant)
    if way == "compile":
        return torch.compile(step)  # type: ignore[no-any-return, unused-ignore]
    if way == "eager":
        return step
    import lazy_backend

    run = lazy_backend.replayed(step) if "replay" in extras else step

    def marked() -> torch.Tensor:
        loss = run()
        lazy_backend.mark_step()
        return loss

    return marked


def refusals() -> str:
    """Why a step was not replayed."""
    return "; ".join(name for name in torch._lazy.metrics.counter_names() if name.startswith("ReplayRefused"))


def show(found: dict[str, dict[str, Result]], tolerance: float) -> list[str]:
    """Prints the table. Returns what is wrong."""
    rows, wrong = [], []
    for name, contestants in found.items():
        eager = contestants.get("eager")
        for contestant, r in contestants.items():
            off = max(abs(a - b) / (abs(b) + 1e-6) for a, b in zip(r["losses"], eager["losses"])) if eager else 0.0
            if not off < tolerance:
                wrong.append(f"{name}: {contestant}'s losses are {off:.2%} away from eager mode's")
            faster = f"{eager['ms'] / r['ms']:.2f}" if eager else ""
            rows.append([name, contestant, f"{r['ms']:.3f}", f"{r['spread']:.0%}", faster,
                         f"{sum(us for *_, us in r['kernels']) / 1e3:.3f}", sum(count for _, count, _ in r["kernels"]),
                         f"{r['peak_bytes'] / 2**30:.2f}", f"{r['first_s']:.1f}", f"{off:.1e}", r["refused"]])
    print(table(["program", "", "ms/step", "spread", "x eager", "GPU ms", "kernels", "peak GiB", "first s", "off by", ""], rows))
    return wrong


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS),
                        help=", ".join(CONTESTANTS) + ", and +without_OPTIMISATION for lazysched")
    parser.add_argument("--blocks", type=int, default=3, help="timed in each process")
    parser.add_argument("--tolerance", type=float, default=0.02, help="relative, of the first losses")
    parser.add_argument("--tiny", action="store_true", default=not on_gpu, help="small programs; without a GPU always")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one process")
    add_limits(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for contestant in options.contestants:
        way, extras = parts(contestant)
        if way not in WAYS or extras & {"opt", "fused", "cleared"}:
            parser.error(f"{contestant}: programs bring their optimizers; choose of {', '.join(WAYS)}, the last with +replay, "
                         "+tuned, +attention or +without_OPTIMISATION")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.child:
        child(options.child, options)
        return 0
    budget = Budget(options.budget)
    found: dict[str, dict[str, Result]] = {}
    for name in options.programs:
        given = ["--programs", name, "--blocks", str(options.blocks), *["--tiny"] * options.tiny]
        for contestant in options.contestants:
            if budget.refuses(f"{name}: {contestant}"):
                continue
            print(f"{name}: {contestant}", file=sys.stderr, flush=True)
            with fresh_caches() as variables:
                try:
                    result = in_process("benchmarks.programs", contestant, given, variables | settings_of(contestant),
                                        budget.left(options.timeout))
                except RuntimeError as error:
                    print(f"{name}: {contestant} failed: {error}", file=sys.stderr, flush=True)
                    continue
            found.setdefault(name, {})[contestant] = result
        if not options.tiny:
            save("programs", found, options.output, quiet=True)
    wrong = show(found, options.tolerance)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
