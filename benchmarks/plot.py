"""Draws a benchmark's table as bars, a PNG beside its JSON. Imports `benchmarks.common` and, where installed, matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import ROOT, machine


def bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """One panel for each group, one bar for each contestant, the smaller the better; the machine stands below."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'lazysched[bench]')", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {name: values for name, values in groups.items() if values}
    if not groups:
        return
    columns = min(len(groups), 3)
    rows = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    for axis, (name, values) in zip(axes.flat, groups.items()):
        names = list(values)
        colours = ["#d1495b" if one.startswith("lazysched") else "#7a8ca3" for one in names]
        drawn = axis.barh(names, list(values.values()), color=colours)
        axis.bar_label(drawn, fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.18)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    told = machine()
    figure.suptitle(title)
    below = f"{told['gpu'] or told['cpu']}, torch {told['torch']}, triton {told['triton']}, {told['commit']}"
    figure.text(0.01, 0.005, below, fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"saved {path.relative_to(ROOT)}" if path.is_relative_to(ROOT) else f"saved {path}")
