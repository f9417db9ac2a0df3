"""Random programs of op_db calls must give on lazysched what they give on the physical device.

`python -m tests.conformance.fuzz --calls 20000 --seed 0` runs as many programs as it takes; `--program N` runs one,
`--keep 3,7` only these calls of it. Each failure is made small by dropping calls, and printed with the command that repeats it.
Programs run in a process of their own, so a crash is a finding like any other. Imports tqdm.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 12
PATIENCE = 120  # seconds for one program


class Worker:
    """A process that runs programs; a new one takes the place of one that died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, **question: Any) -> dict[str, Any]:
        process = self.process or self.start()
        try:
            print(json.dumps(question), file=process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it is dead, which the next line finds out
        ready = select.select([process.stdout], [], [], PATIENCE)[0]
        line = process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        how = f"died with exit code {process.wait(timeout=30)}" if ready else f"no answer in {PATIENCE} seconds"
        self.stop()
        return {"calls": 0, "barriers": 0, "errors": 0, "failure": f"CRASH: {how}", "log": []}

    def start(self) -> subprocess.Popen[str]:
        self.process = subprocess.Popen([sys.executable, "-m", "tests.conformance.fuzz_worker"], cwd=ROOT, text=True, bufsize=1,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@dataclass
class Result:
    """What a run of the fuzzer came to."""

    programs: int = 0
    calls: int = 0
    barriers: int = 0
    errors: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        self.programs += 1
        self.calls += answer["calls"]
        self.barriers += answer["barriers"]
        self.errors += answer["errors"]

    def __str__(self) -> str:
        return (f"{self.calls} calls in {self.programs} programs with {self.barriers} barriers, {self.errors} calls that had to "
                f"raise: {len(self.failures)} failures")


def shrink(worker: Worker, seed: int, program: int, keep: list[int]) -> tuple[list[int], dict[str, Any]]:
    """The calls that still fail when no single one can be dropped, and how they fail."""
    last = worker.ask(seed=seed, program=program, keep=keep, check_each=False)
    for call in list(keep):
        fewer = [kept for kept in keep if kept != call]
        tried = worker.ask(seed=seed, program=program, keep=fewer, check_each=False)
        if tried["failure"]:
            keep, last = fewer, tried
    return keep, last


def report(worker: Worker, seed: int, program: int, keep: list[int], failure: str) -> str:
    keep, last = shrink(worker, seed, program, keep)
    command = f"python -m tests.conformance.fuzz --seed {seed} --program {program} --keep {','.join(map(str, keep))}"
    what = last["failure"] or f"not every time: {failure}"
    return "\n".join([f"---- seed {seed}, program {program}", what, *last["log"], command])


def fuzz(calls: int, seed: int, first: int = 0, shown: bool = True) -> Result:
    """Programs from ``first`` on, until both devices have run ``calls`` op calls."""
    result, worker = Result(), Worker()
    try:
        with tqdm(total=calls, unit="call", disable=not shown) as bar:
            for program in range(first, first + 100 * calls):
                answer = worker.ask(seed=seed, program=program, keep=None, check_each=False)
                result.add(answer)
                bar.update(answer["calls"])
                if answer["failure"]:
                    result.failures.append(report(worker, seed, program, list(range(LENGTH)), answer["failure"]))
                    tqdm.write(result.failures[-1])
                if result.calls >= calls:
                    break
    finally:
        worker.stop()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--program", type=int, help="run only this one")
    parser.add_argument("--keep", help="of --program, only these calls")
    parser.add_argument("--check-each", action="store_true", help="of --program, compare after every call")
    args = parser.parse_args()
    if args.program is None:
        result = fuzz(args.calls, args.seed, args.first)
        print(result)
        return bool(result.failures)
    worker = Worker()
    keep = [int(call) for call in args.keep.split(",")] if args.keep else None
    answer = worker.ask(seed=args.seed, program=args.program, keep=keep, check_each=args.check_each)
    worker.stop()
    print("\n".join([*answer["log"], answer["failure"] or "equal"]))
    return bool(answer["failure"])


if __name__ == "__main__":
    sys.exit(main())
