"""What a cached barrier costs the host beyond the ATen calls it makes. Imports torch, lazy_backend, `benchmarks.common`.

    python -m benchmarks.barrier

A chain of N matrix products of 4x4 tensors is recorded, and the barrier alone is timed. The same N calls are made eagerly on
the physical device by TorchScript's interpreter, which is native like the barrier, and by a Python loop, for the eye. The
three take turns. What the barrier takes beyond TorchScript's loop is fitted by a + b * N.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch._lazy.metrics
from torch import Tensor

import lazy_backend
from benchmarks.common import save, table

TARGET_FIXED, TARGET_NODE = 100.0, 0.5  # microseconds
SIZES = (1, 10, 30, 100, 200, 400, 700)  # below what a GPU queues


def chain(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = torch.mm(x, w)
    return x


def timed(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """Microseconds that the host spends in ``call``; ``wait`` is not counted."""
    wait()
    start = time.perf_counter()
    call()
    end = time.perf_counter()
    wait()
    return (end - start) * 1e6


def measure(n: int, repeats: int, physical: str) -> dict[str, float]:
    """Medians for a chain of ``n``. Raises RuntimeError where the numbers are wrong or a timed barrier compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions advise against TorchScript; here it is a stopwatch
        native = torch.jit.script(chain)
    generator = torch.Generator().manual_seed(0)
    w_host = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0]  # orthogonal: products stay bounded
    x_host = torch.randn(4, 4, generator=generator)
    x, w = x_host.to(physical), w_host.to(physical)
    lazy_x, lazy_w = x_host.to("lazysched"), w_host.to("lazysched")
    wait = torch.cuda.synchronize if physical == "cuda" else lambda: None
    expected = chain(x, w, n)
    times: dict[str, list[float]] = {"barrier": [], "native loop": [], "python loop": []}
    for repeat in range(-5, repeats):
        if repeat == 0:
            compiles = torch._lazy.metrics.counter_value("UncachedCompile")
        y = chain(lazy_x, lazy_w, n)
        sample = {
            "barrier": timed(lambda: lazy_backend.sync(y), wait),  # noqa: B023  (called at once)
            "native loop": timed(lambda: native(x, w, n), wait),
            "python loop": timed(lambda: chain(x, w, n), wait),
        }
        if repeat >= 0:
            for name, value in sample.items():
                times[name].append(value)
    if torch._lazy.metrics.counter_value("UncachedCompile") != compiles:
        raise RuntimeError(f"a timed barrier of {n} nodes compiled")
    if not torch.allclose(y.cpu(), expected.cpu(), rtol=1e-3, atol=1e-5):
        raise RuntimeError(f"a chain of {n} gives other numbers than eager")
    return {"nodes": n, **{name: statistics.median(values) for name, values in times.items()}}


def fit(rows: list[dict[str, float]]) -> tuple[float, float]:
    """Least squares a + b * N for what the barrier takes beyond the native loop, weighted so that every N counts alike."""
    points = torch.tensor([[1.0, row["nodes"]] for row in rows], dtype=torch.float64)
    extra = torch.tensor([row["barrier"] - row["native loop"] for row in rows], dtype=torch.float64)
    weights = 1 / torch.tensor([row["barrier"] for row in rows], dtype=torch.float64)
    a, b = torch.linalg.lstsq(points * weights[:, None], (extra * weights)[:, None]).solution.flatten().tolist()
    return a, b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    physical = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad():
        rows = [measure(n, options.repeats, physical) for n in SIZES]
    shown = []
    for row in rows:
        beyond = row["barrier"] - row["native loop"]
        times = [f"{row[name]:.1f}" for name in ("barrier", "native loop", "python loop")] + [f"{beyond:.1f}"]
        shown.append([row["nodes"], *times, "yes" if beyond <= TARGET_FIXED + TARGET_NODE * row["nodes"] else "NO"])
    print(table(["nodes", "barrier us", "native loop us", "python loop us", "beyond us", "in target"], shown))
    a, b = fit(rows)
    print(f"beyond the calls: {a:.1f} us + {b:.3f} us a node (to reach: {TARGET_FIXED:.0f} us + {TARGET_NODE} us a node)")
    save("barrier", {"physical": physical, "rows": rows, "fixed_us": a, "us_per_node": b})


if __name__ == "__main__":
    main()
