"""Builds the C++ core in csrc/ once and imports it. Imports torch and `ir_nodes.settings` only.

A build is keyed by torch, Python, sources, flags and compiler. Objects are keyed per file, so an edit recompiles one file.
A file lock, which the system drops when its holder dies, lets one of many processes build; os.replace publishes the result.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import filelock
import torch

from ir_nodes import settings
from ir_nodes.locks import Lock

NAME = "lazysched_core"
TORCH = Path(torch.__file__).resolve().parent  # asked here: torch.utils.cpp_extension imports setuptools, which may be missing
SOURCES = Path(__file__).resolve().parent / "csrc"
APART = ("accelerator.c",)  # built by whoever needs it
CPP_ONLY = ("-std=c++20", "-fvisibility-inlines-hidden")
KEPT_BUILDS, KEPT_OBJECTS = 8, 200
MAX_JOBS = 8
SECONDS_A_FILE = 15  # torch's headers at -O2 on a slow core
INSTALL_COMPILER = "install one (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`) or name it in CXX"
INSTALL_PYTHON_H = "install Python's headers (Debian, Ubuntu: `apt install python3-dev`; Fedora: `dnf install python3-devel`)"

_loading = Lock()


class NativeBuildError(RuntimeError):
    """The native core can't be built here. The text says why and what to do."""


def load() -> ModuleType:
    """The native core, built first where there is no build for this torch, Python, compiler and sources.

    Raises NativeBuildError.
    """
    with _loading:
        if NAME not in sys.modules:
            sys.modules[NAME] = import_library(ensure(Build.plan(SOURCES, NAME), settings.current().cache_dir / "native"), NAME)
        return sys.modules[NAME]


@dataclass(frozen=True, slots=True)
class Build:
    """All that decides what a build gives."""

    name: str
    sources: tuple[Path, ...]
    headers_hash: str
    compiler: tuple[str, ...]
    compiler_version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @staticmethod
    def plan(folder: Path, name: str) -> Build:
        """The build of every .cpp and .c file in ``folder`` into a Python module ``name``. Raises NativeBuildError."""
        sources = tuple(sorted(file for file in folder.glob("*.c*") if file.suffix in (".cpp", ".c") and file.name not in APART))
        if not sources:
            raise NativeBuildError(f"no C++ sources in {folder}: lazysched is not installed completely")
        headers = [part for file in sorted(folder.glob("*.h")) for part in (file.name.encode(), file.read_bytes())]
        compiler = find_compiler(settings.current().cxx)
        flags = compile_flags(name) + (f"-I{folder}",)
        return Build(name, sources, digest(*headers), compiler, version_of(compiler), flags, link_flags())

    def flags_for(self, source: Path) -> tuple[str, ...]:
        """C++ compilers take .c files for C++ unless they are told."""
        if source.suffix == ".cpp":
            return self.compile_flags
        return ("-x", "c", *(flag for flag in self.compile_flags if flag not in CPP_ONLY))

    def object_key(self, source: Path) -> str:
        flags = [flag for flag in self.flags_for(source) if flag != f"-I{source.parent}"]  # its headers are hashed instead
        return digest(source.name.encode(), source.read_bytes(), self.headers_hash.encode(), self.compiler_version.encode(),
                      *(flag.encode() for flag in flags))

    def key(self) -> str:
        """Name of the build's folder: readable torch version and Python tag, then a hash of everything else."""
        parts = [self.object_key(source).encode() for source in self.sources] + [flag.encode() for flag in self.link_flags]
        return f"{torch.__version__}-{sys.implementation.cache_tag}-{digest(*parts)}"


def digest(*parts: bytes) -> str:
    """Twenty hex digits that tell any two lists of ``parts`` apart."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()[:20]


def find_compiler(wanted: str) -> tuple[str, ...]:
    """The command of the C++ compiler: ``wanted`` (may carry arguments) or the first one found. Raises NativeBuildError."""
    for candidate in [wanted] if wanted else ["c++", "g++", "clang++"]:
        words = shlex.split(candidate)
        path = shutil.which(words[0])
        if path:
            return (path, *words[1:])
    if wanted:
        raise NativeBuildError(f"lazysched compiles its native core once, but CXX={wanted!r} is not found")
    raise NativeBuildError(f"lazysched compiles its native core once and finds no C++ compiler: {INSTALL_COMPILER}")


def version_of(compiler: tuple[str, ...]) -> str:
    result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise NativeBuildError(f"`{shlex.join(compiler)} --version` fails: {result.stderr.strip()[:300]}; {INSTALL_COMPILER}")
    return " ".join(compiler[1:]) + result.stdout


def compile_flags(name: str) -> tuple[str, ...]:
    """Torch 2.13 builds itself as C++20, and the headers of 2.11 take it too."""
    torch_includes = (TORCH / "include", TORCH / "include" / "torch" / "csrc" / "api" / "include")
    includes = [*map(str, torch_includes), sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return ("-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
            f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_API_INCLUDE_EXTENSION_H", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            *(f"-isystem{path}" for path in dict.fromkeys(includes)))


def link_flags() -> tuple[str, ...]:
    """The C++ runtime that torch runs on comes first: some toolchains link a static one, whose streams crash beside it."""
    where = (f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}")
    return ("-shared", *loaded_runtime(), *where, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


def loaded_runtime() -> list[str]:
    """Path of the libstdc++ that this process has loaded, if any."""
    with open("/proc/self/maps") as maps:
        paths = [line.split(maxsplit=5)[5].strip() for line in maps if "/libstdc++.so" in line]
    return list(dict.fromkeys(paths))[:1]


def ensure(build: Build, root: Path) -> Path:
    """Path of the built library below ``root``, or below a temporary folder where ``root`` can't be written.

    Raises NativeBuildError.
    """
    library = root / build.key() / f"{build.name}.so"
    if library.exists():
        return library
    root = writable(root)
    library = root / build.key() / f"{build.name}.so"
    lock = filelock.FileLock(root / f"{build.key()}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say("another process is compiling the native core, waiting for it ...")
        lock.acquire()
    try:
        if not library.exists():
            make(build, library)
            prune(root)
    finally:
        lock.release()
    return library


def writable(root: Path) -> Path:
    """``root``, or with a warning a folder that this user can write."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
        return root
    except OSError as error:
        fallback = temporary_root()
        warnings.warn(f"lazysched can't write its cache {root} ({error.strerror}) and uses {fallback}; "
                      "LAZYSCHED_CACHE_DIR names another folder", stacklevel=2)
        return fallback


def temporary_root() -> Path:
    """A folder that later processes of this user find again, unless somebody else made it."""
    path = Path(tempfile.gettempdir()) / f"lazysched-{os.getuid()}" / "native"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        owner = path.parent.lstat()
        if stat.S_ISDIR(owner.st_mode) and owner.st_uid == os.getuid() and not owner.st_mode & 0o022:
            path.mkdir(exist_ok=True)
            return path
    except OSError:
        pass  # then a private one
    return Path(tempfile.mkdtemp(prefix="lazysched-"))


def make(build: Build, library: Path) -> None:
    """Compile and link in a temporary folder, then move the library to its place. Raises NativeBuildError."""
    root = library.parent.parent
    (root / "objects").mkdir(exist_ok=True)
    objects = {source: root / "objects" / f"{source.stem}-{build.object_key(source)}.o" for source in build.sources}
    missing = [source for source, target in objects.items() if not target.exists()]
    missing.sort(key=lambda source: -source.stat().st_size)  # the longest first, so that none is left running alone
    jobs = min(MAX_JOBS, len(os.sched_getaffinity(0)))
    seconds = SECONDS_A_FILE * -(-len(missing) // jobs) + 5
    say(f"compiling its native core (once for torch {torch.__version__}, about {seconds} s) ...")
    start = time.monotonic()
    log = root / f"{build.key()}.log"
    for old in root.glob(f"{build.key()}.tmp-*"):  # of a builder that died: the lock is ours
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{build.key()}.tmp-", dir=root) as folder, ThreadPoolExecutor(jobs) as pool:
        futures = []
        for source in missing:
            part = Path(folder) / f"{source.stem}.o"
            command = [*build.compiler, *build.flags_for(source), "-c", str(source), "-o", str(part)]
            futures.append(pool.submit(step, command, part, objects[source], log))
        for future in futures:
            if future.exception() is not None:
                pool.shutdown(wait=True, cancel_futures=True)
            future.result()
        part = Path(folder) / library.name
        library.parent.mkdir(exist_ok=True)
        step([*build.compiler, *map(str, objects.values()), *build.link_flags, "-o", str(part)], part, library, log)
    say(f"native core ready after {time.monotonic() - start:.0f} s")


def step(command: list[str], part: Path, target: Path, log: Path) -> None:
    """Run a compiler or linker, then move its output ``part`` to ``target``. Raises NativeBuildError."""
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    text = result.stdout.decode(errors="replace")
    if result.returncode == 0:
        os.replace(part, target)
        return
    log.write_text(f"{shlex.join(command)}\n\n{text}")
    raise NativeBuildError(explain(text, result.returncode, log))


def explain(output: str, code: int, log: Path) -> str:
    """What failed, from the compiler's ``output`` and exit ``code``, and what to do."""
    if re.search(r"Python\.h.*(No such file|not found)", output):
        return f"lazysched compiles its native core once and Python.h is missing: {INSTALL_PYTHON_H} (log: {log})"
    lines = [line for line in output.splitlines() if re.search(r"error|undefined reference|cannot find", line)][:5]
    lines = lines or output.splitlines()[-5:]
    killed = "; the compiler was killed, perhaps for want of memory" if code < 0 or "Killed" in output else ""
    return f"compiling lazysched's native core failed{killed} (log: {log}):\n" + "\n".join(lines)


def prune(root: Path) -> None:
    """Keep only the newest builds and objects, so that edits and upgrades don't fill the disk."""
    builds = [path for path in root.iterdir() if path.is_dir() and path.name != "objects" and ".tmp-" not in path.name]
    for kept, paths in ((KEPT_BUILDS, builds), (KEPT_OBJECTS, list((root / "objects").iterdir()))):
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[kept:]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def import_library(path: Path, name: str) -> ModuleType:
    """The Python module ``name`` in the library ``path``. Raises NativeBuildError where it does not load."""
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise NativeBuildError(f"{path} does not load: {error}; delete the folder {path.parent} to build it again") from error
    return module


def say(text: str) -> None:
    print(f"lazysched: {text}", file=sys.stderr, flush=True)
