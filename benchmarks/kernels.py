"""How near memory-bound kernels come to the GPU's copy bandwidth: eager, torch.compile, lazysched. Imports torch,
`benchmarks.common`, `benchmarks.kernel_cases` and, for lazysched, lazy_backend.

    python -m benchmarks.kernels [--dtypes bf16 fp32] [--only softmax] [--contestants eager compile lazysched] [--largest]

Each contestant runs in its own process. Kernels are compiled before, by several processes that fill the caches on disk. What a
program takes is measured twice: on the GPU alone, with its launches queued behind a pause, and by the clock on the wall. Without
a GPU only small shapes run, to try it out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, Budget, add_limits, hand_in, in_process, machine, save, table
from benchmarks.kernel_cases import CASES, Case, Sizes, bytes_moved
from benchmarks.profiling import gpu_kernels
from benchmarks.timing import copy_rate, gpu_seconds, wall_seconds
from ir_nodes import settings

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODES = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
CACHED = 200 << 20  # bytes of inputs and results that no cache holds
COMPILERS = 6  # processes that compile at a time
SAMPLES = 1 << 16
NOT_LARGE = ("small", "gpt", "odd")
PHYSICAL = "cuda" if torch.cuda.is_available() else "cpu"


def make_inputs(case: Case, size: Sizes, dtype: torch.dtype, device: str, seed: int) -> list[Any]:
    where = PHYSICAL
    generator = torch.Generator(where).manual_seed(seed)

    def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, device=where, dtype=torch.float32).normal_(generator=generator).to(dtype).to(device)

    def index(bound: int, *shape: int) -> torch.Tensor:
        return torch.randint(bound, shape, device=where, generator=generator).to(device)

    return [tensor.requires_grad_() if case.trains and not number else tensor
            for number, tensor in enumerate(case.inputs(size, new, index))]


def calls(case: Case, program: Callable[..., Any], barrier: Callable[[], None]) -> Callable[..., list[torch.Tensor]]:
    """A function that runs the program, and its gradient where that is part of the case."""

    def run(*inputs: Any) -> list[torch.Tensor]:
        out = program(*inputs)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if case.trains:
            outs += torch.autograd.grad(outs[0], inputs[0])
            outs[0] = outs[0].detach()
        barrier()
        return outs

    return run


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements spread over the tensor, float64 on the CPU."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLES)].cpu().double()


def error(case: Case, run: Callable[..., list[torch.Tensor]], inputs: Sequence[Any]) -> float:
    """The worst result's distance from the same program in float64, relative to its norm; NaN where it draws."""
    if case.random:
        return math.nan
    exact = [x.detach().to(PHYSICAL) if isinstance(x, torch.Tensor) and x.device.type == "lazysched" else x for x in inputs]
    exact = [x.detach().double() if torch.is_tensor(x) and x.is_floating_point() else x for x in exact]
    if case.trains:
        exact[0].requires_grad_()
    wanted = calls(case, reference(case), lambda: None)(*exact)
    worst = 0.0
    for made, right in zip(run(*inputs), wanted):
        left, right = sample(made), sample(right)
        worst = max(worst, float((left - right).norm() / right.norm().clamp_min(1e-30)))
    return worst


def reference(case: Case) -> Callable[..., Any]:
    """The program on float64, which does not go through float32."""
    if case.name.startswith("cross entropy"):
        return torch.nn.functional.cross_entropy
    if case.name == "cast chain":
        return lambda x: (x * 0.5) + 1.0
    return case.program


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Case, Sizes, torch.dtype]]:
    """Every (key, case, sizes, dtype) that is asked for."""
    for name in options.dtypes:
        for case in CASES:
            for label, size in case.shapes.items():
                asked = label == "small" if options.tiny else not (options.largest and label in NOT_LARGE)
                if asked and any(part in case.name for part in options.only.split("|")):
                    yield f"{case.name}/{label}/{name}", case, size, DTYPES[name]


def child(contestant: str, options: argparse.Namespace) -> None:
    """Measures all cases and hands in after each, or with ``--part`` only compiles some of them."""
    barrier: Callable[[], None] = lambda: None  # noqa: E731
    device = PHYSICAL
    if contestant == "lazysched":
        import lazy_backend

        barrier, device = lazy_backend.mark_step, "lazysched"
    part, parts = (int(number) for number in options.part.split("/")) if options.part else (0, 0)
    results: dict[str, Any] = {}
    for number, (key, case, size, dtype) in enumerate(chosen(options)):
        if parts and number % parts != part:
            continue
        program = case.program
        if contestant in MODES:
            torch._dynamo.reset()
            program = torch.compile(program, mode=MODES[contestant], dynamic=False)
        run = calls(case, program, barrier)
        try:
            if parts:
                run(*make_inputs(case, size, dtype, device, 0))
            else:
                results[key] = measured(case, run, size, dtype, device)
        except Exception as failure:  # one contestant's failure must not cost the table
            results[key] = {"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}
        hand_in(results)
    hand_in(results)


def measured(case: Case, run: Callable[..., list[torch.Tensor]], size: Sizes, dtype: torch.dtype, device: str) -> dict[str, Any]:
    first = make_inputs(case, size, dtype, device, 0)
    moved = bytes_moved(case, first)
    wrong = error(case, run, first)
    sets = [first] + [make_inputs(case, size, dtype, device, seed) for seed in range(1, max(1, min(8, int(CACHED / moved))))]
    kept: list[Any] = []

    def call(number: int) -> None:
        kept[:] = [run(*sets[number % len(sets)])]

    kernels = count_kernels(lambda: call(0))
    for number in range(max(3, len(sets))):
        call(number)
    count = 20 if moved < CACHED else 10
    wall = statistics.median(wall_seconds(call, count) for _ in range(3))
    gpu = statistics.median(gpu_seconds(call, count, wall) for _ in range(3))
    return {"gpu": gpu, "wall": wall, "bytes": moved, "error": wrong, "kernels": kernels}


def count_kernels(run: Callable[[], Any]) -> int | None:
    """Of one call on a GPU, copies and fills among them."""
    run()
    return sum(count for _, count, _ in gpu_kernels(run)) if PHYSICAL == "cuda" else None


def compile_all(contestants: Sequence[str], arguments: Sequence[str], seconds: float) -> None:
    """Fill the caches on disk, in several processes, which stop after so many seconds."""
    running = []
    for contestant in contestants:
        many = COMPILERS if contestant in MODES else 2 if contestant == "lazysched" else 0
        for part in range(many):
            command = [sys.executable, "-m", "benchmarks.kernels", "--child", contestant, "--part", f"{part}/{many}", *arguments]
            running.append(subprocess.Popen(command, cwd=ROOT, env=settings.child_environment(), stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL))
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, min(end - time.monotonic(), 1e6)))
        except subprocess.TimeoutExpired:
            process.kill()


def show(results: dict[str, dict[str, Any]], bandwidth: float) -> str:
    """Share of the floor that each contestant reaches on the GPU, microseconds by the clock, kernels, and lazysched's error."""
    names = list(results)
    rows = []
    for key in dict.fromkeys(key for found in results.values() for key in found):
        known = {name: results[name].get(key, {}) for name in names}
        floor = next((one["bytes"] / bandwidth for one in known.values() if "bytes" in one), math.nan)
        cells: list[object] = [key, f"{floor * 1e6:.1f}"]
        cells += [f"{floor / one['gpu']:.2f}" if "gpu" in one else "failed" if "failed" in one else "" for one in known.values()]
        cells += [f"{one['wall'] * 1e6:.1f}" if "wall" in one else "-" for one in known.values()]
        cells.append(" ".join(str(one.get("kernels") or "-") for one in known.values()))
        best = min((one["gpu"] for name, one in known.items() if "gpu" in one and name != "lazysched"), default=math.nan)
        mine = known.get("lazysched", {})
        cells.append(f"{best / mine['gpu']:.2f}" if "gpu" in mine else "-")
        cells.append(f"{mine['error']:.1e}" if "error" in mine else mine.get("failed", "-")[:60])
        rows.append(cells)
    header = ["case", "floor us", *names, *(f"{name} us" for name in names), "kernels", "x best other", "error"]
    return table(header, rows)


def draw(path: Path, results: dict[str, dict[str, Any]], bandwidth: float) -> None:
    """One chart: the share of copy bandwidth per kernel and contestant, for the shapes beyond 64 MiB."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = [key for key, one in next(iter(results.values())).items() if one.get("bytes", 0) > 64 << 20]
    figure, axis = pyplot.subplots(figsize=(max(8, 0.42 * len(keys)), 5))
    colours = {"eager": "#7a8ca3", "compile": "#edae49", "max-autotune": "#66a182", "lazysched": "#d1495b"}
    for place, name in enumerate(results):
        shares = [results[name].get(key, {}) for key in keys]
        heights = [one["bytes"] / bandwidth / one["gpu"] if "gpu" in one else 0 for one in shares]
        spots = [number + (place + 0.5) / len(results) * 0.8 - 0.4 for number in range(len(keys))]
        axis.bar(spots, heights, width=0.8 / len(results), label=name, color=colours.get(name))
    axis.margins(x=0.01)
    axis.axhline(0.9, color="black", linewidth=0.6, linestyle=":")
    axis.set_xticks(range(len(keys)), keys, rotation=90, fontsize=7)
    axis.set_ylabel("share of copy bandwidth")
    axis.legend(ncol=len(results), fontsize=8)
    told = machine()
    versions = f"torch {told['torch']}, triton {told['triton']}, {told['commit']}"
    axis.set_title(f"Memory-bound kernels: {told['gpu']}, {versions}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"saved {path}")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--only", default="", help="parts of the cases' names, with | between")
    known, usual = ("eager", *MODES, "lazysched"), ["eager", "compile", "lazysched"]
    parser.add_argument("--contestants", nargs="+", choices=known, default=usual)
    parser.add_argument("--largest", action="store_true", help="only the shapes beyond the caches")
    parser.add_argument("--tiny", action="store_true", default=PHYSICAL == "cpu", help="only small shapes; without a GPU always")
    parser.add_argument("--save", metavar="NAME", default="kernels", help="of the results' file; small shapes are not saved")
    add_limits(parser)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child:
        child(options.child, options)
        return
    budget, start = Budget(options.budget), time.perf_counter()
    arguments = ["--dtypes", *options.dtypes, "--only", options.only]
    arguments += ["--largest"] * options.largest + ["--tiny"] * options.tiny
    compile_all(options.contestants, arguments, budget.left(math.inf) / 2)
    compiled = time.perf_counter() - start
    bandwidth = copy_rate()
    print(f"compiled in {compiled:.0f} s; copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    results: dict[str, Any] = {}
    path = None
    for place, name in enumerate(options.contestants):
        if budget.refuses(name):
            continue
        try:
            seconds = share(budget, len(options.contestants) - place)
            results[name] = in_process("benchmarks.kernels", name, arguments, None, seconds)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if not options.tiny or options.output:
            kept = {"copy": bandwidth, "dtypes": options.dtypes, "compiled_s": compiled, "cases": results}
            path = save(options.save, kept, options.output, quiet=True)
    print(show(results, bandwidth))
    if path and not options.tiny:
        draw(path.with_suffix(".png"), results, bandwidth)


def share(budget: Budget, contestants: int) -> float | None:
    """Seconds for the next of so many contestants; None: as many as it likes."""
    left = budget.left(math.inf)
    return None if left == math.inf else left / contestants


if __name__ == "__main__":
    main()
