"""When it runs, and in which order: why recordings end, and the passes over them. Imports `ir_nodes` only."""

from barriers.barrier import Barrier, BarrierKind, BarrierLog
from barriers.pipeline import PASSES, PassRun, run_passes

__all__ = ["PASSES", "Barrier", "BarrierKind", "BarrierLog", "PassRun", "run_passes"]
