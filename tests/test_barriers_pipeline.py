"""The loop around the passes: order, reports, verification that names the culprit, and the observer."""

from __future__ import annotations

import pytest
import torch

from barriers import PASSES, PassRun, run_passes
from ir_nodes import Graph
from ir_nodes.verify import VerificationError
from tests.recording import Recorder


def recorded() -> Graph:
    x = torch.randn(4)
    with Recorder() as recorder:
        y = x.sin()
        y.detach().copy_(y.detach().clone())
        torch.ops.aten.copy_(y, y.detach())
        x.exp().log()
    return recorder.finish([y]).graph


def test_the_listed_passes_run_in_order_and_report_what_they_removed() -> None:
    graph, runs = run_passes(recorded(), check=True)
    wanted = {"eliminate_noops": (6, 1), "drop_kept_states": (5, 0), "eliminate_dead": (5, 2)}
    assert [run.name for run in runs] == [step.__name__ for step in PASSES] == list(wanted)
    assert [(run.nodes_before, run.removed) for run in runs] == list(wanted.values())
    assert [node.name for node in graph.nodes] == ["sin", "clone", "copy_"]
    assert all(run.milliseconds >= 0 for run in runs)


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    def forget_a_node(graph: Graph) -> Graph:
        graph.nodes.pop(0)
        return graph

    with pytest.raises(VerificationError, match="after forget_a_node: "):
        run_passes(recorded(), [forget_a_node], check=True)
    graph, _ = run_passes(recorded(), [forget_a_node])
    assert len(graph.nodes) == 5, "without check nothing looks"


def test_a_broken_recording_is_not_blamed_on_a_pass() -> None:
    graph = recorded()
    graph.nodes.reverse()
    with pytest.raises(VerificationError, match="after recording: "):
        run_passes(graph, check=True)


def test_a_pass_may_return_another_graph() -> None:
    other = Graph()
    graph, runs = run_passes(recorded(), [lambda graph: other])
    assert graph is other and runs[0].removed == 6


def test_the_observer_sees_each_pass_and_its_graph() -> None:
    seen: list[tuple[str, int]] = []

    def observe(run: PassRun, graph: Graph) -> None:
        seen.append((run.name, len(graph.nodes)))

    run_passes(recorded(), observe=observe)
    assert seen == [("eliminate_noops", 5), ("drop_kept_states", 5), ("eliminate_dead", 3)]


def test_a_run_prints_as_a_line() -> None:
    assert str(PassRun("eliminate_dead", 1.234, 10, 7)) == "eliminate_dead: 10 -> 7 nodes, 1.23 ms"
