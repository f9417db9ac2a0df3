"""What tests of passes share: recordings full of repetition, and runs that show whether memory is still shared rightly. Imports
torch, `ir_nodes` and `tests.recording` only."""

from __future__ import annotations

from typing import Any

import torch

from ir_nodes import BufferKind, Graph, reference
from ir_nodes.replay import Replay
from ir_nodes.verify import verify
from tests.recording import Recorder, Recording


class SameNumbers(Recorder):
    """Equal numbers are one input, so that more nodes compute the same."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[float, Any] = {}

    def _access(self, target: str, index: int, arg: Any) -> Any:
        if not isinstance(arg, float):
            return super()._access(target, index, arg)
        if arg not in self._known:
            self._known[arg] = super()._access(target, index, arg)
        return self._known[arg]


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def assert_equals_eager(graph: Graph, recording: Recording) -> None:
    """Bit for bit, with values apart and with the values of a buffer in one memory."""
    verify(graph)
    given = {index: data for index, data in recording.inputs.items() if graph.buffers[index].kind is BufferKind.INPUT}
    shared = Replay(graph, given, recording.scalars, torch.device("cpu"))
    for node in graph.nodes:
        shared.execute(node)
    apart = reference.run(graph, recording.inputs, recording.scalars)
    for index, data in recording.expected.items():
        if graph.buffers[index].kind is BufferKind.GENERATOR or not data.numel():
            continue
        unchanged = recording.inputs.get(index)
        for found in (apart.get(index, unchanged), shared.memory.get(index, unchanged)):
            assert found is not None and torch.equal(found, data), f"b{index}"


def assert_equals_near(graph: Graph, recording: Recording) -> None:
    """As `assert_equals_eager`, up to the rounding of other kernels for the same ops; all results are float32 or of 16 bits."""
    verify(graph)
    apart = reference.run(graph, recording.inputs, recording.scalars)
    kinds = {write.value.buffer.index: write.layout.dtype for node in graph.nodes for write in node.writes}
    for index, data in recording.expected.items():
        if graph.buffers[index].kind is not BufferKind.GENERATOR and index in kinds:
            bound = 5e-2 if kinds[index].itemsize == 2 else 1e-4
            torch.testing.assert_close(apart[index].view(kinds[index]), data.view(kinds[index]), rtol=bound, atol=bound)
