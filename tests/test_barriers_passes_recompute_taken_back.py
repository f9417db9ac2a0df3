"""Copies that recomputation takes back: what they stood for is there."""

from __future__ import annotations

from graphs import record

from barriers.passes import recompute
from barriers.passes.cse import merge_common
from barriers.passes.dead import eliminate_dead
from barriers.passes.fold import forward_copies
from barriers.passes.recompute import recompute_cheap
from benchmarks.compositions import Composition
from codegen.partition import partition
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify


def test_a_program_of_which_all_copies_are_taken_back_behind_some_that_join_nothing() -> None:
    """What they stood for had been dropped, so that what read it was left with nothing."""
    composition = Composition(2058, (1024, 128, 4), 1 << 24)
    recording, _ = record(lambda *given: composition(given), *composition.inputs("cpu"))
    graph, remarks = merge_common(forward_copies(recording.graph)), Remarks()
    verify(recompute_cheap(eliminate_dead(graph), partition, remarks))
    assert {recompute.JOINS_NOTHING, recompute.MOVES_MORE} <= {remark.why for remark, _ in remarks.all()}
