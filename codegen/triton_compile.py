"""Compiles kernels with Triton in this process: source file, handle. Imports triton and codegen's kernel modules.

Launch convention (checked against Triton 3.6 and 3.9, backends/nvidia/driver): the entry takes the arguments of
`Kernel.signature` in order, each at its natural size (pointers 8 bytes, i32 4, i64 8, fp32 4, fp64 8), constexprs left out,
arguments marked divisible by 16 kept, then two more pointers, global scratch and profile scratch, both null here. The
block is (32 * num_warps, 1, 1) threads with ``shared`` bytes of dynamic shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Sequence

from triton.backends.compiler import GPUTarget

from codegen.kernel import Kernel
from codegen.kernel_files import KernelCacheError, KernelCompileError, source_path, write_source
from codegen.triton_build import build, gpu_target, import_source
from codegen.triton_interpret import interpret as _interpret

__all__ = ["Built", "KernelCacheError", "KernelCompileError", "compile_for_hopper", "compile_kernel", "interpret", "load_module",
           "source_path", "write_source"]

HOPPER = gpu_target(90)


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A compiled kernel, as Triton holds it: ``handle.asm["cubin"]`` is its machine code, ``handle[grid](...)`` launches it.

    ``shared`` is in bytes.
    """

    kernel: Kernel
    path: Path
    shared: int
    num_warps: int
    handle: Any


def load_module(kernel: Kernel, cache_dir: Path) -> tuple[ModuleType, Path]:
    """The imported source file and its path. Raises KernelCompileError."""
    path = write_source(kernel, cache_dir)
    try:
        return import_source(path), path
    except (OSError, SyntaxError, ImportError, NameError, ValueError) as error:
        raise KernelCompileError(kernel, path, error) from error


def compile_kernel(kernel: Kernel, cache_dir: Path, target: GPUTarget | None = None) -> Built:
    """Compile for ``target``, or for the current GPU. Raises KernelCompileError."""
    module, path = load_module(kernel, cache_dir)
    try:
        handle = build(kernel, module, target)
    except Exception as error:  # Triton raises its own, MLIR's, ptxas' and the driver's errors, without a common base
        raise KernelCompileError(kernel, path, error) from error
    return Built(kernel, path, handle.metadata.shared, handle.metadata.num_warps, handle)


def compile_for_hopper(kernel: Kernel, cache_dir: Path) -> Built:
    """Compile for an H100 or H200, which need not be there."""
    return compile_kernel(kernel, cache_dir, HOPPER)


def interpret(kernel: Kernel, cache_dir: Path) -> Callable[[tuple[int, int, int], Sequence[Any]], None]:
    """A launcher ``run(grid, args)`` that runs the kernel on CPU tensors. Raises KernelCompileError."""
    module, _ = load_module(kernel, cache_dir)
    return _interpret(kernel, getattr(module, kernel.name).fn)
