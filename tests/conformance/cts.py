"""Runs TorchCTS (PyPI `torchcts`) on the device and writes docs/torchcts.md: `python -m tests.conformance.cts` (see --help).

TorchCTS 0.4.1 says that it wants torch below 2.12.2, so install it with `pip install --no-deps torchcts==0.4.1 psutil
expecttest mpmath`. Each of its suites runs in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
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

from ir_nodes import settings
from tests.conformance import cts_expected, table
from tests.conformance.eager import DEVICE, EAGER

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("autograd", "compiler", "device_api", "dtypes", "errors", "generated", "memory", "multi_device", "operators", "opinfo",
          "path_shapes", "rng", "serialization", "stress", "strides", "training", "workloads")  # fmt: skip
HEAD = """# TorchCTS

Written by `make torchcts TORCHCTS_ARGS=--write`: TorchCTS {version}, all levels of its broadest manifest (without `guard_alloc`,
an allocator that the device does not have), at most {samples} samples a test, on torch {torch} and {where}, {today}. What fails
is run again in eager mode on the physical device, there without the exemptions that many tests have for the CPU.
"""
# Its opinfo modules look for the running test in the call stack for every sample that they count, and read all its metadata for
# every op: hours, for nothing.
_CHILD = """
import functools, sys, torch
torch.set_num_threads(1)
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core
common_utils.extract_test_fn = core.extract_test_fn = lambda: None
from torchcts import cli, op_metadata
validation = functools.cache(functools.partial(op_metadata._validation_metadata, None))
op_metadata._validation_metadata = lambda metadata: validation()
sys.exit(cli.main())
"""


@dataclass
class Suite:
    """What became of the tests of one suite."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)  # "operators/test_norm.py::test_group_norm" -> its error's first line
    ended: str = ""  # how its process ended, where that was not by itself
    in_eager: set[str] = field(default_factory=set)  # those that fail in eager mode on the physical device too

    def cells(self) -> list[object]:
        ended = self.ended or ("" if self.counts.total() else "it has no tests for this device")
        return [self.name, *(self.counts[outcome] for outcome in ("passed", "failed", "skipped")), ended]

    def reason(self, test: str) -> str:
        """Why it fails; "" where that is not known."""
        eager = f"eager mode on the physical device, {EAGER}, fails it too" if test in self.in_eager else ""
        return cts_expected.reason(self.name, test.rpartition("::")[2], self.failures[test]) or eager


@dataclass(frozen=True)
class Run:
    """How suites are run."""

    folder: Path  # where reports lie; a suite that has one is not run again
    samples: int
    patience: int
    extra: list[str]

    def suite(self, name: str) -> Suite:
        found = self.tests(name, DEVICE, [name])
        unknown = [test for test in found.failures if not found.reason(test)]
        if unknown:
            found.in_eager = set(self.tests(name, EAGER, unknown).failures)
        return found

    def tests(self, name: str, device: str, tests: list[str]) -> Suite:
        """``tests`` of the suite on ``device``; paths are below TorchCTS's folder."""
        folder = self.folder / device
        folder.mkdir(parents=True, exist_ok=True)
        source = home() if device == DEVICE else without_exemptions(folder)
        (folder / "manifest.py").write_text(manifest(device))
        report = folder / f"{name}.xml"
        command = [sys.executable, "-c", _CHILD, "run", "--device", device, "--level", "8", "--max-samples", str(self.samples),
                   "--max-samples-ieee754", "1", "--results-dir", str(folder / name), "--non-interactive",
                   "--adaptive-isolation", "off", "--tb=short", "-q", f"--junitxml={report}", f"--rootdir={source}",
                   "-k", f"not ({' or '.join(cts_expected.CRASHING)})", *self.extra, *(str(source / test) for test in tests)]
        suite = Suite(name)
        if not report.exists():
            with (folder / f"{name}.txt").open("w") as output:
                try:
                    done = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=self.patience, check=False,
                                          env=settings.child_environment() | {"PYTHONPATH": f"{source.parent}:{ROOT}"})
                    suite.ended = f"died with exit code {done.returncode}" if done.returncode not in (0, 1, 5) else ""
                except subprocess.TimeoutExpired:
                    suite.ended = f"not through in {self.patience} s"
        if report.exists():
            read(report, suite)
        return suite


def home() -> Path:
    """The folder of TorchCTS. Ends the program where it is missing."""
    spec = find_spec("torchcts")
    if spec is None or spec.origin is None:
        sys.exit("TorchCTS is missing; the head of this file says how it is installed")
    return Path(spec.origin).parent


def without_exemptions(folder: Path) -> Path:
    """A copy of TorchCTS in which no test leaves the CPU out: many ask of other devices what the CPU does not give either."""
    copy = folder / "source" / "torchcts"
    if not copy.exists():
        shutil.copytree(home(), copy)
        for file in copy.glob("*/test_*.py"):
            file.write_text(file.read_text().replace('== "cpu"', '== "nowhere"'))
    return copy


def manifest(device: str) -> str:
    """TorchCTS's broadest manifest for ``device``, without the guard allocator that ours has not."""
    text = (home() / "templates" / "manifest.complete.py").read_text()
    changes = [('"device_name": "auto"', f'"device_name": "{device}"'), ('"guard_alloc": True', '"guard_alloc": False')]
    changes += [('"backend_import": None', '"backend_import": "lazy_backend"')] if device == DEVICE else []
    for old, new in changes:
        assert old in text, f"this TorchCTS's manifest has no {old}"
        text = text.replace(old, new)
    return text


def read(report: Path, suite: Suite) -> None:
    for case in xml.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        if problem is not None:
            suite.counts["failed"] += 1
            suite.failures[node(case)] = (problem.get("message") or "").split("\n")[0][:160]
        else:
            suite.counts["skipped" if case.find("skipped") is not None else "passed"] += 1


def node(case: xml.Element) -> str:
    """A test's id for pytest, below TorchCTS's folder."""
    parts = case.get("classname", "").rpartition("torchcts.")[2].split(".")
    count = next((n for n in range(1, len(parts)) if (home().joinpath(*parts[:n]).with_suffix(".py")).exists()), len(parts))
    return "::".join(["/".join(parts[:count]) + ".py", *parts[count:], case.get("name", "")])


def page(suites: list[Suite], samples: int) -> str:
    """docs/torchcts.md: a row a suite, then the failures by reason."""
    total = Suite("all")
    reasons: dict[str, list[str]] = {}
    for suite in suites:
        total.counts.update(suite.counts)
        for test, message in suite.failures.items():
            reasons.setdefault(suite.reason(test) or f"not looked into: {message}", []).append(test.rpartition("::")[2])
    where = "a CPU" if EAGER == "cpu" else "CUDA"
    lines = [HEAD.format(version=version("torchcts"), samples=samples, torch=torch.__version__, where=where,
                         today=datetime.date.today())]  # fmt: skip
    lines += table.table(["suite", "passed", "failed", "skipped", "ended"], [suite.cells() for suite in [*suites, total]])
    lines += ["## What does not pass, and why", ""]
    body = [[len(tests), why, some({test.partition("[")[0] for test in tests})]
            for why, tests in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))]
    lines += table.table(["tests", "reason", "which"], body)
    left = [name for name in SUITES if name not in {suite.name for suite in suites}]
    lines += [f"Suites that were not run: {', '.join(left)}.", ""] if left else []
    lines += [f"Not run: `{test}`, since {why}." for test, why in cts_expected.CRASHING.items()]
    lines += [f"No test fails any more by: {row.suite}, {row.pattern}" for row in idle(suites)]
    return "\n".join(lines).rstrip() + "\n"


def some(tests: set[str], most: int = 6) -> str:
    more = f" and {len(tests) - most} more" if len(tests) > most else ""
    return ", ".join(f"`{test}`" for test in sorted(tests)[:most]) + more


def idle(suites: list[Suite]) -> list[cts_expected.Row]:
    return cts_expected.idle({suite.name: {test.rpartition("::")[2]: message for test, message in suite.failures.items()}
                              for suite in suites if not suite.ended})  # fmt: skip


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
        how = Run((args.folder or Path(folder)).resolve(), args.samples, args.patience, extra)
        for name in args.suites.split(","):
            suites.append(how.suite(name))
            print(*suites[-1].cells(), flush=True)
    text = page(suites, args.samples)
    if args.write:
        (ROOT / "docs" / "torchcts.md").write_text(text)
    else:
        print(text)
    unknown = any(not suite.reason(test) for suite in suites for test in suite.failures)
    return int(unknown or bool(idle(suites)))


if __name__ == "__main__":
    sys.exit(main())
