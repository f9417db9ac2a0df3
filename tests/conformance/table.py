"""Writes what a conformance run found as Markdown. Imports `selection`, `expected` and `shards` only."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Iterable

import torch

from tests.conformance.selection import dtype_of
from tests.conformance.shards import Result

OUTCOMES = ("passed", "xfailed", "skipped", "failed", "crashed")
HEAD = """# What PyTorch's own tests say about lazysched

Written by `make conformance`, which runs every judge in [tests/conformance](../tests/conformance). Each test does the same on the
device and in eager mode on its physical device, and compares values, strides, aliasing, gradients and errors.
"""


def judge(result: Result) -> str:
    """What the test belongs to: its file and the function, without device, op and dtype."""
    file, _, name = result.test.partition("::")
    return file.rpartition("/")[2].removesuffix(".py").removeprefix("test_")


def rows(cells: Iterable[Iterable[object]]) -> list[str]:
    return ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]


def table(head: list[str], body: list[list[object]]) -> list[str]:
    return [*rows([head]), "|" + "---|" * len(head), *rows(body), ""]


def outcomes(results: list[Result]) -> list[str]:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        counts.setdefault((judge(result), dtype_of(result.test) or "-"), Counter())[result.outcome] += 1
    body = [[name, dtype, *(count[o] or "" for o in OUTCOMES)] for (name, dtype), count in sorted(counts.items())]
    total = Counter(result.outcome for result in results)
    body.append(["**all**", "", *(f"**{total[o]}**" for o in OUTCOMES)])
    return table(["judge", "dtype", *OUTCOMES], body)


def first_line(reason: str) -> str:
    return " ".join(reason.split("\n")[:2])[:200]


def reasons(results: list[Result], outcome: str) -> list[str]:
    count = Counter(first_line(result.reason) for result in results if result.outcome == outcome)
    return table(["tests", "reason"], [[n, reason] for reason, n in sorted(count.items(), key=lambda item: (-item[1], item[0]))])


def bad(results: list[Result]) -> list[str]:
    found = sorted((r for r in results if r.outcome in ("failed", "crashed")), key=lambda r: r.test)
    return table(["test", "", "what it said"], [[r.test.rpartition("::")[2], r.outcome, first_line(r.reason)] for r in found])


def fallbacks(results: list[Result]) -> list[str]:
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.fallbacks)
    return table(["op", "calls"], [[name, f"{n:,}"] for name, n in sorted(total.items(), key=lambda item: (-item[1], item[0]))])


def machine(device: str, processes: int, seconds: float) -> str:
    if device == "cuda":
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        name = f"CPU ({platform.machine()})"
    return (f"{datetime.date.today()}, {name}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{processes} processes, {seconds / 60:.0f} minutes.")


def page(results: list[Result], tests: int, device: str, processes: int, seconds: float, earlier: int = 0) -> str:
    """``tests``: how many there are; a run may have been stopped before the last. ``earlier``: results of a run before."""
    whole = len(results) == tests
    ran = f"All {tests:,} tests." if whole else f"{len(results):,} of {tests:,} tests, evenly spread; then it was stopped."
    before = f" {earlier:,} of the results are of an earlier run, with which this one went on." if earlier else ""
    lines = [HEAD, f"{ran}{before} {machine(device, processes, seconds)}", "", *outcomes(results)]
    for title, outcome in (("Expected failures", "xfailed"), ("Skipped", "skipped")):
        if any(result.outcome == outcome for result in results):
            lines += [f"## {title}", "", *reasons(results, outcome)]
    if any(result.outcome in ("failed", "crashed") for result in results):
        lines += ["## Failures", "", *bad(results)]
    lines += ["## Ops that ran at once on the physical device", "",
              "What cannot be recorded, such as a result whose shape depends on values, runs at once and is counted.", "",
              *fallbacks(results)]
    return "\n".join(lines).rstrip() + "\n"
