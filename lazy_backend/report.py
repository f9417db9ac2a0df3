"""The report that a user reads after a run. Imports torch, `barriers` and `lazy_backend` parts below it."""

from __future__ import annotations

import torch._lazy.metrics

from lazy_backend import api, core


def metrics_report() -> str:
    """Graphs compiled, cache hits, nodes and kernels per run, ops that fell back, and why each barrier fired, as text."""
    if not core.is_started():
        return "lazysched: the device has not been used"
    counts = api.stats()
    runs = max(counts["flushes"], 1)
    rows = [
        ("ops recorded", f"{counts['recorded']:,}"),
        ("recordings run", f"{counts['flushes']:,}"),
        ("graphs compiled", f"{counts['compiles']:,}"),
        ("cache hits", f"{counts['cache_hits']:,}"),
        ("executables dropped from the cache", f"{counts['evicted']:,}"),
        ("steps run (ATen calls and kernels)", f"{counts['nodes_run']:,} ({counts['nodes_run'] / runs:.1f} a recording)"),
        ("Triton kernels launched on a GPU", f"{counts['kernels_run']:,} ({counts['kernels_run'] / runs:.1f} a recording)"),
        ("dead ops never run", f"{counts['nodes_dead']:,}"),
        ("shapes inferred", f"{counts['shape_inferences']:,}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = ["lazysched", *(f"  {name:<{width}}  {value}" for name, value in rows), "", "why each barrier fired"]
    lines += [f"  {line}" for line in api.barrier_log.table().splitlines()]
    return "\n".join([*lines, "", *fallback_lines()])


def fallback_lines() -> list[str]:
    """Ops that could not be recorded, most frequent first."""
    names = [name for name in torch._lazy.metrics.counter_names() if "::" in name]
    if not names:
        return ["ops that fell back: none"]
    counted = sorted(((torch._lazy.metrics.counter_value(name), name) for name in names), reverse=True)
    return ["ops that fell back (run at once, not recorded)", *(f"  {count:>8,}  {name}" for count, name in counted)]
