"""Compiles kernels in several processes. Imports `ir_nodes.settings` and codegen's kernel modules.

Processes start when kernels are missing, no more than there are kernels or cores, and wait a minute for more work. They run
`codegen.compile_worker` in a fresh interpreter: a program's main module is not imported again, and nothing of it is forked.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any, Callable, Sequence

from codegen.binaries import Binary
from codegen.kernel import Kernel
from codegen.kernel_files import KernelCompileError, source_path, write_source
from ir_nodes import settings

MAX_PROCESSES = 16
IDLE_SECONDS = 60.0
MANY_NODES = 50
AHEAD = 2  # jobs that a process has at hand, so that it need not wait for the next
GRACE_SECONDS = 1.0
TRIES = 2  # a kernel that two processes died over is given up
_START = ("import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = json.loads(sys.argv[1]); "
          "from codegen.compile_worker import main; main()")

Progress = Callable[[int, int], None]
Made = Binary | KernelCompileError


class PoolError(RuntimeError):
    """No process could be started, so the kernels have to be compiled here."""


@dataclasses.dataclass(eq=False)
class Worker:
    """One process with the jobs that it has at hand, by number. ``scratch``: where its compiler keeps what it makes."""

    process: subprocess.Popen[bytes]
    scratch: str
    ready: bool = False
    jobs: dict[int, Kernel] = dataclasses.field(default_factory=dict)
    rest: bytes = b""

    @classmethod
    def start(cls) -> Worker:
        """Raises OSError."""
        root = str(Path(__file__).resolve().parents[1])
        scratch = tempfile.mkdtemp(prefix="lazysched-triton-")
        paths = json.dumps([root, *(path for path in sys.path if path != root)])
        return cls(subprocess.Popen([sys.executable or "python3", "-c", _START, paths, scratch], stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE, bufsize=0, env=settings.child_environment()), scratch)

    def send(self, job: bytes) -> None:
        """Raises OSError where the process is gone."""
        assert self.process.stdin is not None
        self.process.stdin.write(job)

    def hang_up(self) -> None:
        """It ends at that, by itself."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def lines(self) -> list[bytes] | None:
        """What it has answered; None where it is gone. Waits for something."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        if not data:
            return None
        *whole, self.rest = (self.rest + data).split(b"\n")
        return whole

    def stop(self) -> None:
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)  # what it was at when it ended, it could not remove


class Pool:
    """The processes of this process; one thread at a time compiles in them."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.workers: list[Worker] = []
        self._lock = threading.RLock()
        self._rest: threading.Timer | None = None

    def compile(self, kernels: Sequence[Kernel], folder: Path, arch: int, progress: Progress | None = None) -> dict[Kernel, Made]:
        """Machine code for every kernel, or why there is none. Raises PoolError."""
        with self._lock:
            try:
                made = _Run(self, kernels, folder, arch, progress).run()
            except BaseException:  # Ctrl-C, too: what processes answer later must not be taken for an answer to the next call
                self.close()
                raise
            self.rest()
            return made

    def grow(self, wanted: int) -> None:
        """Start processes up to ``wanted``. Raises PoolError."""
        with self._lock:
            try:
                while len(self.workers) < min(wanted, processes()):
                    self.workers.append(Worker.start())
            except OSError as error:
                if not self.workers:
                    raise PoolError(f"no process could be started: {error}") from error

    def rest(self) -> None:
        """Close when nobody has needed the processes for a minute."""
        if self._rest is not None:
            self._rest.cancel()
        self._rest = threading.Timer(IDLE_SECONDS, self.close)
        self._rest.daemon = True
        self._rest.start()

    def drop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.stop()

    def close(self) -> None:
        """End the processes; those of a parent that forked belong to the parent."""
        if self.owner != os.getpid():
            return
        with self._lock:
            for worker in self.workers:
                worker.hang_up()
            for worker in self.workers:
                worker.stop()
            self.workers = []


class _Run:
    """One call's kernels on their way through the pool."""

    def __init__(self, pool: Pool, kernels: Sequence[Kernel], folder: Path, arch: int, progress: Progress | None) -> None:
        self.pool, self.folder, self.arch, self.progress = pool, folder, arch, progress
        self.waiting = deque(sorted(kernels, key=lambda kernel: -len(kernel.source)))  # the longest takes longest
        self.total = len(self.waiting)
        self.made: dict[Kernel, Made] = {}
        self.tries: dict[Kernel, int] = {}
        self.numbers = 0

    def run(self) -> dict[Kernel, Made]:
        for kernel in self.waiting:
            write_source(kernel, self.folder)
        with selectors.DefaultSelector() as selector:
            while len(self.made) < self.total:
                self.hand_out(selector)
                for key, _ in selector.select():
                    self.take(key.data, selector)
        return self.made

    def hand_out(self, selector: selectors.BaseSelector) -> None:
        """Give every process something to do, then something to do next."""
        self.pool.grow(len(self.waiting) + sum(bool(worker.jobs) for worker in self.pool.workers))
        for level in range(AHEAD):
            for worker in list(self.pool.workers):
                if self.waiting and len(worker.jobs) == level:
                    self.give(worker, self.waiting.popleft(), selector)

    def give(self, worker: Worker, kernel: Kernel, selector: selectors.BaseSelector) -> None:
        number = self.numbers = self.numbers + 1
        fields = {key: value for key, value in dataclasses.asdict(kernel).items() if key != "source"}
        job = {"id": number, "path": str(source_path(kernel, self.folder)), "arch": self.arch, "kernel": fields}
        if worker.process.stdout not in selector.get_map():
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        worker.jobs[number] = kernel
        try:
            worker.send(json.dumps(job).encode() + b"\n")
        except OSError:
            self.lose(worker, selector)

    def take(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        lines = worker.lines()
        if lines is None:
            self.lose(worker, selector)
        for line in lines or ():
            answer = json.loads(line)
            if "ready" in answer:
                worker.ready = True
            else:
                self.finish(worker.jobs.pop(answer["id"]), answer)

    def finish(self, kernel: Kernel, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.fail(kernel, str(answer["error"]))
            return
        self.made[kernel] = Binary(answer["name"], answer["shared"], answer["num_warps"], base64.b64decode(answer["code"]))
        if self.progress is not None:
            self.progress(len(self.made), self.total)

    def fail(self, kernel: Kernel, why: str) -> None:
        self.made[kernel] = KernelCompileError(kernel, source_path(kernel, self.folder), why)

    def lose(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        """A process has ended. The kernel that it was at may be to blame; what waited behind that is not."""
        selector.unregister(worker.process.stdout)
        jobs = list(worker.jobs.values())
        self.pool.drop(worker)
        if not worker.ready:
            raise PoolError(f"a process that compiles ended as it started, with status {worker.process.returncode}")
        for kernel in jobs[:1]:
            self.tries[kernel] = self.tries.get(kernel, 0) + 1
            if self.tries[kernel] == TRIES:
                self.fail(kernel, f"the compiler's process ended with status {worker.process.returncode}, {TRIES} times")
        self.waiting.extend(kernel for kernel in jobs if kernel not in self.made)


def processes() -> int:
    """How many processes may compile at a time: this process's share of its cores."""
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // settings.processes_here()))


_pool = Pool()


def pool() -> Pool:
    """This process's pool; a forked child gets one of its own."""
    global _pool
    if _pool.owner != os.getpid():
        _pool = Pool()
    return _pool


def warm_up(folder: Path, nodes: int) -> None:
    """Start processes where no code was ever kept: while a first graph of so many nodes is being planned, they get ready."""
    try:
        if nodes >= MANY_NODES and not any(folder.glob("*.bin")):
            pool().grow(processes())
            pool().rest()
    except (PoolError, OSError):
        pass  # whoever compiles learns why


atexit.register(lambda: _pool.close())
