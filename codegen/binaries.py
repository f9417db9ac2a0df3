"""Machine code of kernels on disk, by a key of our own: a warm process neither parses nor hashes what Triton would.

Imports triton, `ir_nodes.settings` and codegen's kernel modules.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import triton

from codegen.kernel import Kernel
from codegen.kernel_files import replace_file
from ir_nodes import settings

_MAGIC = b"lazysched kernel 1\n"


@dataclass(frozen=True, slots=True)
class Binary:
    """A kernel's machine code. ``shared``: bytes of dynamic shared memory."""

    name: str
    shared: int
    num_warps: int
    code: bytes


def binary_path(kernel: Kernel, arch: int, folder: Path) -> Path:
    """Where the code of ``kernel`` for compute capability ``arch`` belongs: the name carries a hash of all that it depends on."""
    digest = hashlib.sha256(repr((kernel, arch, toolchain(), settings.triton_variables())).encode()).hexdigest()[:24]
    return folder / f"{kernel.name}_{digest}.bin"


@functools.cache
def toolchain() -> tuple[object, ...]:
    """What tells one installed Triton from another without reading all of it: its version, and its library's size and date."""
    libraries = [file.stat() for file in sorted(Path(triton.__file__).parent.glob("_C/libtriton*")) if file.is_file()]
    return (triton.__version__, *((stat.st_size, stat.st_mtime_ns) for stat in libraries))


def pack(binary: Binary) -> bytes:
    """A file's content: a line that says what it is, one of facts, then the code."""
    facts = {"name": binary.name, "shared": binary.shared, "num_warps": binary.num_warps, "nbytes": len(binary.code),
             "sha256": hashlib.sha256(binary.code).hexdigest()}
    return _MAGIC + json.dumps(facts).encode() + b"\n" + binary.code


def unpack(data: bytes) -> Binary | None:
    """What `pack` packed, or None for anything else, a part of it included."""
    if not data.startswith(_MAGIC):
        return None
    head, _, code = data[len(_MAGIC) :].partition(b"\n")
    try:
        facts = json.loads(head)
        whole = len(code) == facts["nbytes"] and hashlib.sha256(code).hexdigest() == facts["sha256"]
        return Binary(str(facts["name"]), int(facts["shared"]), int(facts["num_warps"]), code) if whole else None
    except (ValueError, KeyError, TypeError):
        return None


def find(kernel: Kernel, arch: int, folder: Path) -> Binary | None:
    """The kernel's code, if a process has left it here whole."""
    try:
        return unpack(binary_path(kernel, arch, folder).read_bytes())
    except OSError:
        return None


def keep(kernel: Kernel, arch: int, folder: Path, binary: Binary) -> None:
    """Leave the code for other processes. Where the folder cannot be written, they compile again."""
    try:
        replace_file(binary_path(kernel, arch, folder), pack(binary))
    except OSError:
        pass
