"""Compiles kernels with Triton: source file, binary, handle. Imports torch, triton, `codegen.kernel` and
`codegen.triton_interpret`.

Launch convention (checked against Triton 3.6 and 3.9, backends/nvidia/driver): the entry takes the arguments of
`Kernel.signature` in order, each at its natural size (pointers 8 bytes, i32 4, i64 8, fp32 4, fp64 8), constexprs left out,
arguments marked divisible by 16 kept, then two more pointers, global scratch and profile scratch, both null here. The
block is (32 * num_warps, 1, 1) threads with ``shared`` bytes of dynamic shared memory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Sequence

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from codegen.kernel import Kernel
from codegen.triton_interpret import interpret as _interpret

HOPPER = GPUTarget("cuda", 90, 32)


class KernelCompileError(Exception):
    """A kernel could not be written, imported, compiled or loaded."""

    def __init__(self, kernel: Kernel, path: Path, cause: BaseException) -> None:
        super().__init__(f"kernel {kernel.name} ({path}): {type(cause).__name__}: {cause}")
        self.kernel, self.path, self.cause = kernel, path, cause


class KernelCacheError(KernelCompileError):
    """The folder for kernel sources cannot be written."""


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A loaded kernel. ``function`` is a CUfunction (0 where compiled for another machine), ``shared`` is in bytes.

    ``handle`` keeps the module loaded.
    """

    kernel: Kernel
    path: Path
    function: int
    shared: int
    num_warps: int
    handle: Any


def source_path(kernel: Kernel, cache_dir: Path) -> Path:
    """Where the kernel's source belongs: the name carries a hash of the text."""
    digest = hashlib.sha256(kernel.source.encode()).hexdigest()[:16]
    return cache_dir / f"{kernel.name}_{digest}.py"


def write_source(kernel: Kernel, cache_dir: Path) -> Path:
    """The path of the kernel's source file, written atomically unless it is there. Raises KernelCacheError."""
    path = source_path(kernel, cache_dir)
    try:
        if path.exists() and path.read_text() == kernel.source:
            return path
        cache_dir.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cache_dir, suffix=".tmp")
        with os.fdopen(descriptor, "w") as file:
            file.write(kernel.source)
        os.replace(temporary, path)
    except OSError as error:
        raise KernelCacheError(kernel, path, error) from error
    return path


def load_module(kernel: Kernel, cache_dir: Path) -> tuple[ModuleType, Path]:
    """The imported source file; `triton.jit` reads a function's source back from its file. Raises KernelCompileError."""
    path = write_source(kernel, cache_dir)
    name = f"_lazysched_kernel_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known, path
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (OSError, SyntaxError, ImportError, NameError, ValueError) as error:
        raise KernelCompileError(kernel, path, error) from error
    sys.modules[name] = module
    return module, path


def compile_kernel(kernel: Kernel, cache_dir: Path, target: GPUTarget | None = None) -> Compiled:
    """Compile for ``target``, or for the current GPU and load it there. Raises KernelCompileError."""
    module, path = load_module(kernel, cache_dir)
    names = [name for name, _ in kernel.signature]
    signature = dict(kernel.signature) | {name: "constexpr" for name, _ in kernel.constexprs}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in kernel.divisible}
    source = ASTSource(getattr(module, kernel.name), signature, dict(kernel.constexprs), attributes)
    try:
        handle = triton.compile(source, target=target, options={"num_warps": kernel.num_warps, "enable_fp_fusion": True})
        if target is None:
            handle._init_handles()
    except Exception as error:  # Triton raises its own, MLIR's, ptxas' and the driver's errors, without a common base
        raise KernelCompileError(kernel, path, error) from error
    function = 0 if target is not None else int(handle.function)
    return Compiled(kernel, path, function, handle.metadata.shared, handle.metadata.num_warps, handle)


def compile_for_hopper(kernel: Kernel, cache_dir: Path) -> Compiled:
    """Compile for an H100 or H200, which need not be there."""
    return compile_kernel(kernel, cache_dir, HOPPER)


def interpret(kernel: Kernel, cache_dir: Path) -> Callable[[tuple[int, int, int], Sequence[Any]], None]:
    """A launcher ``run(grid, args)`` that runs the kernel on CPU tensors. Raises KernelCompileError."""
    module, _ = load_module(kernel, cache_dir)
    return _interpret(kernel, getattr(module, kernel.name).fn)
