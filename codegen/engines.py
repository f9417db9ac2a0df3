"""The table of engines by name. Imports `codegen` only."""

from __future__ import annotations

import importlib

from codegen.engine import BackEnd

# Modules, not functions: Triton takes a second to import, which a program that compiles no kernel should not wait for.
MODULES = {"aten": "codegen.engine", "triton": "codegen.triton_engine", "inductor": "codegen.inductor_engine"}


def engine(name: str) -> BackEnd:
    """The engine called ``name``. Raises KeyError, or ImportError where what it needs is not installed."""
    found: BackEnd = getattr(importlib.import_module(MODULES[name]), name)
    return found
