"""A process of the conformance run: runs the tests named in a file and notes each in a log, line by line, as it goes.

`python -m tests.conformance.worker TESTS LOG [PYTEST ARGUMENTS]`. What the log holds outlives a crash.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch._lazy.metrics

FOLDER = Path(__file__).parent


def fallbacks() -> dict[str, int]:
    """Ops that ran at once on the physical device so far, with their counts."""
    return {name: torch._lazy.metrics.counter_value(name) for name in torch._lazy.metrics.counter_names() if "::" in name}


class Notes:
    """A pytest plugin that keeps only the given tests and logs the start and the end of each."""

    def __init__(self, tests: set[str], log: TextIO) -> None:
        self.tests = tests
        self.log = log
        self.before: dict[str, int] = {}
        self.reports: list[pytest.TestReport] = []

    def note(self, **entry: Any) -> None:
        print(json.dumps(entry), file=self.log, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.tests]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.before, self.reports = fallbacks(), []
        self.note(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        worst = max(self.reports, key=lambda report: ("passed", "skipped", "failed").index(report.outcome))
        grown = {name: count - self.before.get(name, 0) for name, count in fallbacks().items()}
        self.note(end=nodeid, outcome=outcome(worst), reason=reason(worst), seconds=sum(r.duration for r in self.reports),
                  fallbacks={name: count for name, count in grown.items() if count})
        if "CUDA error" in reason(worst):  # this process can use its GPU no more; another runs the rest
            os._exit(1)


def outcome(report: pytest.TestReport) -> str:
    return "xfailed" if report.outcome == "skipped" and hasattr(report, "wasxfail") else report.outcome


def reason(report: pytest.TestReport) -> str:
    """Why a test was skipped or was expected to fail, or how it failed; "" where it passed."""
    if hasattr(report, "wasxfail"):
        return report.wasxfail
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    if report.outcome != "failed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext)[-4000:]


def main(tests: str, log: str, *arguments: str) -> int:
    wanted = json.loads(Path(tests).read_text())
    files = sorted({name.partition("::")[0] for name in wanted})
    with open(log, "a") as out:
        return pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *arguments, *files], [Notes(set(wanted), out)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
