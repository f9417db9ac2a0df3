"""What benchmarks of cases drawn at random share: options, compiling in several processes, measuring one case after the other,
and the sentence at the end. Imports `benchmarks.common` only."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from benchmarks.common import in_workers, save

Case = TypeVar("Case")
Row = dict[str, Any]

SLOWER = 1.1


def options(doc: str | None, words: Sequence[str] | None, noun: str, seconds: float, count: int) -> argparse.Namespace:
    """``noun``: what one case is called; ``seconds`` and ``count``: what is usual."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of measuring; {noun}s that are left then are left out")
    parser.add_argument("--count", type=int, default=count, help=f"{noun}s")
    parser.add_argument("--seed", type=int, default=0, help=f"of the {noun}s")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a look at the program")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def rows_of(module: str, noun: str, asked: argparse.Namespace, cases: Sequence[Case], compiled: Callable[[Case], None],
            measured: Callable[[Case], Row | None]) -> list[Row] | None:
    """What ``measured`` gives for the cases, where it gives something; None in a worker, which has ``compiled`` its share."""
    if asked.worker is not None:
        for case in cases[asked.worker :: asked.workers]:
            compiled(case)
        return None
    if asked.workers > 1:
        same = ["--seed", str(asked.seed), "--count", str(asked.count), *(["--tiny"] if asked.tiny else [])]
        in_workers(module, same, asked.workers, asked.seconds)
    rows, end = [], time.monotonic() + asked.seconds
    for case in tqdm(cases, desc="measuring", unit=noun):
        if time.monotonic() > end:
            break
        row = measured(case)
        rows += [row] if row is not None else []
    return rows


def told(name: str, key: str, rows: list[Row] | None, report: Callable[[Sequence[Row]], None], wrong: Callable[[Row], bool],
         output: Path | None) -> int:  # fmt: skip
    """Reports the rows, saves them as ``key`` of ``name``'s results, and gives the exit status. None: a worker has none."""
    if rows is None:
        return 0
    report(rows)
    save(name, {key: rows}, output)
    return 1 if any(map(wrong, rows)) else 0


def slower_or_wrong(rows: Sequence[Row], ratio: Callable[[Row], float], wrong: Callable[[Row], bool]) -> list[Row]:
    """The slowest first."""
    return sorted((row for row in rows if ratio(row) > SLOWER or wrong(row)), key=lambda row: -ratio(row))


def summary(rows: Sequence[Row], ratio: Callable[[Row], float], noun: str, other: str, shown: int | None = None) -> str:
    """``shown``: how many of them a table shows, where it does not show all."""
    ratios = sorted(map(ratio, rows))
    low, high = (ratios[len(ratios) * tenth // 10] for tenth in (1, 9))
    told = "" if shown is None else f" The table shows the {shown} that are above {SLOWER} or wrong."
    return (f"{len(rows)} {noun}s, time against {other}'s: median {statistics.median(ratios):.2f}, a tenth below {low:.2f}, "
            f"a tenth above {high:.2f}.{told}")  # fmt: skip
