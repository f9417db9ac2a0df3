"""What was measured once on a machine, in small JSON files that processes share. Imports `codegen.kernel_files`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from codegen.kernel_files import replace_file


def choice_path(folder: Path, name: str, key: object) -> Path:
    """Where the choice called ``name`` belongs. ``key``: all that it depends on, as something whose `repr` says it."""
    return folder / f"{name}_{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"


def recall(folder: Path, name: str, key: object) -> dict[str, Any] | None:
    """What `remember` was told, if it is there and whole."""
    try:
        found = json.loads(choice_path(folder, name, key).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "choice" in found else None


def remember(folder: Path, name: str, key: object, facts: dict[str, Any]) -> None:
    """Keep ``facts``, of which "choice" is one. Where the folder cannot be written, the next process measures again."""
    try:
        replace_file(choice_path(folder, name, key), json.dumps(facts, indent=1).encode())
    except OSError:
        pass
