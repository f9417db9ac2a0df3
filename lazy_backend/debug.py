"""Shows what is recorded for tensors, without running it. Imports torch, `ir_nodes` and `lazy_backend` parts below it."""

from __future__ import annotations

from typing import Iterable

import torch

from barriers.pipeline import run_passes
from ir_nodes import Graph, printer
from lazy_backend import core
from lazy_backend.layouts import parts
from lazy_backend.trace import to_graph

Tensors = torch.Tensor | Iterable[torch.Tensor]


def graph(tensors: Tensors) -> Graph:
    """The graph that a barrier would run if only ``tensors`` were wanted. Nothing runs.

    Raises ValueError where they are not lazysched tensors of one device.
    """
    every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    devices = {t.device for t in every}
    if len(devices) != 1 or next(iter(devices)).type != "lazysched":
        raise ValueError(f"expected lazysched tensors of one device, got {sorted(map(str, devices)) or 'none'}")
    device = devices.pop()
    held = [part for one in every for part in parts(one) if part.device == device]
    return run_passes(to_graph(core.get().trace_for(held, device.index)))[0]


def text(tensors: Tensors) -> str:
    """The recorded ops behind ``tensors``, a line each, with the lines of Python that recorded them."""
    return printer.text(graph(tensors))


def dot(tensors: Tensors) -> str:
    """The same as Graphviz source."""
    return printer.dot(graph(tensors))


def fx_graph(tensors: Tensors) -> torch.fx.GraphModule:
    """The same as a `torch.fx.GraphModule` that runs on plain tensors; see `ir_nodes.printer.to_fx` for its inputs."""
    return printer.to_fx(graph(tensors))
