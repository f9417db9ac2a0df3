"""The table and the chart of `benchmarks.kernels`. Imports `benchmarks.common`, and matplotlib where something is drawn."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table


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
