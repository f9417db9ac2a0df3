"""Waits go right before their first reader, kernels keep off collectives, and no collective is dropped."""

from __future__ import annotations

import random

import torch

import lazy_backend.distributed.collectives  # noqa: F401  (defines the ops)
from barriers.collectives import join_launches, part_stages, release_waits, sink_waits, starts
from barriers.dependencies import predecessors
from barriers.passes.dead import eliminate_dead
from barriers.pipeline import ordered_passes, run_passes
from codegen.fuse import plan
from codegen.kernel import KernelStep
from codegen.partition import partition
from ir_nodes import Access, BufferKind, Graph, Layout, SegmentCall
from ir_nodes.node import Buffer
from ir_nodes.ops import info
from ir_nodes.verify import verify

FOUR = Layout.contiguous(torch.float32, (4,))


def fresh(graph: Graph, live: bool = False) -> Buffer:
    return graph.add_buffer(16, BufferKind.FRESH, live)


def given(graph: Graph) -> Buffer:
    return graph.add_buffer(16, BufferKind.INPUT, True)


def sin(graph: Graph, source: Buffer, live: bool = False) -> Buffer:
    made = fresh(graph, live)
    graph.record("aten::sin", [Access(source, FOUR)], [Access(made, FOUR, "w")])
    return made


def exchange(graph: Graph, source: Buffer, live: bool = False) -> Buffer:
    made = fresh(graph, live)
    graph.record("lazysched::all_to_all_single", [[Access(made, FOUR, "w")], [Access(source, FOUR)], [0, 2, 0], "", "0"])
    graph.record("lazysched::wait", [[Access(made, FOUR, "rw")], [Access(source, FOUR)]])
    return made


def reduce(graph: Graph, buffer: Buffer) -> None:
    graph.record("lazysched::all_reduce_", [[Access(buffer, FOUR, "rw")], [], [], "SUM", "0"])
    graph.record("lazysched::wait", [[Access(buffer, FOUR, "rw")], []])


def names(graph: Graph) -> str:
    return " ".join(node.name for node in graph.nodes)


def test_a_wait_stands_right_before_its_first_reader() -> None:
    graph = Graph()
    x, y = given(graph), given(graph)
    arrived = exchange(graph, x)
    sin(graph, y, live=True)
    sin(graph, y, live=True)
    sin(graph, arrived, live=True)
    sin(graph, arrived, live=True)
    sink_waits(graph)
    assert names(graph) == "all_to_all_single sin sin wait sin sin"


def test_whoever_overwrites_what_is_being_sent_waits_too() -> None:
    graph = Graph()
    x, y = given(graph), given(graph)
    exchange(graph, x, live=True)
    sin(graph, y, live=True)
    graph.record("aten::fill_.Scalar", [Access(x, FOUR, "w"), 1.0])
    sin(graph, y, live=True)
    sink_waits(graph)
    assert names(graph) == "all_to_all_single sin wait fill_ sin"


def test_what_nobody_reads_is_waited_for_at_the_end_and_never_dropped() -> None:
    graph = Graph()
    x = given(graph)
    exchange(graph, x)
    sin(graph, x, live=True)
    reduce(graph, sin(graph, x))
    graph = eliminate_dead(graph)
    sink_waits(graph)
    assert names(graph) == "all_to_all_single sin sin all_reduce_ wait wait"
    verify(graph)


def test_one_collective_on_the_result_of_another() -> None:
    graph = Graph()
    x = given(graph)
    reduce(graph, x)
    reduce(graph, x)
    sink_waits(graph)
    assert names(graph) == "all_reduce_ wait all_reduce_ wait"


def test_a_wait_belongs_to_no_segment() -> None:
    graph = Graph()
    exchange(graph, given(graph))
    for node in graph.nodes:
        node.segment = SegmentCall("sdd_fwd")
    assert release_waits(graph)
    assert [node.segment is None for node in graph.nodes] == [False, True]
    assert not release_waits(Graph())


def test_no_kernel_reaches_over_a_start_or_a_wait() -> None:
    graph = Graph()
    x = given(graph)
    before = sin(graph, x)
    arrived = exchange(graph, before)
    between = sin(graph, before)
    sin(graph, between, live=True)
    sin(graph, arrived, live=True)
    assert len([step for step in plan(graph).steps if isinstance(step, KernelStep)]) < 4  # they would be joined
    sink_waits(graph)
    part_stages(graph)
    steps = plan(graph).steps
    told = [" ".join(node.name for node in step.nodes) if isinstance(step, KernelStep) else step.node.name for step in steps]
    assert told == ["sin", "all_to_all_single", "sin sin", "wait", "sin"]


def test_sends_and_receives_side_by_side_start_together() -> None:
    graph = Graph()
    x, y = given(graph), given(graph)
    for name, outs, ins in (("send", [], [Access(x, FOUR)]), ("recv", [Access(y, FOUR, "w")], [])):
        graph.record(f"lazysched::{name}", [outs, ins, [1, 0], "", "0"])
        graph.record("lazysched::launch", [[Access(out.buffer, FOUR) for out in outs], ins, "0"])
        graph.record("lazysched::wait", [[Access(out.buffer, FOUR, "rw") for out in outs], ins])
    sin(graph, y, live=True)
    sink_waits(graph)
    join_launches(graph)
    assert names(graph) == "send recv launch launch wait sin wait"
    verify(graph)


def test_a_batch_of_sends_and_receives_is_one_group_of_steps_whatever_fuses_around_it() -> None:
    """Nothing comes between its parts: not work that was recorded with its readers, nor a copy for a kernel behind it."""
    graph = Graph()
    x, y, z = given(graph), given(graph), given(graph)
    sent, cheap = sin(graph, x), sin(graph, z)
    for name, outs, ins in (("send", [], [Access(sent, FOUR)]), ("recv", [Access(y, FOUR, "w")], []),
                            ("send", [], [Access(cheap, FOUR)])):
        graph.record(f"lazysched::{name}", [outs, ins, [1, 0], "", "0"])
        graph.record("lazysched::launch", [[Access(out.buffer, FOUR) for out in outs], ins, "0"])
        graph.record("lazysched::wait", [[Access(out.buffer, FOUR, "rw") for out in outs], ins])
    sin(graph, sin(graph, y), live=True)
    sin(graph, cheap, live=True)
    sink_waits(graph)
    join_launches(graph)
    part_stages(graph)
    graph = run_passes(graph, ordered_passes(partition))[0]
    steps = plan(graph).steps
    told = ["kernel" if isinstance(step, KernelStep) else step.node.name for step in steps]
    first = told.index("send")
    assert told[first : first + 6] == ["send", "recv", "send", "launch", "launch", "launch"]
    verify(graph)


def test_random_graphs_keep_data_flow_and_the_order_of_starts() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        graph = Graph()
        buffers = [given(graph) for _ in range(3)]
        for _ in range(rng.randint(1, 25)):
            source = rng.choice(buffers)
            kind = rng.random()
            if kind < 0.2:
                reduce(graph, source)
            elif kind < 0.5:
                buffers.append(exchange(graph, source, live=True))
            elif kind < 0.6:
                graph.record("aten::fill_.Scalar", [Access(source, FOUR, "w"), 1.0])
            else:
                buffers.append(sin(graph, source, live=True))
        order, waits = starts(graph), [node for node in graph.nodes if node.name == "wait"]
        sink_waits(graph)
        verify(graph)
        assert starts(graph) == order and sorted(map(id, waits)) == sorted(id(n) for n in graph.nodes if n.name == "wait")
        for place, (node, before) in enumerate(zip(graph.nodes, predecessors(graph))):
            assert all(other < place for other in before)
            if node.name == "wait" and place + 1 < len(graph.nodes):
                followers = predecessors(graph)[place + 1 :]
                at = next((at for at, needs in enumerate(followers) if place in needs), None)
                others = [graph.nodes[place + 1 + step].name for step in range(at or 0)]
                assert set(others) <= {"wait"} if at is not None else all(n.name == "wait" for n in graph.nodes[place:])


def test_the_table_knows_collectives() -> None:
    assert info("lazysched::all_reduce_").kind == "collective" and not info("lazysched::all_reduce_").write_only
    assert info("lazysched::all_gather").write_only and info("lazysched::wait").kind == "wait"
    assert not info("lazysched::wait").write_only
