"""What an engine is, and the aten engine. Imports torch, `ir_nodes` and `codegen.executable` only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from codegen.executable import Emit, emit_call
from ir_nodes import Graph


class EngineError(RuntimeError):
    """An engine can't serve a graph. The text names the kernel or folder and the cause."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an engine is told: where it runs, where it may keep files."""

    cuda: bool
    device: int
    kernel_dir: Path
    show: Callable[[str], None] | None = None  # told each generated source, under a debug level
    draws: bool = False  # can launches be given a generator's seed and offset?


Engine = Callable[[Graph, Context], tuple[list[Emit], list[int]]]
"""Gives the steps of a program and the bytes of each temporary that they share."""


def aten(graph: Graph, context: Context) -> tuple[list[Emit], list[int]]:
    """Each node is one ATen call, in graph order: right on any device, and what others fall back to."""
    return [emit_call(node) for node in graph.nodes], []
