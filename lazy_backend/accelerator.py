"""Keeps CUDA's own autograd working once the device has its name.

Imports torch, `ir_nodes.settings` and `lazy_backend.native` only.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from ir_nodes import settings
from lazy_backend import native

SOURCE = native.SOURCES / "accelerator.c"
ISSUE = "https://github.com/pytorch/pytorch/issues/161129"


class AcceleratorError(RuntimeError):
    """Backward over CUDA tensors would fail in this process once the device is registered. The text says why."""


def keep_cuda() -> None:
    """Let CUDA stay the autograd engine's accelerator; see csrc/accelerator.c. Nothing to do where torch has no CUDA, or no
    driver to run it with: what asks for the accelerator would get one there that fails.

    Raises AcceleratorError.
    """
    if torch.version.cuda is None or not has_driver():
        return
    try:
        library = ctypes.CDLL(str(build()))
    except (native.NativeBuildError, OSError) as error:
        raise AcceleratorError(f"lazysched can't keep CUDA's autograd working beside its device ({ISSUE}): {error}") from error
    folder = Path(torch.__file__).parent / "lib"
    libraries = [str(folder / f"libtorch_{part}.so").encode() for part in ("cpu", "python")]
    if library.lazysched_keep_cuda(*libraries) != 1:
        raise AcceleratorError(
            f"lazysched does not know this build of torch {torch.__version__}: "
            f"backward over CUDA tensors fails beside it ({ISSUE})"
        )


def has_driver() -> bool:
    """Is NVIDIA's driver installed? It is loaded at most, not initialised: a forked child could not use it then."""
    try:
        return ctypes.CDLL("libcuda.so.1") is not None
    except OSError:
        return False


def build() -> Path:
    """The compiled shim: one small C file without torch's headers, a fraction of a second. Raises NativeBuildError, OSError."""
    compiler = native.find_compiler(settings.current().cxx)
    flags = ["-x", "c", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
    key = native.digest(SOURCE.read_bytes(), *map(str.encode, (*compiler, *flags)))
    folder = native.writable(settings.current().cache_dir / "native")
    target = folder / f"accelerator-{key}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            part = Path(scratch) / target.name
            result = subprocess.run(
                [*compiler, *flags, str(SOURCE), "-o", str(part), "-ldl"], capture_output=True, text=True, check=False
            )
            if result.returncode:
                raise native.NativeBuildError(result.stderr[:500])
            os.replace(part, target)
    return target
