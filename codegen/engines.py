"""The table of engines by name. Imports `codegen` only."""

from __future__ import annotations

import importlib

from codegen.engine import Engine, aten

NAMES = ("aten", "triton")


def engine(name: str) -> Engine:
    """The engine called ``name``. Raises KeyError, or ImportError where Triton is not installed."""
    if name == "aten":
        return aten
    if name == "triton":
        # Triton takes a second to import, which a program that never compiles a kernel should not wait for.
        return importlib.import_module("codegen.triton_engine").triton
    raise KeyError(name)
