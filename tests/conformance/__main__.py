"""Runs all conformance tests in parallel and writes docs/conformance.md: `python -m tests.conformance` (see --help).

A process that crashes costs the test that it ran, no more. Ends with status 1 where a test failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
from tqdm import tqdm

from lazy_backend import core
from tests.conformance import shards, table

FOLDER = Path(__file__).parent


def default_table() -> Path:
    """docs/conformance.md, or docs/conformance-cuda.md on a GPU."""
    return shards.ROOT / "docs" / ("conformance-cuda.md" if core.physical_is_cuda() else "conformance.md")


class Names:
    """A pytest plugin that notes which tests there are."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [item.nodeid for item in session.items]


def collect(arguments: list[str]) -> list[str]:
    names = Names()
    code = pytest.main(["--collect-only", "-p", "no:cacheprovider", "-p", "no:terminal", *arguments, str(FOLDER)],
                       [names])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit("the tests cannot be collected; `python -m pytest --collect-only tests/conformance` says why")
    return names.tests


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description="Runs PyTorch's own tests on lazysched.")
    parser.add_argument("--part", choices=("all", "everyday"), default="all", help="everyday: what pytest runs too")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--patience", type=float, default=900, help="seconds after which a silent process is ended")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; the table says how much was run")
    parser.add_argument("--table", type=Path, default=default_table(), help="where the table goes")
    parser.add_argument("--log", type=Path, help="a file for every result, as JSON lines, written as tests end")
    parser.add_argument("--resume", action="store_true", help="run only what --log does not show as passed, expected or skipped")
    parser.add_argument("-k", dest="keyword", default="", help="only tests whose names match, as in pytest; writes no table")
    options = parser.parse_args(arguments)
    if options.resume and not options.log:
        parser.error("--resume needs the --log of the run that it goes on with")
    return options


def earlier(log: Path, tests: list[str]) -> list[shards.Result]:
    """Good results of the run that wrote ``log``, of tests that there still are."""
    there = set(tests)
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        result = shards.Result(**json.loads(line))
        found[result.test] = result
    return [one for one in found.values() if one.test in there and one.outcome not in ("failed", "crashed")]


def main() -> int:
    options = parse()
    arguments = ["--conformance", options.part, *(["-k", options.keyword] if options.keyword else [])]
    tests = collect(arguments)
    start = time.monotonic()
    known = earlier(options.log, tests) if options.resume else []
    done = {result.test for result in known}
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=len(tests), initial=len(known), unit=" tests", smoothing=0.05))
        log = stack.enter_context(options.log.open("a" if options.resume else "w")) if options.log else None
        failed = 0

        def tell(result: shards.Result) -> None:
            nonlocal failed
            bar.update()
            if log:
                print(json.dumps(asdict(result)), file=log, flush=True)
            if result.outcome in ("failed", "crashed"):
                failed += 1
                bar.set_postfix_str(f"{failed} failed")
                bar.write(f"{result.outcome} {result.test}: {table.first_line(result.reason)}")

        left = [test for test in tests if test not in done]
        results = known + shards.run(left, options.processes, options.patience, arguments, tell, options.minutes * 60)
    device = "cuda" if core.physical_is_cuda() else "cpu"
    if options.part == "all" and not options.keyword:
        options.table.parent.mkdir(exist_ok=True)
        options.table.write_text(table.page(results, len(tests), device, options.processes, time.monotonic() - start, len(known)))
        print(f"written: {options.table}")
    return int(any(result.outcome in ("failed", "crashed") for result in results))


if __name__ == "__main__":
    sys.exit(main())
