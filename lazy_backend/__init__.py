"""The device `lazysched` as users see it: `import lazy_backend`, then `model.to("lazysched")`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

for _name in ("ir_nodes", "barriers", "codegen"):
    _spec = find_spec(_name)
    _found = "nothing" if _spec is None else _spec.origin or str(_spec.submodule_search_locations)
    if Path(_found).resolve().parent.parent != Path(__file__).resolve().parent.parent:
        raise ImportError(
            f"lazysched needs its own package {_name!r}, but this is found first: {_found}. "
            "Remove that folder from sys.path or uninstall it."
        )

from barriers.policies import earliest, latest, min_peak_memory, overlap_communication, program_order
from barriers.recorded import Before, Early, Late, Overlap, Recorded, RecordedSegment
from lazy_backend import autocast as _autocast  # noqa: F401  (begins with the core)
from lazy_backend import debug, factors, flush, graphs, infer, kernels, layouts, recurrent  # noqa: F401  (all but debug give the core what it calls)
from lazy_backend import meta_kernels as _meta_kernels  # noqa: F401  (begins with the core)
from lazy_backend import schedule_file as _schedule_file
from lazy_backend.api import barriers, mark_step, stats, sync, wait_device_ops
from lazy_backend.device import register
from lazy_backend.distributed import group as _group
from lazy_backend.explain import explain
from lazy_backend.orders import register_schedule_hook
from lazy_backend.replaying import replayed
from lazy_backend.report import metrics_report
from lazy_backend.scheduler import LazyScheduler, ScheduleError
from lazy_backend.segments import (
    register_segment,
    register_segment_backward_hook,
    register_segment_backward_pre_hook,
    register_segment_forward_hook,
    register_segment_forward_pre_hook,
    register_segments,
    segment,
)

register()
_group.install()
_schedule_file.install()

__all__ = [
    "Before", "Early", "Late", "LazyScheduler", "Overlap", "Recorded", "RecordedSegment", "ScheduleError", "barriers", "debug",
    "earliest", "explain", "latest", "mark_step", "metrics_report", "min_peak_memory", "overlap_communication", "program_order",
    "register_schedule_hook", "register_segment", "register_segment_backward_hook", "register_segment_backward_pre_hook",
    "register_segment_forward_hook", "register_segment_forward_pre_hook", "register_segments", "replayed", "segment", "stats",
    "sync", "wait_device_ops",
]
