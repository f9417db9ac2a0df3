"""The back ends' one interface: can fuse, fuse, generate, estimate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graphs import record
from recording import Recording

from codegen.engine import Context
from codegen.engines import MODULES, engine
from ir_nodes.estimate import CPU


def recorded() -> Recording:
    found, _ = record(lambda x: (x.tanh() * 2).exp() @ x, torch.rand(8, 8))
    for node in found.graph.nodes:
        node.instr = node.index
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_back_end_fuses_estimates_and_generates(name: str, tmp_path: Path) -> None:
    recording = recorded()
    graph, context, back = recording.graph, Context(False, 0, tmp_path, numbers=recording.scalars), engine(name)
    tanh, _, exp, product = graph.nodes
    plan = back.fuse(graph, context)
    assert 0 < back.estimate(plan, CPU) < 1
    assert {"aten": "one op at a time", "triton": "", "inductor": ""}[name] in back.can_fuse(tanh, exp, context)
    assert bool(back.can_fuse(exp, product, context)) == (name != "inductor")
    if name == "inductor":
        assert [len(run.nodes) for run, _ in plan] == [4]  # compiling it is for tests/test_codegen_inductor.py
        return
    emits, _ = back.generate(graph, plan, context)
    assert len(emits) == {"aten": 4, "triton": 2}[name]


def test_fusing_more_is_estimated_to_take_less() -> None:
    recording = recorded()
    context = Context(False, 0, Path(), numbers=recording.scalars)
    times = {name: engine(name).estimate(engine(name).fuse(recording.graph, context), CPU) for name in MODULES}
    assert times["aten"] > times["triton"] > times["inductor"]
