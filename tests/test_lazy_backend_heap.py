"""Steps on a CPU: their memory stays in the process, their threads are not more than cores."""

from __future__ import annotations

import platform

import children
import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to keep memory")

FAULTS = """
import resource, statistics, torch, lazy_backend
torch.set_num_threads(1)
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(6 << 18, device="lazysched") * n for n in range(4)]  # 6 MiB each
    torch._lazy.mark_step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults = [step() for _ in range(15)]
"""

TEAMS = """
import os, torch, lazy_backend
torch.set_num_threads(2)
def threads(): return len(os.listdir("/proc/self/task"))
x = torch.randn(256, 1024, device="lazysched", requires_grad=True)
w = torch.randn(1024, 1024, device="lazysched", requires_grad=True)
torch._lazy.mark_step()
loss = torch.nn.functional.gelu(x @ w).softmax(-1).sum().log()
before = threads()
loss.backward()  # in autograd's thread
print(threads() - before)
"""


def counted(program: str, **values: object) -> int:
    done = children.run(program, device="cpu", **values)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_steps_memory_serves_the_next() -> None:
    """6,144 pages of 4 KiB come and go each step. In few steps the heap still grows."""
    often = FAULTS + "print(int(statistics.median(faults)))"
    assert counted(often) < 100
    # glibc gives the heap's end back unless something small has come to lie there, which differs between processes.
    without = any(counted(often, disable=frozenset(["keep_heap"])) > 1000 for _ in range(4))
    assert without, "glibc keeps its heap by itself here"


def test_emptying_the_cache_gives_the_heap_back() -> None:
    assert counted(FAULTS + "torch.lazysched.empty_cache(); print(step())") > 1000


@pytest.mark.skipif(platform.system() != "Linux", reason="threads are counted in /proc")
def test_recording_in_autograds_thread_asks_for_no_second_team_of_threads() -> None:
    assert counted(TEAMS) == 0
