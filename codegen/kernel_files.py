"""Kernel sources on disk, and what goes wrong with a kernel. Imports `codegen.kernel` only."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from codegen.kernel import Kernel


class KernelCompileError(Exception):
    """A kernel could not be written, imported, compiled or loaded. ``cause``: the error, or what another process said of it."""

    def __init__(self, kernel: Kernel, path: Path, cause: BaseException | str) -> None:
        told = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"kernel {kernel.name} ({path}): {told}")
        self.kernel, self.path, self.cause = kernel, path, cause


class KernelCacheError(KernelCompileError):
    """The folder for kernel sources cannot be written."""


def source_path(kernel: Kernel, cache_dir: Path) -> Path:
    """Where the kernel's source belongs: the name carries a hash of the text."""
    digest = hashlib.sha256(kernel.source.encode()).hexdigest()[:16]
    return cache_dir / f"{kernel.name}_{digest}.py"


def write_source(kernel: Kernel, cache_dir: Path) -> Path:
    """The path of the kernel's source file, written atomically unless it is there. Raises KernelCacheError."""
    path = source_path(kernel, cache_dir)
    try:
        if not path.exists() or path.read_text() != kernel.source:
            replace_file(path, kernel.source.encode())
    except OSError as error:
        raise KernelCacheError(kernel, path, error) from error
    return path


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that other processes see all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
