"""Lets PyTorch's shape functions in Python run without Dynamo. Imports torch and parts below it.

The core asks Meta kernels for shapes. PyTorch marks those that are Python as nothing to compile, and the mark imports Dynamo at
its first call: more than half of what `import torch` takes, at a program's first op. A mark looks for what it has kept of an
earlier call first, so it is given the function itself. Dynamo passes over frames of PyTorch's own files with or without a mark.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch._decomp

from lazy_backend import core
from lazy_backend.watched import is_full

_MARK = getattr(torch, "_disable_dynamo", lambda function: function)(lambda: None).__code__
"""Of every function that a mark makes of another one."""
_KEPT = "__dynamo_disable"
"""Where a mark keeps what it calls (torch/_compile.py)."""


def marked(function: Any, seen: set[int]) -> Iterator[FunctionType]:
    """What stands behind a mark among the functions that ``function`` wraps, itself among them; each once for all ``seen``."""
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        inner = cell.cell_contents if is_full(cell) else None
        if function.__code__ is _MARK and name == "fn" and isinstance(inner, FunctionType):
            yield inner
        yield from marked(inner, seen)


def free(native: ModuleType) -> None:
    """Takes the marks off all Meta kernels that PyTorch has written in Python, for good, unless Dynamo is there anyway."""
    if "torch._dynamo" in sys.modules:
        return
    seen: set[int] = set()
    for table in torch._decomp.global_decomposition_table.values():
        for kernel in table.values():
            for function in marked(kernel, seen):
                setattr(function, _KEPT, function)


core.at_start(free)
