"""Every LAZYSCHED_* setting: its type, default and meaning, read from the environment once. Imports `ir_nodes.optimisations`
and `ir_nodes.setting_values`.

The only file that reads environment variables. `current()` is what the other packages ask.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ir_nodes import setting_values as parse
from ir_nodes.optimisations import OPTIMISATIONS

PREFIX = "LAZYSCHED_"


class SettingsError(ValueError):
    """A setting that does not exist or has no valid value. The text names the variable, the value and what is valid."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The value of every setting; see `table()` for what each means."""

    engine: str
    device: str
    mode: str
    auto_barrier: bool
    start_early: str
    max_ops: int
    max_pending_bytes: int  # 0: chosen by the device
    memory_budget: int  # 0: none
    cache_dir: Path
    cache_size: int
    debug: frozenset[str]
    disable: frozenset[str]
    autotune: bool
    benchmark_fusion: bool
    templates: bool
    attention: str
    check_indices: bool
    verify: bool
    frames: bool
    schedule: Path | None
    cxx: str  # "": the first of c++, g++, clang++ that is found

    def code_key(self) -> tuple[Any, ...]:
        """The values that change generated code, for cache keys."""
        return tuple(getattr(self, row.field) for row in _ROWS if row.changes_code)


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. ``parse`` turns text into the value and raises ValueError where it can't; ``valid`` says what it takes."""

    variable: str
    field: str
    valid: str
    default: str  # as text, for the reader; "" for empty
    doc: str
    changes_code: bool
    parse: Callable[[str], Any]


def _default_cache(environment: Mapping[str, str]) -> str:
    base = environment.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else "~/.cache", "lazysched")


def _row(name: str, valid: str, default: str, parse: Callable[[str], Any], doc: str, changes_code: bool = False) -> Row:
    return Row(PREFIX + name.upper(), name, valid, default, doc, changes_code, parse)


_BOOL = "0, 1, false, true, off, on, no, yes"
_DEBUG = ("barriers", "kernels", "graph")
_ROWS = (
    _row("engine", "auto, aten, triton, inductor", "auto", parse.choice("auto", "aten", "triton", "inductor"),
         "what runs a graph; auto: triton on CUDA, aten on CPU; inductor: torch's own compiler, C++ on CPUs", changes_code=True),
    _row("device", "auto, cpu, cuda", "auto", parse.choice("auto", "cpu", "cuda"),
         "the physical device; auto: cuda if there is one, else cpu", changes_code=True),
    _row("mode", "lazy, eager", "lazy", parse.choice("lazy", "eager"), "eager runs every op at once, synchronously"),
    _row("auto_barrier", _BOOL, "1", parse.boolean, "a barrier at the end of `optimizer.step()`"),
    _row("start_early", "auto, always, never", "auto", parse.choice("auto", "always", "never"),
         "on a GPU that has nothing to do, a known step begins while it is recorded; always: on a busy one and a CPU, too"),
    _row("max_ops", "an integer above 0", "20000", parse.positive, "recorded ops that force a barrier"),
    _row("max_pending_bytes", "auto or bytes such as 4096, 64K, 512M, 2G", "auto", parse.nbytes,
         "bytes of unrun results that force a barrier; auto (or 0): chosen by the device"),
    _row("memory_budget", "none or bytes such as 512M, 20G", "none", parse.nbytes,
         "bytes that a step may hold, its inputs and results included, before values are computed again instead of being kept",
         changes_code=True),
    _row("cache_dir", "a path", "~/.cache/lazysched", parse.path,
         "folder of compiled code; by default in `$XDG_CACHE_HOME` where that is set"),
    _row("cache_size", "an integer above 0", "256", parse.positive,
         "executables kept in memory, the least recently used goes first"),
    _row("debug", "a comma-separated list of " + ", ".join(_DEBUG), "", parse.names(*_DEBUG),
         "prints each barrier with its reason, each generated kernel with its path, each graph"),
    _row("disable", "a comma-separated list of " + ", ".join(OPTIMISATIONS), "", parse.names(*OPTIMISATIONS),
         "optimisations to do without; `ir_nodes/optimisations.py` says what each does", changes_code=True),
    _row("autotune", _BOOL, "0", parse.boolean,
         "on a GPU, measures what is new to the machine: large kernels in several block sizes, and large products in 16 bits by "
         "the algorithms that cuBLASLt suggests, whose last bits may differ, as with `torch.backends.cudnn.benchmark`; products "
         "in 16 bits that are summed add up in place, rounded once a sum, those of one matrix run as one; such ones and those "
         "by another algorithm than PyTorch's do not begin early (`LAZYSCHED_START_EARLY`)",
         changes_code=True),
    _row("benchmark_fusion", _BOOL, "0", parse.boolean,
         "on a GPU, measures whether reductions are faster with or without the work before and after them", changes_code=True),
    _row("templates", _BOOL, "0", parse.boolean,
         "on a GPU, measures whether matrix products are faster in one kernel with what follows them", changes_code=True),
    _row("attention", "eager, triton", "eager", parse.choice("eager", "triton"),
         "triton: on a GPU, attention in kernels of our own; with dropout they drop other elements than eager mode's for a seed",
         changes_code=True),
    _row("check_indices", _BOOL, "1", parse.boolean,
         "kernels stop at an index out of range, as eager mode does", changes_code=True),
    _row("verify", _BOOL, "0", parse.boolean, "checks the IR after each pass"),
    _row("frames", _BOOL, "1", parse.boolean, "notes the user's source line for each op"),
    _row("schedule", "a path to a JSON file", "", parse.optional_path, "segments, hooks and a schedule for an unchanged program"),
    Row("CXX", "cxx", "a C++20 compiler", "", "the compiler of the native core; by default c++, g++ or clang++", False, str),
)
_BY_FIELD = {row.field: row for row in _ROWS}
_BY_VARIABLE = {row.variable: row for row in _ROWS}

_current: Settings | None = None
_usual: Settings | None = None  # what the environment asks for

changed: list[Callable[[], None]] = []
"""Called when a block with other settings begins, and when it has ended."""


def current() -> Settings:
    """The settings in force. Reads the environment at the first call. Raises SettingsError."""
    global _current, _usual
    if _current is None:
        _current = _usual = read(os.environ)
    return _current


def unusual() -> str:
    """Tells settings that change generated code from those of the environment; "" for these."""
    key = current().code_key()
    return "" if _usual is None or key == _usual.code_key() else f"settings {hash(key)}"


def enabled(optimisation: str) -> bool:
    """Whether ``optimisation``, a name in `ir_nodes.optimisations`, is in force."""
    assert optimisation in OPTIMISATIONS, optimisation
    return optimisation not in current().disable


def read(environment: Mapping[str, str]) -> Settings:
    """The settings that ``environment`` asks for. Raises SettingsError for an unknown LAZYSCHED_* or a malformed value."""
    for variable in environment:
        if variable.startswith(PREFIX) and variable not in _BY_VARIABLE:
            raise SettingsError(_unknown(variable, environment[variable], list(_BY_VARIABLE)))
    values = {}
    for row in _ROWS:
        default = _default_cache(environment) if row.field == "cache_dir" else row.default
        values[row.field] = _parse(row, environment.get(row.variable, default))
    return Settings(**values)


@contextlib.contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Other values, by field name, for the length of a ``with`` block; for tests. Holds for every thread of the process.

    Values are checked like the environment's: ``override(engine="aten", max_ops=10, debug={"graph"})``. Raises SettingsError.
    """
    global _current
    before = current()
    merged = {field: getattr(before, field) for field in _BY_FIELD}
    for field, value in values.items():
        if field not in _BY_FIELD:
            raise SettingsError(_unknown(field, value, list(_BY_FIELD)))
        merged[field] = _parse(_BY_FIELD[field], _as_text(value))
    _current = Settings(**merged)
    try:
        _tell()
        yield _current
    finally:
        _current = before
        _tell()


def _tell() -> None:
    for listener in changed:
        listener()


def child_environment(**values: Any) -> dict[str, str]:
    """This process's environment with other settings, by field name, to start a process with. Raises SettingsError."""
    environment = dict(os.environ)
    for field, value in values.items():
        if field not in _BY_FIELD:
            raise SettingsError(_unknown(field, value, list(_BY_FIELD)))
        environment[_BY_FIELD[field].variable] = _as_text(value)
    read(environment)
    return environment


def triton_variables() -> tuple[tuple[str, str], ...]:
    """The environment's variables for Triton that may change what it compiles, for cache keys."""
    where = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")
    return tuple(sorted((key, value) for key, value in os.environ.items() if key.startswith("TRITON_") and key not in where))


def processes_here() -> int:
    """How many processes of a distributed program share this machine, as torchrun says; 1 where nobody does."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


@contextlib.contextmanager
def variable(name: str, value: str, default: str) -> Iterator[None]:
    """Another library's variable ``name`` with ``value`` for a ``with`` block, unless the user has set it: ``default`` is what it
    sets itself."""
    before = os.environ.get(name)
    if before not in (None, default):
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def table() -> list[tuple[str, str, str, str, str]]:
    """Rows of (variable, valid values, default, meaning, "yes" where it changes generated code), in reading order."""
    return [(r.variable, r.valid, r.default, r.doc, "yes" if r.changes_code else "no") for r in _ROWS]


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (set, frozenset, tuple, list)):
        return ",".join(sorted(value))
    return str(value)


def _parse(row: Row, text: str) -> Any:
    try:
        return row.parse(text)
    except ValueError:
        raise SettingsError(f"{row.variable}={text!r} is not valid: it takes {row.valid}") from None


def _unknown(name: str, value: Any, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{name}={value!r}: there is no such setting{hint}. Valid: {', '.join(known)}"
