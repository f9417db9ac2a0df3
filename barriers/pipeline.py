"""The one list of passes and the loop around it. Imports `ir_nodes` and `barriers.passes` only.

A graph passes through twice. What nobody needs goes before anybody asks in which order the rest shall run. What makes one node
depend on another, or looks at what lies between two, comes once that order is known.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Sequence

from barriers.passes.attention_rows import lay_gradients
from barriers.passes.bridges import back_to_rows, run_by_aten
from barriers.passes.channels_last import permute_images
from barriers.passes.conv_bias import add_biases
from barriers.passes.conv_gradients import sum_gradients
from barriers.passes.cse import merge_common
from barriers.passes.dead import eliminate_dead
from barriers.passes.epilogues import join_relus
from barriers.passes.fold import forward_copies
from barriers.passes.hold_less import hold_less
from barriers.passes.inbox import use_inbox
from barriers.passes.join_gradients import join_gradients
from barriers.passes.join_products import join_products
from barriers.passes.kept_states import drop_kept_states
from barriers.passes.memory_budget import fit_budget
from barriers.passes.noops import eliminate_noops
from barriers.passes.own_part import read_own_part
from barriers.passes.pack_masks import pack_masks
from barriers.passes.peak_order import lower_peak
from barriers.passes.product_bias import part_biases
from barriers.passes.product_sums import sum_products
from barriers.passes.reader_order import lay_for_readers
from barriers.passes.recompute import recompute_cheap
from ir_nodes import Graph, settings
from ir_nodes.kernels import Partition, traffic
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify

Pass = Callable[[Graph], Graph]
Observer = Callable[["PassRun", Graph], None]

PASSES: tuple[Pass, ...] = (
    eliminate_noops,
    drop_kept_states,
    eliminate_dead,
)
"""On the order in which the program recorded."""


def ordered_passes(partition: Partition | None = None, remarks: Remarks | None = None, replays: bool = False,
                   gpu: bool = False, reorders: bool = False) -> list[Pass]:
    """The passes over an ordered graph that the settings allow, in the order in which nodes will run. ``partition``: tells what
    would share a kernel; None: nothing. ``remarks`` are told what each does. ``replays``: steps run as CUDA graphs, so that what
    only Python can call costs nothing once it is captured. ``gpu``: cuDNN runs convolutions. ``reorders``: sums may be added up,
    and rounded, otherwise than on another rank or in another run."""
    now = settings.current()
    other_bits = now.autotune and not now.templates and replays and reorders and partition is not None

    def attention_rows(graph: Graph) -> Graph:
        return lay_gradients(graph, remarks) if gpu else graph

    def fold(graph: Graph) -> Graph:
        return forward_copies(graph, remarks)

    def cse(graph: Graph) -> Graph:
        return merge_common(graph, remarks)

    def product_bias(graph: Graph) -> Graph:
        return part_biases(graph, remarks) if gpu and replays and partition is not None else graph

    def epilogues(graph: Graph) -> Graph:
        return join_relus(graph, remarks) if replays and partition is not None and not now.templates else graph

    def joint_products(graph: Graph) -> Graph:
        return join_products(graph, remarks) if other_bits else graph

    def joint_gradients(graph: Graph) -> Graph:
        return join_gradients(graph, remarks) if other_bits else graph

    def product_sums(graph: Graph) -> Graph:
        return sum_products(graph, remarks) if other_bits else graph

    def channels_last(graph: Graph) -> Graph:
        if not gpu or partition is None:
            return graph
        graph = permute_images(graph, remarks)
        back_to_rows(graph, run_by_aten(graph, partition))
        return graph

    def conv_bias(graph: Graph) -> Graph:
        return add_biases(graph, remarks) if replays and partition is not None else graph

    def conv_gradients(graph: Graph) -> Graph:
        return sum_gradients(graph, remarks) if replays and partition is not None else graph

    def own_part(graph: Graph) -> Graph:
        return read_own_part(graph, remarks, kernels=partition is not None)

    def inbox(graph: Graph) -> Graph:
        return use_inbox(graph, remarks)

    def reader_order(graph: Graph) -> Graph:
        return lay_for_readers(graph, remarks) if partition is not None else graph

    def recompute(graph: Graph) -> Graph:
        if partition is not None:
            return recompute_cheap(graph, partition, remarks)
        if remarks is not None:
            remarks.refused("recompute", "", "the engine in force runs ops one by one, so that no kernel would be spared a read")
        return graph

    def peak_order(graph: Graph) -> Graph:
        return lower_peak(graph, lambda one: traffic(one, partition(one)) if partition is not None else 0, remarks)

    def spare(graph: Graph) -> Graph:
        return hold_less(graph, partition, remarks) if partition is not None else graph

    def packed_masks(graph: Graph) -> Graph:
        return pack_masks(graph, partition, remarks) if partition is not None else graph

    def memory_budget(graph: Graph) -> Graph:
        return fit_budget(graph, now.memory_budget, partition, remarks)

    passes: tuple[tuple[str, Pass], ...] = (
        ("fold", fold), ("fold", eliminate_dead), ("cse", cse), ("", attention_rows),
        ("product_bias", product_bias), ("epilogues", epilogues),
        ("join_products", joint_products), ("join_products", joint_gradients), ("product_sums", product_sums),
        ("channels_last", channels_last), ("conv_bias", conv_bias), ("conv_gradients", conv_gradients),
        ("own_part", own_part), ("copy_engines", inbox),
        ("reader_order", reader_order), ("recompute", recompute), ("peak_order", peak_order), ("hold_less", spare),
        ("packed_masks", packed_masks),
    )
    allowed = [step for name, step in passes if not name or settings.enabled(name)]  # without a name: numbers would be wrong
    return [*allowed, memory_budget] if now.memory_budget else allowed


class PassFailed(RuntimeError):
    """An optimisation raised, which names it; the graph is half rewritten. The cause is what it raised."""


@dataclass(frozen=True, slots=True)
class PassRun:
    """What one pass did: its name, how long it took in milliseconds, and the node counts around it."""

    name: str
    milliseconds: float
    nodes_before: int
    nodes_after: int

    @property
    def removed(self) -> int:
        return self.nodes_before - self.nodes_after

    def __str__(self) -> str:
        return f"{self.name}: {self.nodes_before} -> {self.nodes_after} nodes, {self.milliseconds:.2f} ms"


def run_passes(
    graph: Graph, passes: Sequence[Pass] = PASSES, check: bool = False, observe: Observer | None = None
) -> tuple[Graph, list[PassRun]]:
    """Run ``passes`` in order; ``check`` verifies the graph before and after each, ``observe`` sees the graph after each.

    Returns the last graph and one `PassRun` for each pass. Raises PassFailed, and VerificationError, which names the pass, under
    ``check``.
    """
    if check:
        verify(graph)
    runs: list[PassRun] = []
    for step in passes:
        before, start = len(graph.nodes), time.perf_counter()
        try:
            graph = step(graph)
        except Exception as error:
            raise PassFailed(f"the pass {step.__name__} failed, {type(error).__name__}: {error}") from error
        runs.append(PassRun(step.__name__, (time.perf_counter() - start) * 1e3, before, len(graph.nodes)))
        if check:
            verify(graph, after=step.__name__)
        if observe is not None:
            observe(runs[-1], graph)
    return graph, runs
