"""Lays the loss curves of two devices side by side. Imports matplotlib where a picture is asked for.

    python examples/compare.py cpu lazysched --steps 50 --png curves.png

Each device trains in a process of its own; what is not named here goes to train_gpt.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAINER = Path(__file__).with_name("train_gpt.py")


def run(device: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    """The curve of one training, as `train_gpt.save_curve` writes it. Raises CalledProcessError."""
    curve = folder / f"{device.replace(':', '_')}.json"
    command = [sys.executable, str(TRAINER), "--device", device, "--sample", "0", "--curve", str(curve), *arguments]
    subprocess.run(command, check=True)
    return json.loads(curve.read_text())


def table(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Step, both losses and their relative difference."""
    one, other = dict(first["losses"]), dict(second["losses"])
    rows = [f"{'step':>6} {first['device']:>12} {second['device']:>12} {'rel. diff':>10}"]
    rows += [row(str(step), one[step], other[step]) for step in sorted(one.keys() & other.keys())]
    rows.append(row("held", first["held_out"], second["held_out"]))
    rows.append(f"{'tok/s':>6} {first['tokens_per_second']:>12,.0f} {second['tokens_per_second']:>12,.0f}")
    return "\n".join(rows)


def row(name: str, one: float, other: float) -> str:
    return f"{name:>6} {one:>12.6f} {other:>12.6f} {abs(one - other) / max(abs(one), 1e-12):>10.1e}"


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """Both curves as a picture. Raises ImportError without matplotlib (`pip install matplotlib`)."""
    from matplotlib import pyplot  # optional: the table needs no picture

    for curve, style in zip(curves, ("-", "--")):
        pyplot.plot(*zip(*curve["losses"]), style, label=curve["device"])
    pyplot.axhline(curves[0]["unigram_entropy"], color="grey", linestyle=":", label="unigram entropy")
    pyplot.xlabel("step")
    pyplot.ylabel("loss, nats per byte")
    pyplot.legend()
    pyplot.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("devices", nargs=2, help="such as cpu lazysched")
    parser.add_argument("--png", type=Path, help="file for a picture of both curves")
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = [run(device, rest, Path(folder)) for device in options.devices]
    print(table(*curves))
    if options.png:
        draw(curves, options.png)


if __name__ == "__main__":
    main()
