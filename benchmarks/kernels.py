"""How near memory-bound kernels come to the GPU's copy bandwidth: eager, torch.compile, lazysched. Imports torch,
`benchmarks.common`, `benchmarks.kernel_cases` and, for lazysched, lazy_backend.

    python -m benchmarks.kernels [--dtype bf16] [--only softmax] [--contestants eager,compile,lazysched] [--largest]

Each contestant runs in its own process. Kernels are compiled before, by several processes that fill the caches on disk. What a
program takes is measured twice: on the GPU alone, with its launches queued behind a pause, and by the clock on the wall.
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

from benchmarks.common import ROOT, hand_in, in_process, machine, save, table
from benchmarks.kernel_cases import CASES, Case, Sizes, bytes_moved
from ir_nodes import settings

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODES = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
CACHED = 200 << 20  # bytes of inputs and results that no cache holds
COMPILERS = 6  # processes that compile at a time
SAMPLES = 1 << 16


def make_inputs(case: Case, size: Sizes, dtype: torch.dtype, device: str, seed: int) -> list[Any]:
    generator = torch.Generator("cpu" if device == "cpu" else "cuda").manual_seed(seed)
    where = "cpu" if device == "cpu" else "cuda"

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
    exact = [x.detach().to("cuda" if torch.cuda.is_available() else "cpu") if isinstance(x, torch.Tensor) else x for x in inputs]
    exact = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in exact]
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


def gpu_seconds(run: Callable[[int], Any], count: int, host: float = 1e-4) -> float:
    """Seconds of one call on the GPU, whose launches were all queued before the first one began. ``host``: what a call takes by
    the clock, at least."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9 * min(1.5 * host * count, 0.1)))
    begin.record()
    for number in range(count):
        run(number)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def wall_seconds(run: Callable[[int], Any], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(count):
        run(number)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Case, Sizes, torch.dtype]]:
    """Every (key, case, sizes, dtype) that is asked for."""
    for name in options.dtype.split(","):
        for case in CASES:
            for label, size in case.shapes.items():
                large = label not in ("small", "gpt", "odd")
                if any(part in case.name for part in options.only.split("|")) and (large or not options.largest):
                    yield f"{case.name}/{label}/{name}", case, size, DTYPES[name]


def child(contestant: str, options: argparse.Namespace) -> None:
    """Measures all cases, or with ``--part`` only compiles some of them."""
    barrier: Callable[[], None] = lambda: None  # noqa: E731
    device = "cuda"
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


def measured(case: Case, run: Callable[..., list[torch.Tensor]], size: Sizes, dtype: torch.dtype, device: str) -> dict[str, Any]:
    first = make_inputs(case, size, dtype, device, 0)
    moved = bytes_moved(case, first)
    wrong = error(case, run, first)
    sets = [first] + [make_inputs(case, size, dtype, device, seed) for seed in range(1, max(1, min(8, int(CACHED / moved))))]
    kept: list[Any] = []

    def call(number: int) -> None:
        kept[:] = [run(*sets[number % len(sets)])]

    for number in range(max(3, len(sets))):
        call(number)
    count = 20 if moved < CACHED else 10
    wall = statistics.median(wall_seconds(call, count) for _ in range(3))
    gpu = statistics.median(gpu_seconds(call, count, wall) for _ in range(3))
    return {"gpu": gpu, "wall": wall, "bytes": moved, "error": wrong}


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the GPU, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    sink = torch.empty_like(source)
    sink.copy_(source)
    return 2 * source.nbytes / gpu_seconds(lambda _: sink.copy_(source), 10)


def compile_all(contestants: Sequence[str], arguments: Sequence[str]) -> None:
    """Fill the caches on disk, in several processes."""
    running = []
    for contestant in contestants:
        many = COMPILERS if contestant in MODES else 2 if contestant == "lazysched" else 0
        for part in range(many):
            command = [sys.executable, "-m", "benchmarks.kernels", "--child", contestant, "--part", f"{part}/{many}", *arguments]
            running.append(subprocess.Popen(command, cwd=ROOT, env=settings.child_environment(), stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL))
    for process in running:
        process.wait()


def show(results: dict[str, dict[str, Any]], bandwidth: float) -> str:
    """Share of the floor that each contestant reaches on the GPU, microseconds by the clock, and lazysched's error."""
    names = list(results)
    rows = []
    for key in dict.fromkeys(key for found in results.values() for key in found):
        known = {name: results[name].get(key, {}) for name in names}
        floor = next((one["bytes"] / bandwidth for one in known.values() if "bytes" in one), math.nan)
        cells: list[object] = [key, f"{floor * 1e6:.1f}"]
        cells += [f"{floor / one['gpu']:.2f}" if "gpu" in one else "failed" for one in known.values()]
        cells += [f"{one['wall'] * 1e6:.1f}" if "wall" in one else "-" for one in known.values()]
        mine = known.get("lazysched", {})
        cells.append(f"{mine['error']:.1e}" if "error" in mine else mine.get("failed", "-")[:60])
        rows.append(cells)
    header = ["case", "floor us", *names, *(f"{name} us" for name in names), "error"]
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bf16", help="bf16, fp32, or both with a comma")
    parser.add_argument("--only", default="", help="parts of the cases' names, with | between")
    parser.add_argument("--contestants", default="eager,compile,lazysched")
    parser.add_argument("--largest", action="store_true", help="only the shapes beyond the caches")
    parser.add_argument("--child", default="")
    parser.add_argument("--part", default="")
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    contestants = options.contestants.split(",")
    arguments = ["--dtype", options.dtype, "--only", options.only, *(["--largest"] if options.largest else [])]
    start = time.perf_counter()
    compile_all(contestants, arguments)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    results = {}
    for name in contestants:
        results[name] = in_process("benchmarks.kernels", name, arguments)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(show(results, bandwidth))
    path = save("kernels", {"copy": bandwidth, "dtype": options.dtype, "cases": results})
    draw(path.with_suffix(".png"), results, bandwidth)


if __name__ == "__main__":
    main()
