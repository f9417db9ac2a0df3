"""A process that compiles kernels: jobs as lines of JSON on stdin, answers on what was stdout. Imports triton only.

It needs no GPU. It ends when its parent closes the pipe or ends, in the middle of a compilation, too. Whoever
starts it lets it ignore Ctrl-C, which is for the parent.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import select
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.runtime import cache

from codegen.triton_build import build, gpu_target, import_source

PARENT_SECONDS = 1.0  # how often it looks whether its parent is there: others may hold the pipe's end


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Triton prints must not come between the answers
    scratch = sys.argv[2]
    # The parent keeps results by a key of its own. Triton's would first hash half a gigabyte of its own library.
    triton.knobs.cache.dir = scratch
    if hasattr(cache, "triton_key"):
        cache.triton_key = lambda: triton.__version__
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=read, args=(jobs, os.getppid(), scratch), daemon=True).start()
    told: dict[str, Any] = {"ready": True}
    while True:
        try:
            answers.write(json.dumps(told).encode() + b"\n")
            answers.flush()
        except OSError:  # nobody listens any more
            leave(scratch)
        told = answer(jobs.get())


def read(jobs: queue.Queue[dict[str, Any]], parent: int, scratch: str) -> None:
    """Put jobs into the queue; end the process when nobody waits for it any more."""
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], PARENT_SECONDS)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            jobs.put(json.loads(line))
    leave(scratch)


def leave(scratch: str) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel. Errors are told, not raised."""
    try:
        handle = build(SimpleNamespace(**job["kernel"]), import_source(Path(job["path"])), gpu_target(job["arch"]))
    except Exception as error:  # Triton raises its own, MLIR's and ptxas' errors, without a common base
        return {"id": job["id"], "error": f"{type(error).__name__}: {error}"}
    code = base64.b64encode(handle.asm["cubin"]).decode()
    return {"id": job["id"], "name": handle.metadata.name, "shared": handle.metadata.shared,
            "num_warps": handle.metadata.num_warps, "code": code}
