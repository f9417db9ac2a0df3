"""From a kernel's source file to Triton's compiled kernel. Imports triton only: a process that compiles starts quickly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Described(Protocol):
    """The fields of `codegen.kernel.Kernel` that a compilation needs beside the source file."""

    name: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, int], ...]
    divisible: tuple[str, ...]
    num_warps: int
    registers: int


def import_source(path: Path) -> ModuleType:
    """The imported source file; `triton.jit` reads a function's source back from its file. Raises what the import raises."""
    name = f"_lazysched_kernel_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def build(kernel: Described, module: ModuleType, target: GPUTarget | None = None) -> Any:
    """Triton's handle for ``kernel``, compiled for ``target`` or the current GPU. Raises Triton's, MLIR's and ptxas' errors."""
    names = [name for name, _ in kernel.signature]
    signature = dict(kernel.signature) | {name: "constexpr" for name, _ in kernel.constexprs}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in kernel.divisible}
    source = ASTSource(getattr(module, kernel.name), signature, dict(kernel.constexprs), attributes)
    options = {"num_warps": kernel.num_warps, "enable_fp_fusion": True}
    if kernel.registers:
        options["maxnreg"] = kernel.registers
    if "tl.device_assert(" in Path(str(module.__file__)).read_text():
        options |= {"debug": True, "sanitize_overflow": False}  # else Triton leaves assertions out, or adds some of its own
    return triton.compile(source, target=target, options=options)


def gpu_target(arch: int) -> GPUTarget:
    """An NVIDIA GPU of compute capability ``arch`` (90 for 9.0), which need not be there."""
    return GPUTarget("cuda", arch, 32)
