"""Runs a function of a test module in a fresh process, under settings of its own. Imports `ir_nodes.settings` only.

The child asserts for itself; what it prints comes back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

from ir_nodes import settings

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]  # as for pytest


def run(program: str, *, paths: list[str] = PATHS, **values: Any) -> subprocess.CompletedProcess[str]:
    """``program`` in a fresh interpreter with ``paths`` first on its path and the settings ``values``, by field name."""
    environment = settings.child_environment(**values)
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=False)


def call(function: Callable[[], None], **values: Any) -> subprocess.CompletedProcess[str]:
    """``function()`` in a fresh process. Fails with the child's own error where that fails."""
    module = function.__module__.removeprefix("tests.")
    program = f"import torch; torch.set_num_threads(1); import tests.{module} as m; m.{function.__name__}()"
    done = run(program, **values)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done
