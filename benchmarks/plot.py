"""Draws a benchmark's table as bars or lines, a PNG beside its JSON. Imports `benchmarks.common`; matplotlib if it is there.

    python -m benchmarks.plot benchmarks/results/*.json

draws saved results again, for machines without matplotlib: each that has "bars" or "lines" in its result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, machine

Told = Mapping[str, Any] | None  # what the numbers depend on, see `common.machine`; None: this machine
COLOURS = ("#7a8ca3", "#edae49", "#66a182", "#8d6a9f", "#4f6d7a", "#c08552")


def pyplot() -> Any:
    """matplotlib's, or None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'lazysched[bench]')", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def colour(name: str, place: int) -> str:
    return "#d1495b" if name.startswith("lazysched") else COLOURS[place % len(COLOURS)]


def bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]], told: Told = None) -> None:
    """One panel for each group, one bar for each contestant, the smaller the better; the machine stands below."""
    plot, groups = pyplot(), {name: values for name, values in groups.items() if values}
    if plot is None or not groups:
        return
    figure, axes = panels(plot, len(groups))
    for axis, (name, values) in zip(axes, groups.items()):
        names = list(values)
        colours = ["#d1495b" if one.startswith("lazysched") else COLOURS[0] for one in names]
        drawn = axis.barh(names, list(values.values()), color=colours)
        axis.bar_label(drawn, fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.18)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    finish(plot, figure, path, title, told)


def lines(path: Path, title: str, groups: Mapping[str, Mapping[str, Sequence[float]]], told: Told = None) -> None:
    """One panel for each group, one line for each contestant, such as its losses step by step."""
    plot, groups = pyplot(), {name: values for name, values in groups.items() if values}
    if plot is None or not groups:
        return
    figure, axes = panels(plot, len(groups))
    for axis, (name, values) in zip(axes, groups.items()):
        for place, (one, points) in enumerate(values.items()):
            axis.plot(points, label=one, color=colour(one, place), linewidth=1, alpha=0.8)
        axis.set_title(name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7)
    finish(plot, figure, path, title, told)


def panels(plot: Any, count: int) -> tuple[Any, list[Any]]:
    """A figure and its axes, as many as ``count``."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure, axes = plot.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def finish(plot: Any, figure: Any, path: Path, title: str, told: Told) -> None:
    told = told or machine()
    figure.suptitle(title)
    below = f"{told['gpu'] or told['cpu']}, torch {told['torch']}, triton {told['triton']}, {told['commit']}"
    figure.text(0.01, 0.005, below, fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    plot.close(figure)
    print(f"saved {path.relative_to(ROOT)}" if path.is_relative_to(ROOT) else f"saved {path}")


def draw(path: Path, result: Mapping[str, Any], told: Told = None) -> None:
    """What a result says of its charts: "bars" and "lines" are {title: groups}."""
    for title, groups in result.get("bars", {}).items():
        bars(path.with_suffix(".png"), title, groups, told)
    for title, groups in result.get("lines", {}).items():
        lines(path.with_name(path.stem + "-curves.png"), title, groups, told)


def main() -> None:
    for name in sys.argv[1:]:
        saved = json.loads(Path(name).read_text())
        draw(Path(name), saved["result"], saved["machine"])


if __name__ == "__main__":
    main()
