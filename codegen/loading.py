"""Kernels ready to be launched: found on disk, else compiled, then loaded. Imports torch and codegen's modules below."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Mapping, Sequence

import torch

from codegen import binaries, compile_pool, cuda_driver
from codegen.binaries import Binary
from codegen.compile_pool import Made, PoolError
from codegen.cuda_driver import DriverError, Function
from codegen.frames import frame_bytes
from codegen.kernel import Kernel
from codegen.kernel_files import KernelCacheError, KernelCompileError, source_path
from codegen.triton_build import gpu_target
from codegen.triton_compile import compile_kernel
from ir_nodes import settings

QUIET_SECONDS = 2.0
MAX_WARPS = 32
OTHER_WARPS = (2.0, 0.5, 4.0)
"""How many times as many warps a kernel gets, one after the other, that the compiler gives up on."""

SPILLED, TIMES = 256, 2
"""Bytes of a thread in memory from which on a kernel gets twice as many warps, and how often."""

_loaded: dict[tuple[Kernel, int], Function] = {}
_lock = threading.Lock()


def load_some(kernels: Sequence[Kernel], folder: Path, device: int) -> dict[Kernel, Function | KernelCompileError]:
    """Every kernel on CUDA device ``device``, or why it is not there."""
    missing = [kernel for kernel in dict.fromkeys(kernels) if (kernel, device) not in _loaded]
    refused: dict[Kernel, Function | KernelCompileError] = {}
    with _lock, torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        for kernel, made in binaries_of(missing, folder, 10 * major + minor).items():
            one = load(kernel, made, folder, device)
            if isinstance(one, Function):
                _loaded[kernel, device] = one
            else:
                refused[kernel] = one
    return {kernel: refused[kernel] if kernel in refused else _loaded[kernel, device] for kernel in kernels}


def load(kernel: Kernel, made: Made, folder: Path, device: int) -> Function | KernelCompileError:
    if isinstance(made, KernelCompileError):
        return made
    try:
        return cuda_driver.load(made.name, made.code, made.shared, made.num_warps, device)
    except (DriverError, OSError) as error:
        return KernelCompileError(kernel, source_path(kernel, folder), error)


def binaries_of(kernels: Sequence[Kernel], folder: Path, arch: int) -> dict[Kernel, Made]:
    """Machine code for compute capability ``arch``, from the disk where it is there; what had to be compiled is left there."""
    made: dict[Kernel, Made] = {}
    for kernel in kernels:
        known = binaries.find(kernel, arch, folder)
        if known is not None:
            made[kernel] = known
    for kernel, one in compile_all([kernel for kernel in kernels if kernel not in made], folder, arch).items():
        made[kernel] = one
        if isinstance(one, Binary):
            binaries.keep(kernel, arch, folder, one)
    return made


def compile_all(kernels: Sequence[Kernel], folder: Path, arch: int) -> dict[Kernel, Made]:
    """Machine code of every kernel, or why there is none. What the compiler gives up on it is given again for other numbers of
    warps: where its faults show depends on how elements lie in threads."""
    made = compile_once(kernels, folder, arch)
    for factor in OTHER_WARPS:
        failed = {kernel: int(kernel.num_warps * factor) for kernel, one in made.items() if gives_up(one)}
        made |= compile_for(failed, folder, arch)
    for _ in range(TIMES):
        made |= fewer_spills(made, folder, arch)
    return made


def fewer_spills(made: Mapping[Kernel, Made], folder: Path, arch: int) -> dict[Kernel, Binary]:
    """Those that spill, for twice as many warps, whose threads hold half as much each; none that spill over half of it then."""
    binaries_made = {kernel: one for kernel, one in made.items() if isinstance(one, Binary)}
    frames = {kernel: frame_bytes(one.code) for kernel, one in binaries_made.items()}
    more = {kernel: 2 * one.num_warps for kernel, one in binaries_made.items() if frames[kernel] >= SPILLED}
    again = compile_for(more, folder, arch)
    return {kernel: one for kernel, one in again.items() if 2 * frame_bytes(one.code) <= frames[kernel]}


def compile_for(warps: Mapping[Kernel, int], folder: Path, arch: int) -> dict[Kernel, Binary]:
    """Machine code of kernels for so many ``warps`` each, of those that it can be made for."""
    others = {kernel: with_warps(kernel, count) for kernel, count in warps.items()}
    made = compile_once([other for other in others.values() if other is not None], folder, arch)
    found = {kernel: made[other] for kernel, other in others.items() if other is not None}
    return {kernel: one for kernel, one in found.items() if isinstance(one, Binary)}


def gives_up(made: Made) -> bool:
    return isinstance(made, KernelCompileError) and not isinstance(made, KernelCacheError)


def with_warps(kernel: Kernel, count: int) -> Kernel | None:
    """The same for so many warps, with as many registers as the compiler likes; None where no program may have so many."""
    return replace(kernel, num_warps=count, registers=0) if 1 <= count <= MAX_WARPS else None


def compile_once(kernels: Sequence[Kernel], folder: Path, arch: int) -> dict[Kernel, Made]:
    """Compile in other processes, or here where that is switched off or impossible."""
    if kernels and settings.enabled("parallel_compile"):
        try:
            return compile_pool.pool().compile(kernels, folder, arch, Progress())
        except PoolError:
            pass
    return {kernel: compile_here(kernel, folder, arch) for kernel in kernels}


def compile_here(kernel: Kernel, folder: Path, arch: int) -> Made:
    try:
        built = compile_kernel(kernel, folder, gpu_target(arch))
    except KernelCompileError as error:
        return error
    return Binary(built.handle.metadata.name, built.shared, built.num_warps, built.handle.asm["cubin"])


class Progress:
    """A line on a terminal while many kernels compile."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._start > QUIET_SECONDS and sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\rlazysched: {done} of {total} kernels compiled", end=end, file=sys.stderr, flush=True)
