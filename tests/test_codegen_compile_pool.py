"""Kernels compile in other processes that need no GPU, come back once, and leave nothing behind. Imports `codegen` and the tests'
recorder."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import children
import pytest
import torch
from graphs import kernels, record

from codegen import binaries, compile_pool, loading, triton_build
from codegen.binaries import Binary
from codegen.compile_pool import Pool
from codegen.frames import frame_bytes
from codegen.fuse import plan
from codegen.kernel import Kernel
from codegen.kernel_files import KernelCompileError, source_path
from ir_nodes import settings

ARCH = 90
OPS: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.exp, torch.sin, torch.cos, torch.tanh, torch.sqrt]


def kernel_of(op: Callable[[torch.Tensor], torch.Tensor] = torch.exp) -> Kernel:
    recording, _ = record(lambda x: op(x * 0.5), torch.ones(64))
    (step,) = kernels(plan(recording.graph))
    return step.kernel


def with_source(kernel: Kernel, added: str) -> Kernel:
    return dataclasses.replace(kernel, source=f"{kernel.source}\n{added}\n")


def some_kernels(folder: Path) -> None:
    """For other processes."""
    made = loading.binaries_of([kernel_of(op) for op in OPS[:2]], folder, ARCH)
    assert all(isinstance(one, Binary) for one in made.values())


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    """One pool for tests that do it no harm."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def test_kernels_compile_in_other_processes_for_a_gpu_that_is_not_there(shared: Pool, tmp_path: Path) -> None:
    wanted = [kernel_of(op) for op in OPS]
    told: list[tuple[int, int]] = []
    made = shared.compile(wanted, tmp_path, ARCH, lambda done, total: told.append((done, total)))
    assert set(made) == set(wanted) and told == [(done, len(OPS)) for done in range(1, len(OPS) + 1)]
    assert 1 <= len(shared.workers) <= compile_pool.processes()
    for kernel, one in made.items():
        assert isinstance(one, Binary) and one.code.startswith(b"\x7fELF"), one
        assert (one.name, one.num_warps) == (kernel.name, kernel.num_warps)


def test_what_does_not_compile_says_so_and_the_others_come_back(shared: Pool, tmp_path: Path) -> None:
    good, other = kernel_of(), kernel_of(torch.sin)
    broken = dataclasses.replace(other, source=other.source.replace("tl.store(", "tl.stoer("))
    made = shared.compile([broken, good], tmp_path, ARCH)
    assert isinstance(made[good], Binary)
    error = made[broken]
    assert isinstance(error, KernelCompileError)
    assert broken.name in str(error) and str(source_path(broken, tmp_path)) in str(error) and "stoer" in str(error)


def test_a_process_that_crashes_is_replaced(pool: Pool, tmp_path: Path) -> None:
    once = tmp_path / "once"
    crash = f"import os, pathlib\nif not pathlib.Path({str(once)!r}).exists():\n"
    kernel = with_source(kernel_of(), f"{crash}    pathlib.Path({str(once)!r}).touch()\n    os._exit(3)")
    made = pool.compile([kernel, kernel_of(torch.sin)], tmp_path, ARCH)
    assert once.exists() and all(isinstance(one, Binary) for one in made.values())


def test_a_kernel_that_processes_die_of_is_given_up(pool: Pool, tmp_path: Path) -> None:
    deadly, good = with_source(kernel_of(), "import os; os._exit(3)"), kernel_of(torch.sin)
    made = pool.compile([deadly, good], tmp_path, ARCH)
    scratch = [worker.scratch for worker in pool.workers]
    pool.close()
    assert isinstance(made[good], Binary) and scratch and not any(map(os.path.exists, scratch)), "nothing is left behind"
    assert "status 3" in str(made[deadly]) and deadly.name in str(made[deadly])


def test_a_kernel_that_a_pass_fails_on_is_tried_with_other_warps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And remembered so; what fails in all of them says why it does as it is."""
    weak, asked = dataclasses.replace(kernel_of(), num_warps=4), list[int]()
    broken, compiled = with_source(weak, "no Python"), loading.compile_kernel

    def compile_some(kernel: Kernel, folder: Path, target: Any) -> Any:
        asked.append(kernel.num_warps)
        if kernel.num_warps in (4, 8):
            raise KernelCompileError(kernel, source_path(kernel, folder), f"a pass failed for {kernel.num_warps} warps")
        return compiled(kernel, folder, target)

    monkeypatch.setattr(loading, "compile_kernel", compile_some)
    with settings.override(disable={"parallel_compile"}):
        made = loading.binaries_of([weak], tmp_path, ARCH)
        assert made[weak].num_warps == 2 and asked == [4, 8, 2]
        assert loading.binaries_of([weak], tmp_path, ARCH) == made and asked == [4, 8, 2]
        assert "for 4 warps" in str(loading.binaries_of([broken], tmp_path, ARCH)[broken])
    assert asked == [4, 8, 2, 4, 8, 2, 16]


def test_a_kernel_that_spills_is_compiled_for_more_warps(tmp_path: Path) -> None:
    """One warp cannot hold a row of 8,192 in registers, two can; which is remembered."""
    recording, _ = record(lambda x: x.softmax(-1), torch.randn(4, 8192))
    (step,) = kernels(plan(recording.graph))
    spilling = dataclasses.replace(step.kernel, num_warps=1)
    alone = loading.compile_here(spilling, tmp_path, ARCH)
    assert isinstance(alone, Binary) and frame_bytes(alone.code) >= loading.SPILLED
    made = loading.binaries_of([spilling], tmp_path, ARCH)[spilling]
    assert isinstance(made, Binary) and made.num_warps == 2 and not frame_bytes(made.code)
    assert loading.binaries_of([spilling], tmp_path, ARCH)[spilling] == made
    assert frame_bytes(b"no machine code") == 0


@pytest.mark.parametrize("start", ["raise SystemExit(1)", ""], ids=["it fails", "it ends"])
def test_where_no_process_starts_kernels_compile_here(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_START", start)
    monkeypatch.setattr(compile_pool, "_pool", Pool())
    made = loading.binaries_of([kernel_of()], tmp_path, ARCH)
    assert all(isinstance(one, Binary) for one in made.values()) and compile_pool.pool().workers == []


def test_switched_off_it_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_pool", Pool())
    with settings.override(disable={"parallel_compile"}):
        some_kernels(tmp_path)
    assert compile_pool.pool().workers == []


def test_code_on_disk_is_taken_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of()
    first = loading.binaries_of([kernel], tmp_path, ARCH)
    monkeypatch.setattr(triton_build, "build", None)
    monkeypatch.setattr(compile_pool.Pool, "compile", None)
    assert loading.binaries_of([kernel], tmp_path, ARCH) == first


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:30], lambda data: b"", lambda data: data + b"x",
                                    lambda data: data[:-1] + bytes([data[-1] ^ 1])],
                         ids=["short", "no facts", "empty", "long", "changed"])  # fmt: skip
def test_a_damaged_file_is_not_taken(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    kernel, binary = kernel_of(), Binary("name", 16, 4, b"\x7fELF and more")
    binaries.keep(kernel, ARCH, tmp_path, binary)
    path = binaries.binary_path(kernel, ARCH, tmp_path)
    assert binaries.find(kernel, ARCH, tmp_path) == binary
    path.write_bytes(damage(path.read_bytes()))
    assert binaries.find(kernel, ARCH, tmp_path) is None
    binaries.keep(kernel, ARCH, tmp_path, binary)
    assert binaries.find(kernel, ARCH, tmp_path) == binary


def test_a_folder_that_cannot_be_written_keeps_nothing_and_harms_nobody(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    binaries.keep(kernel_of(), ARCH, blocked / "kernels", Binary("name", 0, 4, b""))
    assert binaries.find(kernel_of(), ARCH, blocked / "kernels") is None


def test_code_is_kept_apart_by_all_that_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of()
    paths = {binaries.binary_path(kernel, ARCH, tmp_path), binaries.binary_path(kernel, 100, tmp_path)}
    changes = {"num_warps": kernel.num_warps * 2, "divisible": (), "constexprs": (("B0", 1), ("B1", 32)), "source": ""}
    paths |= {binaries.binary_path(dataclasses.replace(kernel, **{key: value}), ARCH, tmp_path) for key, value in changes.items()}
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    paths.add(binaries.binary_path(kernel, ARCH, tmp_path))
    monkeypatch.setattr(binaries, "toolchain", lambda: ("another", 1))
    paths.add(binaries.binary_path(kernel, ARCH, tmp_path))
    assert len(paths) == 8


def test_two_programs_share_a_folder_at_the_same_time(tmp_path: Path) -> None:
    program = f"import test_codegen_compile_pool as m, pathlib; m.some_kernels(pathlib.Path({str(tmp_path)!r}))"
    environment = settings.child_environment() | {"PYTHONPATH": os.pathsep.join(children.PATHS)}
    both = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [one.wait(timeout=120) for one in both] == [0, 0]
    assert len(list(tmp_path.glob("*.bin"))) == 2 and not list(tmp_path.glob("*.tmp"))


def test_processes_that_nobody_needs_end(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "IDLE_SECONDS", 0.2)
    for op in OPS[:2]:
        assert isinstance(pool.compile([kernel_of(op)], tmp_path, ARCH)[kernel_of(op)], Binary), "they start again"
        until = time.monotonic() + 10
        while pool.workers and time.monotonic() < until:
            time.sleep(0.05)
        assert pool.workers == []


def test_a_first_graph_of_some_size_starts_them_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(compile_pool.Pool, "grow", lambda pool, wanted: started.append(wanted))
    compile_pool.warm_up(tmp_path, 10)
    assert not started
    compile_pool.warm_up(tmp_path, 1000)
    assert started == [compile_pool.processes()]
    binaries.keep(kernel_of(), ARCH, tmp_path, Binary("name", 0, 4, b"code"))
    compile_pool.warm_up(tmp_path, 1000)
    assert len(started) == 1


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    alone = compile_pool.processes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (alone, compile_pool.processes()) == (12, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    assert compile_pool.processes() == 1


SCRIPT = """
print("imported", flush=True)
import sys, pathlib, dataclasses, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
from test_codegen_compile_pool import ARCH, kernel_of, with_source
from codegen import compile_pool
folder = pathlib.Path(sys.argv[1])
compile_pool.pool().compile([kernel_of()], folder, ARCH)
print(*(worker.process.pid for worker in compile_pool.pool().workers), flush=True)
slow = with_source(kernel_of(), "import time; time.sleep(60)")
compile_pool.pool().compile([slow], folder, ARCH)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_a_program_without_a_guard_runs_once_and_its_processes_end_with_it(end: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    environment = settings.child_environment() | {"PYTHONPATH": os.pathsep.join(children.PATHS)}
    program = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment)
    assert program.stdout is not None and program.stderr is not None
    assert program.stdout.readline() == "imported\n"
    pids = [int(word) for word in program.stdout.readline().split()]
    assert pids and all(alive(pid) for pid in pids)
    time.sleep(0.5)
    program.send_signal(end)
    program.wait(timeout=30)
    assert program.stdout.read() == "", "nobody imported it again"
    assert end == signal.SIGKILL or "KeyboardInterrupt" in program.stderr.read()
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
