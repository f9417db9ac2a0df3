"""Every comparison with torch.compile in one go, each within a budget of time. Imports `benchmarks.common`.

    python -m benchmarks.all --output results --budget 2400

Parts: launch-bound training, training steps with floors and loss curves, inference, kernels. Each is a command that can be run
alone, in a process of its own; it saves what it has as it goes, and its tables lie in OUTPUT/<part>.txt. What a part leaves of
its budget the later ones may use.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import ROOT
from ir_nodes import settings

GRACE = 30.0  # seconds beyond its budget after which a part is stopped
PARTS: dict[str, tuple[list[str], float]] = {  # command, share of the budget
    "launch": (["benchmarks.train", "--preset", "launch", "--floors"], 0.15),
    "train": (["benchmarks.train", "--floors", "--curves", "200", "--contestants", "eager", "compile+fused",
               "reduce-overhead+fused", "lazysched"], 0.45),
    "inference": (["benchmarks.inference"], 0.2),
    "kernels": (["benchmarks.kernels", "--dtypes", "bf16", "fp32"], 0.2),
}  # fmt: skip


def budgets(parts: list[str], left: float) -> float:
    """Seconds of the first of ``parts``, where ``left`` are left for all of them."""
    return left * PARTS[parts[0]][1] / sum(PARTS[part][1] for part in parts)


def run(part: str, arguments: list[str], seconds: float, output: Path) -> int:
    """The part's exit status; what it prints goes to the terminal and to OUTPUT/<part>.txt as it comes."""
    command = [sys.executable, "-m", *PARTS[part][0], *arguments, "--output", str(output), "--budget", f"{seconds:.0f}"]
    print(f"=== {part}: {' '.join(command[2:])}", flush=True)
    with (output / f"{part}.txt").open("w") as log:
        process = subprocess.Popen(["timeout", f"{seconds + GRACE:.0f}", *command], cwd=ROOT, env=settings.child_environment(),
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            log.flush()
        return process.wait()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of results, charts and tables")
    parser.add_argument("--budget", type=float, default=2400, help="seconds of all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="tiny models and shapes, to try it out")
    parser.add_argument("--also", nargs=2, action="append", default=[], metavar=("PART", "ARGUMENTS"),
                        help="more arguments of a part, such as --also train '--models gpt2 bert'")
    options = parser.parse_args(words)
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.budget, []
    for place, part in enumerate(options.parts):
        more = ["--tiny"] * options.tiny + [word for name, text in options.also if name == part for word in text.split()]
        seconds = budgets(options.parts[place:], max(0.0, end - time.monotonic()))
        status = run(part, more, seconds, output)
        if status:
            failed.append(f"{part} ended with {status}")
    print("\n".join(failed) or "all parts ended well")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
