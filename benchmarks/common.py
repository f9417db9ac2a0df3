"""What every benchmark shares: processes in rounds, means, tables, saved results. Imports torch, tqdm and `ir_nodes.settings`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ir_nodes import settings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = "benchmark result: "
LEAST_SECONDS = 15.0  # in which a process can measure something


@contextlib.contextmanager
def fresh_caches() -> Iterator[dict[str, str]]:
    """Environment variables under which nothing is compiled yet but lazysched's native core, as it is once installed."""
    command = [sys.executable, "-c", "import lazy_backend, torch; torch.empty(1, device='lazysched')"]
    subprocess.run(command, cwd=ROOT, env=settings.child_environment(), check=True, capture_output=True)
    native = settings.current().cache_dir / "native"
    with tempfile.TemporaryDirectory(prefix="benchmark") as folder:
        shutil.copytree(native, Path(folder) / "lazysched" / "native")
        names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "LAZYSCHED_CACHE_DIR": "lazysched"}
        yield {variable: str(Path(folder) / name) for variable, name in names.items()}


def in_rounds(module: str, contestants: Sequence[str], rounds: int, arguments: Iterable[str] = ()) -> dict[str, list[Any]]:
    """What each contestant's process hands in, per round. Each round runs every contestant once, so that drift hits all alike."""
    results: dict[str, list[Any]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in contestants:
            print(f"\rround {number + 1} of {rounds}: {name:<12}", end="", file=sys.stderr, flush=True)
            results[name].append(in_process(module, name, arguments))
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    return results


def in_workers(module: str, arguments: Sequence[str], workers: int, timeout: float) -> None:
    """Compile in processes of their own, each its share of the cases: ``python -m module ... --worker number``."""
    command = [sys.executable, "-m", module, *arguments, "--workers", str(workers)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen([*command, "--worker", str(number)], cwd=ROOT, **quiet) for number in range(workers)]
    end = time.monotonic() + timeout
    for process in tqdm(started, desc="compiling", unit="worker"):
        try:
            process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:  # the rest compiles when it is measured
            process.kill()


def in_process(module: str, contestant: str, arguments: Iterable[str] = (), variables: Mapping[str, str] | None = None,
               timeout: float | None = None) -> Any:
    """What ``python -m module --child contestant`` hands in, with ``variables`` added to its environment.

    A child that is stopped after ``timeout`` seconds counts with what it has handed in by then. Raises RuntimeError with its last
    words where it fails.
    """
    environment = {**settings.child_environment(), **(variables or {})}
    if not contestant.startswith("lazysched"):
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the others must not feel the device at all
    command = [sys.executable, "-m", module, "--child", contestant, *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        found = handed_in(late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or "")
        if not found:
            raise RuntimeError(f"{contestant} took longer than {timeout:.0f} s") from None
        print(f"{contestant}: stopped after {timeout:.0f} s, what it had measured counts", file=sys.stderr, flush=True)
        return found[-1]
    found = handed_in(done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"{contestant} failed ({done.returncode}): {(done.stderr or done.stdout)[-3000:]}")
    return found[-1]


def handed_in(output: str) -> list[Any]:
    """What a child has handed in, each time more of it; the last is all."""
    found = []
    for line in output.splitlines():
        if line.startswith(MARK):
            try:
                found.append(json.loads(line[len(MARK) :]))
            except json.JSONDecodeError:  # the process ended within the line
                continue
    return found


def hand_in(result: Any) -> None:
    """What a child calls to give ``result`` to its parent; the last call counts."""
    print(MARK + json.dumps(result), flush=True)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def spread(values: Sequence[float]) -> float:
    """Half the distance between the smallest and the largest, as a fraction of the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns, the first to the left, the others to the right."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = "  ".join("-" * width for width in widths)
    shown = ["  ".join(c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines]
    return "\n".join([shown[0], rule, *shown[1:]])


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "gpu": gpu,
        "cpu": model[1] if model else platform.processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


class Budget:
    """Seconds that a benchmark may take; None: as many as it likes."""

    def __init__(self, seconds: float | None) -> None:
        self.end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self, most: float) -> float:
        """Seconds that the next process may take, ``most`` at the most."""
        return max(0.0, min(most, self.end - time.monotonic()))

    def refuses(self, what: str) -> bool:
        """Is too little left to begin ``what``? Says so."""
        spent = self.left(math.inf) < LEAST_SECONDS
        if spent:
            print(f"{what}: left out, the budget is spent", file=sys.stderr, flush=True)
        return spent


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Options of benchmarks that may be cut short: what they have measured by then is saved."""
    parser.add_argument("--budget", type=float, help="seconds of the whole; what would begin later is left out")
    parser.add_argument("--output", type=Path, help="folder of the results, which are saved as they come")


def save(name: str, result: Any, folder: Path | None = None, quiet: bool = False) -> Path:
    """Writes ``result`` with machine and versions to FOLDER/<name>-<machine>-<date>.json; benchmarks/results by default."""
    told = machine()
    label = re.sub(r"[^a-z0-9]+", "-", (told["gpu"] or f"cpu {told['threads']} threads").lower()).strip("-")
    path = (folder or RESULTS) / f"{name}-{label}-{datetime.date.today().isoformat()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": told, "result": result}, indent=1, default=str) + "\n")
    if not quiet:
        print(f"saved {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path
