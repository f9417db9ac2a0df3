"""How near memory-bound kernels come to the GPU's copy bandwidth: eager, torch.compile, lazysched. Imports torch and other
benchmarks' parts and, for lazysched, lazy_backend.

    python -m benchmarks.kernels [--dtypes bf16 fp32] [--only softmax] [--contestants eager compile lazysched] [--largest]

Each contestant runs in its own process. Kernels are compiled before, by several processes that fill the caches on disk. What a
program takes is measured twice: on the GPU alone, with its launches queued behind a pause, and by the clock on the wall. Inputs
and results change from call to call, so that no cache holds what it should not. The same short kernels take up to a tenth longer
in one process than in the next: those are measured in three of each contestant, in turns. Without a GPU only small shapes run, to
try it out.
"""

from __future__ import annotations

import argparse
import collections
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.common import ROOT, Budget, add_limits, hand_in, in_process, save
from benchmarks.kernel_cases import CASES, Case, Sizes, bytes_moved
from benchmarks.kernel_charts import draw, show
from benchmarks.profiling import gpu_kernels
from benchmarks.timing import copy_rate, gpu_seconds, wall_seconds
from ir_nodes import settings

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODES = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
CACHED = 200 << 20  # bytes of inputs and results that no cache holds
ROUNDS, SHORT = 3, 4e-5  # processes of each contestant for programs that take less than so many seconds in the first
ALL = 6  # the first round takes so many times as long as a further one
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
                key = f"{case.name}/{label}/{name}"
                if asked and any(part in case.name for part in options.only.split("|")) and key in (options.keys or [key]):
                    yield key, case, size, DTYPES[name]


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
    kept: collections.deque[Any] = collections.deque(maxlen=len(sets))  # the next results take the memory of those that leave

    def call(number: int) -> None:
        kept.append(run(*sets[number % len(sets)]))

    kernels = count_kernels(lambda: call(0))
    for number in range(max(3, len(sets))):
        call(number)
    count = 20 if moved < CACHED else 10
    wall = statistics.median(wall_seconds(call, count) for _ in range(3))
    gpu = statistics.median(gpu_seconds(call, count, wall) for _ in range(3))
    return {"gpu": gpu, "wall": wall, "bytes": moved, "error": wrong, "kernels": kernels}


def merged(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first round's results, with the median times of all rounds that have the program."""
    found = {}
    for key, first in rounds[0].items():
        all_of = [one[key] for one in rounds if "gpu" in one.get(key, {})]
        times = {name: statistics.median(one[name] for one in all_of) for name in ("gpu", "wall") if all_of}
        found[key] = {**first, **times, "rounds": len(all_of)}
    return found


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
    parser.add_argument("--keys", nargs="+", default=[], help=argparse.SUPPRESS)
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
    for turn, results in in_turns(options.contestants, arguments, budget):
        print(f"{turn}: {time.perf_counter() - start:.0f} s", flush=True)
        if not options.tiny or options.output:
            kept = {"copy": bandwidth, "dtypes": options.dtypes, "compiled_s": compiled, "cases": results}
            path = save(options.save, kept, options.output, quiet=True)
    print(show(results, bandwidth))
    if path and not options.tiny:
        draw(path.with_suffix(".png"), results, bandwidth)


def in_turns(contestants: Sequence[str], arguments: Sequence[str], budget: Budget) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each turn's name, and what is known of all contestants behind it."""
    found: dict[str, list[dict[str, Any]]] = {}
    results: dict[str, Any] = {}
    turns = [(number, name) for number in range(ROUNDS) for name in contestants]
    for place, (number, name) in enumerate(turns):
        short = [key for key, one in results.get(name, {}).items() if one.get("gpu", 1.0) < SHORT]
        if number and not short or budget.refuses(name):
            continue
        try:
            further = ["--keys", *short] if number else []
            seconds = share(budget, [number for number, _ in turns[place:]])
            found.setdefault(name, []).append(in_process("benchmarks.kernels", name, [*arguments, *further], None, seconds))
            results[name] = merged(found[name])
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
        yield f"{name}, round {number + 1}", results


def share(budget: Budget, rounds: Sequence[int]) -> float | None:
    """Seconds for the first of these turns, told by their rounds; None: as many as it likes. A first round, which measures all
    programs, counts for several."""
    left = budget.left(math.inf)
    weights = [1 if number else ALL for number in rounds]
    return None if left == math.inf else left * weights[0] / sum(weights)


if __name__ == "__main__":
    main()
