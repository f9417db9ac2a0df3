"""What every benchmark shares: processes in rounds, means, tables, saved results. Imports torch and `ir_nodes.settings`."""

from __future__ import annotations

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ir_nodes import settings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = "benchmark result: "


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


def in_process(module: str, contestant: str, arguments: Iterable[str] = (), variables: Mapping[str, str] | None = None,
               timeout: float | None = None) -> Any:
    """What ``python -m module --child contestant`` hands in, with ``variables`` added to its environment.

    Raises RuntimeError with its last words where it fails, or runs longer than ``timeout`` seconds.
    """
    environment = {**settings.child_environment(), **(variables or {})}
    if not contestant.startswith("lazysched"):
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the others must not feel the device at all
    command = [sys.executable, "-m", module, "--child", contestant, *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{contestant} took longer than {timeout:.0f} s") from None
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not found:
        raise RuntimeError(f"{contestant} failed ({done.returncode}): {(done.stderr or done.stdout)[-3000:]}")
    return json.loads(found[-1][len(MARK) :])


def hand_in(result: Any) -> None:
    """What a child calls to give ``result`` to its parent."""
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


def save(name: str, result: Any) -> Path:
    """Writes ``result`` with machine and versions to benchmarks/results/<name>-<machine>-<date>.json."""
    told = machine()
    label = re.sub(r"[^a-z0-9]+", "-", (told["gpu"] or f"cpu {told['threads']} threads").lower()).strip("-")
    path = RESULTS / f"{name}-{label}-{datetime.date.today().isoformat()}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": told, "result": result}, indent=1) + "\n")
    print(f"saved {path.relative_to(ROOT)}")
    return path
