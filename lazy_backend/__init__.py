"""The device `lazysched` as users see it: `import lazy_backend`, then `model.to("lazysched")`."""

from __future__ import annotations

from pathlib import Path

import barriers
import codegen
import ir_nodes

for _sibling in (barriers, codegen, ir_nodes):
    if Path(_sibling.__file__ or "").resolve().parent.parent != Path(__file__).resolve().parent.parent:
        raise ImportError(
            f"lazysched needs its own package {_sibling.__name__!r}, but another one is found first: {_sibling.__file__}. "
            "Remove that folder from sys.path or uninstall it."
        )

from lazy_backend import debug, flush
from lazy_backend.api import (
    barriers as barriers_fired,
    mark_step,
    stats,
    sync,
    wait_device_ops,
)
from lazy_backend.device import register
from lazy_backend.report import metrics_report

barriers = barriers_fired  # the user's function hides the package of the same name

register()

__all__ = ["barriers", "debug", "mark_step", "metrics_report", "stats", "sync", "wait_device_ops"]


