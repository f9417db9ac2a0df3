"""Runs tests in several processes that may crash. Imports nothing of ours; each process is a `tests.conformance.worker`."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 1500  # tests a process: enough to be worth its start, few enough that all processes end together


@dataclass(slots=True)
class Result:
    test: str
    outcome: str  # passed, xfailed, skipped, failed or crashed
    reason: str = ""
    seconds: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)


class Shard:
    """One process, and what its log says."""

    def __init__(self, tests: list[str], folder: Path, arguments: list[str]) -> None:
        self.tests = tests
        self.done: list[Result] = []
        self.running = ""
        self.moved = time.monotonic()
        wanted, log, self.output = folder / "tests.json", folder / "log.jsonl", folder / "output.txt"
        wanted.write_text(json.dumps(tests))
        log.touch()
        self.log = log.open()
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.conformance.worker", str(wanted), str(log), *arguments]
        with self.output.open("w") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def read(self) -> list[Result]:
        """Tests that have ended since the last call."""
        ended = []
        for line in self.log:
            entry = json.loads(line)
            self.moved = time.monotonic()
            self.running = entry.get("start", "")
            if "end" in entry:
                ended.append(Result(entry["end"], entry["outcome"], entry["reason"], entry["seconds"], entry["fallbacks"]))
        self.done += ended
        return ended

    def death(self, patience: float) -> str:
        """How the process ended or was ended, in words; "" while it runs."""
        code = self.process.poll()
        if code is None and time.monotonic() - self.moved > patience:
            self.process.kill()
            self.process.wait()
            return f"did not end within {patience:.0f} seconds"
        if code is None:
            return ""
        tail = self.output.read_text(errors="replace")[-3000:]
        return f"killed by {signal.Signals(-code).name}\n{tail}" if code < 0 else f"exit status {code}\n{tail}"

    def rest(self, death: str) -> tuple[list[Result], list[str]]:
        """After its death: what it took with it, and the tests that another process has to run."""
        seen = {result.test for result in self.done}
        left = [test for test in self.tests if test not in seen]
        guilty = self.running if self.running in left else ""
        if left and not guilty and not self.done:  # it never got as far as a test
            return [Result(test, "crashed", death) for test in left], []
        lost = [Result(guilty, "crashed", death)] if guilty else []
        return lost, [test for test in left if test != guilty]


def run(tests: list[str], processes: int, patience: float, arguments: list[str], tell: Callable[[Result], None],
        seconds: float = math.inf) -> list[Result]:
    """Every test's result, in the order in which they ended; each is told at once. After ``seconds`` it stops where it is."""
    end = time.monotonic() + seconds
    count = max(processes, -(-len(tests) // CHUNK))
    waiting = deque(chunk for chunk in (tests[start::count] for start in range(count)) if chunk)
    running: list[Shard] = []
    results: list[Result] = []

    def take(found: list[Result]) -> None:
        results.extend(found)
        for result in found:
            tell(result)

    with tempfile.TemporaryDirectory() as base:
        try:
            while (waiting or running) and time.monotonic() < end:
                while waiting and len(running) < processes:
                    running.append(Shard(waiting.popleft(), Path(tempfile.mkdtemp(dir=base)), arguments))
                time.sleep(0.2)
                for shard in list(running):
                    death = shard.death(patience)
                    take(shard.read())
                    if not death:
                        continue
                    running.remove(shard)
                    lost, left = shard.rest(death)
                    take(lost)
                    if left:
                        waiting.append(left)
        finally:
            for shard in running:
                shard.process.kill()
    return results
