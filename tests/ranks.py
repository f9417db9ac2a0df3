"""Runs a function of a test module as several ranks, each a fresh process. Imports `tests.children` and torch only.

The ranks meet through a file, so no port is needed. Each asserts for itself; what they print comes back.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import tempfile
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist

from tests import children

TIMEOUT = datetime.timedelta(seconds=60)


def run(function: Callable[[], None], ranks: int = 2, backend: str = "lazysched", **values: Any) -> list[str]:
    """``function()`` on every rank, in a process group. Returns what each rank printed; fails with the ranks' own errors."""
    module = function.__module__.removeprefix("tests.")
    # NCCL wants a GPU for each rank.
    device = {} if torch.cuda.device_count() >= ranks or "device" in values else {"device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        def one(rank: int) -> Any:
            program = (f"import tests.ranks as r, tests.{module} as m; r.enter({str(Path(folder) / 'store')!r}, {rank}, {ranks}, "
                       f"{backend!r}); m.{function.__name__}(); r.leave()")
            return children.run(program, **device, **values)

        with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
            done = list(pool.map(one, range(ranks)))
    told = "\n".join(f"--- rank {rank}, exit {one.returncode}\n{one.stdout}\n{one.stderr}" for rank, one in enumerate(done))
    assert all(one.returncode == 0 for one in done), told
    return [one.stdout for one in done]


def enter(path: str, rank: int, ranks: int, backend: str) -> None:
    torch.set_num_threads(1)
    from lazy_backend import core  # which registers the device too

    dist.init_process_group(backend or None, store=dist.FileStore(path, ranks), rank=rank, world_size=ranks, timeout=TIMEOUT)
    if core.physical_is_cuda():
        torch.lazysched.set_device(rank)


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()
