"""Runs TorchCTS (PyPI `torchcts`) on the device and writes docs/torchcts.md: `python -m tests.conformance.cts` (see --help).

TorchCTS 0.4.1 says that it wants torch below 2.12.2, so install it with `pip install --no-deps torchcts==0.4.1 psutil
expecttest mpmath`. Each of its suites runs in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.conformance import cts_expected, table

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("autograd", "compiler", "device_api", "dtypes", "errors", "generated", "memory", "multi_device", "operators", "opinfo",
          "path_shapes", "rng", "serialization", "stress", "strides", "training", "workloads")  # fmt: skip
# Its opinfo modules look for the running test in the call stack for every sample that they count: an hour, for nothing.
_CHILD = """
import sys, torch
torch.set_num_threads(1)
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core
common_utils.extract_test_fn = core.extract_test_fn = lambda: None
from torchcts import cli
sys.exit(cli.main())
"""


@dataclass
class Suite:
    """What became of the tests of one suite."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)  # name of the test -> first line of its error
    ended: str = ""  # how its process ended, where that was not by itself

    def cells(self) -> list[object]:
        return [self.name, *(self.counts[outcome] for outcome in ("passed", "failed", "skipped")), self.ended]


def manifest() -> str:
    """TorchCTS's broadest manifest, for this device, which has no guard allocator."""
    spec = find_spec("torchcts")
    if spec is None or spec.origin is None:
        sys.exit("TorchCTS is missing; the head of this file says how it is installed")
    text = (Path(spec.origin).parent / "templates" / "manifest.complete.py").read_text()
    changes = (('"device_name": "auto"', '"device_name": "lazysched"'), ('"guard_alloc": True', '"guard_alloc": False'),
               ('"backend_import": None', '"backend_import": "lazy_backend"'))  # fmt: skip
    for old, new in changes:
        assert old in text, f"this TorchCTS's manifest has no {old}"
        text = text.replace(old, new)
    return text


def run(name: str, folder: Path, samples: int, patience: int, extra: list[str]) -> Suite:
    """Run the suite, or, where its report lies in ``folder``, read that."""
    (folder / "manifest.py").write_text(manifest())
    report = folder / f"{name}.xml"
    target = Path(find_spec("torchcts").origin).parent / name  # type: ignore[union-attr, arg-type]
    command = [sys.executable, "-c", _CHILD, "run", "--device", "lazysched", "--level", "8", "--max-samples", str(samples),
               "--max-samples-ieee754", "1", "--results-dir", str(folder / name), "--non-interactive",
               "--adaptive-isolation", "off", "--tb=short", "-q", f"--junitxml={report}", f"--confcutdir={target.parent}",
               "-k", f"not ({' or '.join(cts_expected.CRASHING)})",
               *extra, str(target)]  # fmt: skip
    suite = Suite(name)
    if not report.exists():
        with (folder / f"{name}.txt").open("w") as output:
            try:
                done = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=patience, check=False)
                suite.ended = f"died with exit code {done.returncode}" if done.returncode not in (0, 1, 5) else ""
            except subprocess.TimeoutExpired:
                suite.ended = f"not through in {patience} s"
    if report.exists():
        read(report, suite)
    return suite


def read(report: Path, suite: Suite) -> None:
    for case in xml.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        if problem is not None:
            suite.counts["failed"] += 1
            suite.failures[case.get("name", "")] = (problem.get("message") or "").split("\n")[0][:160]
        else:
            suite.counts["skipped" if case.find("skipped") is not None else "passed"] += 1


def page(suites: list[Suite], command: str) -> str:
    """docs/torchcts.md: a row a suite, then the failures by reason."""
    total = Suite("all")
    reasons: dict[str, list[str]] = {}
    for suite in suites:
        total.counts.update(suite.counts)
        for test, message in suite.failures.items():
            why = cts_expected.reason(suite.name, test, message) or f"not looked into: {message}"
            reasons.setdefault(why, []).append(f"{suite.name}: {test}")
    lines = ["# TorchCTS", "", f"Written by `{command}`: TorchCTS {version('torchcts')}, all levels of its broadest manifest "
             "(without `guard_alloc`,", "an allocator that the device does not have), two samples a test, on torch "
             f"{torch.__version__}, {datetime.date.today()}.", ""]
    lines += table.table(["suite", "passed", "failed", "skipped", "ended"], [suite.cells() for suite in [*suites, total]])
    lines += ["## What does not pass, and why", ""]
    body = [[len(tests), why, f"{', '.join(sorted(tests)[:4])}{', ...' if len(tests) > 4 else ''}"]
            for why, tests in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))]
    lines += table.table(["tests", "reason", "which"], body)
    lines += [f"Not run: `{test}`, since {why}." for test, why in cts_expected.CRASHING.items()]
    lines += [f"No test fails any more by: {row.suite}, {row.pattern}" for row in idle(suites)]
    return "\n".join(lines).rstrip() + "\n"


def idle(suites: list[Suite]) -> list[cts_expected.Row]:
    return cts_expected.idle({suite.name: suite.failures for suite in suites if not suite.ended})


def main() -> int:
    """1 where a test fails without a row in `cts_expected`, or a row has no test."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.cts", description="Runs TorchCTS on lazysched.")
    parser.add_argument("--suites", default=",".join(SUITES), help="names, with commas between")
    parser.add_argument("--samples", type=int, default=2, help="samples a test of its opinfo and generated suites")
    parser.add_argument("--patience", type=int, default=7200, help="seconds for one suite")
    parser.add_argument("--folder", type=Path, help="where reports stay; a suite that has one there is not run again")
    parser.add_argument("--write", action="store_true", help="write docs/torchcts.md")
    args, extra = parser.parse_known_args()
    suites = []
    with tempfile.TemporaryDirectory() as folder:
        if args.folder:
            args.folder.mkdir(parents=True, exist_ok=True)
        for name in args.suites.split(","):
            suites.append(run(name, args.folder or Path(folder), args.samples, args.patience, extra))
            print(*suites[-1].cells(), flush=True)
    text = page(suites, "make torchcts TORCHCTS_ARGS=--write")
    if args.write:
        (ROOT / "docs" / "torchcts.md").write_text(text)
    else:
        print(text)
    unknown = any(not cts_expected.reason(suite.name, *failure) for suite in suites for failure in suite.failures.items())
    return int(unknown or bool(idle(suites)))


if __name__ == "__main__":
    sys.exit(main())
