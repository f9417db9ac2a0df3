"""The inductor engine: layouts as views, nodes as functional ops, runs; and compiled programs against the CPU, in processes of
their own, because a program in the cache keeps the engine that made it."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import children
import hypothesis
import programs
import pytest
import torch
from graphs import float32, graph_of, node_of
from torch import nn

import lazy_backend
from codegen import inductor_engine, views
from codegen.engine import Context
from codegen.inductor_compile import InductorFailed
from codegen.inductor_trace import Untraceable, trace
from codegen.runs import part, stored
from ir_nodes import BufferKind, Graph, Layout, reference
from ir_nodes.replay import Replay
from lazy_backend import flush
from tests.device import DEVICE

CPU = torch.device("cpu")


# ---- a layout as a chain of views ---------------------------------------------------------------------------------------


def some_view(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """A few views of ``tensor``, one on the other."""
    for _ in range(draw.randint(0, 4)):
        kind, dim = draw.randrange(6), draw.randrange(max(tensor.dim(), 1))
        if kind == 0:
            tensor = tensor.permute(draw.sample(range(tensor.dim()), tensor.dim()))
        elif kind == 1 and tensor.dim():
            start = draw.randrange(tensor.shape[dim])
            tensor = tensor.narrow(dim, start, draw.randint(1, tensor.shape[dim] - start))
        elif kind == 2:
            tensor = tensor.unsqueeze(dim)
        elif kind == 3 and tensor.dim():
            tensor = tensor.select(dim, 0) if draw.random() < 0.5 else tensor.expand(2, *tensor.shape)
        elif kind == 4 and tensor.dim():
            tensor = tensor[..., ::2]
        elif tensor.is_contiguous():
            tensor = tensor.reshape(-1)
    return tensor


def test_a_layout_is_read_and_written_through_functional_views() -> None:
    draw, reached = random.Random(0), 0
    for _ in range(300):
        size = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
        base = torch.arange(float(torch.Size(size).numel())).reshape(size)
        held = base.permute(draw.sample(range(base.dim()), base.dim()))
        seen = some_view(draw, base)
        try:
            chain = views.chain(*(Layout(t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in (held, seen)))
        except views.NotAView:
            continue
        reached += 1
        assert torch.equal(views.read(chain, held), seen)
        if any(isinstance(view, views.Expand) for view in chain):
            continue
        new, wanted = torch.rand(seen.shape), base.clone()
        wanted.as_strided(seen.shape, seen.stride(), seen.storage_offset()).copy_(new)
        assert torch.equal(views.write(chain, base if held is base else held, new), wanted.as_strided(held.shape, held.stride()))
    assert reached > 270


# ---- runs ------------------------------------------------------------------------------------------------------------------


def test_others_come_first_and_what_a_compiler_takes_is_one_run() -> None:
    graph, nodes = graph_of("sin", "draw", "cos", "add")
    taken = [node for node in graph.nodes if node is not nodes["draw"]]
    assert [(run.together, len(run.nodes)) for run in part(graph, taken)] == [(False, 1), (True, 3)]
