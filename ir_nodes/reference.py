"""A small interpreter that keeps every value of a graph apart, so that any order that respects the data flow gives the same
numbers: what reorderings and fused kernels are tested against. Imports torch, `ir_nodes.call`, `ir_nodes.graph`,
`ir_nodes.layout`, `ir_nodes.node` and `ir_nodes.ops` only."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch

from ir_nodes import call, ops
from ir_nodes.graph import Graph
from ir_nodes.layout import Layout
from ir_nodes.node import Buffer, BufferKind, Node, Operand, Value

_CPU = torch.device("cpu")
_POISON = 0xFF  # a NaN in every float dtype: shows where bytes that nothing wrote are read


def run(graph: Graph, buffers: Mapping[int, torch.Tensor], scalars: Sequence[Any] = ()) -> dict[int, torch.Tensor]:
    """Run ``graph`` on the CPU, node by node in the order of ``graph.nodes``.

    ``buffers`` maps the index of each buffer of ``graph.inputs()`` to its bytes, uint8[nbytes]; they are not changed.
    ``scalars`` holds one number for each of ``graph.scalars``. Returns the bytes, uint8[nbytes], of each of
    ``graph.outputs()`` by buffer index; a byte that nothing wrote is 0xFF. The state of a generator is what
    `torch.Generator.get_state` gives on the CPU. Raises ValueError where an input is missing or of the wrong size, or an op
    gives another shape or dtype than was recorded.
    """
    state = _State(graph, buffers, scalars)
    for node in graph.nodes:
        state.execute(node)
    return {value.buffer.index: state.bytes_of[value] for value in graph.outputs()}


def window(data: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``data``, uint8[nbytes], seen through ``layout`` (shares its memory)."""
    seen = torch.empty(0, dtype=layout.dtype)
    return seen.set_(data.untyped_storage(), layout.offset, layout.size, layout.stride)


class _State:
    """The bytes of each value made so far."""

    def __init__(self, graph: Graph, buffers: Mapping[int, torch.Tensor], scalars: Sequence[Any]) -> None:
        if len(scalars) != len(graph.scalars):
            raise ValueError(f"the graph takes {len(graph.scalars)} numbers, {len(scalars)} given")
        self.scalars = scalars
        self.bytes_of: dict[Value, torch.Tensor] = {}
        for value in graph.inputs():
            self.bytes_of[value] = _given(value.buffer, buffers)

    def execute(self, node: Node) -> None:
        fresh = self._allocate(node)
        fill = call.Fill(
            operand=self._read,
            target=lambda write: window(fresh[write.value], write.layout),
            scalar=lambda number: self.scalars[number.index],
            device=_CPU,
        )
        positional, keyword = call.arguments(node, fill)
        result = self._call(node, positional, keyword, fresh)
        for index, tensor in zip(node.returns, call.new_results(node, result)):
            if index is not None:
                _store(node, tensor, fresh, index)
        self.bytes_of.update(fresh)

    def _allocate(self, node: Node) -> dict[Value, torch.Tensor]:
        """Memory for what ``node`` writes: values of one buffer share it, because the op sees one buffer."""
        fresh: dict[Value, torch.Tensor] = {}
        by_buffer: dict[Buffer, torch.Tensor] = {}
        for write in node.all_writes():
            buffer = write.value.buffer
            if buffer not in by_buffer:
                by_buffer[buffer] = _unwritten(buffer) if write.base is None else self._value(write.base).clone()
            fresh[write.value] = by_buffer[buffer]
        return fresh

    def _call(self, node: Node, positional: list[Any], keyword: dict[str, Any], fresh: dict[Value, torch.Tensor]) -> Any:
        function = ops.overload(node.target)
        if not node.effects:
            return function(*positional, **keyword)
        if len(node.effects) > 1 or node.effects[0].value.buffer.kind is not BufferKind.GENERATOR:
            raise ValueError(f"{node.target} has effects other than one generator's state")
        state = fresh[node.effects[0].value]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(state.clone())
            result = function(*positional, **keyword)
            state.copy_(torch.default_generator.get_state())
        return result

    def _read(self, operand: Operand) -> torch.Tensor:
        return window(self._value(operand.value), operand.layout)

    def _value(self, value: Value) -> torch.Tensor:
        if value not in self.bytes_of:
            if value.producer is not None or value.buffer.kind is not BufferKind.FRESH:
                raise ValueError(f"{value} is used before it is made")
            self.bytes_of[value] = _unwritten(value.buffer)
        return self.bytes_of[value]


def _unwritten(buffer: Buffer) -> torch.Tensor:
    return torch.full((buffer.nbytes,), _POISON, dtype=torch.uint8)


def _given(buffer: Buffer, buffers: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if buffer.index not in buffers:
        raise ValueError(f"input {buffer} is missing")
    data = buffers[buffer.index]
    if data.dtype is not torch.uint8 or data.shape != (buffer.nbytes,):
        raise ValueError(f"input {buffer} is uint8[{buffer.nbytes}], given {data.dtype}{list(data.shape)}")
    return data.clone()


def _store(node: Node, tensor: torch.Tensor, fresh: dict[Value, torch.Tensor], index: int) -> None:
    write = node.writes[index]
    if tensor.shape != write.layout.size or tensor.dtype is not write.layout.dtype:
        raise ValueError(f"{node.target} gave {tensor.dtype}{list(tensor.shape)}, recorded was {write.layout}")
    window(fresh[write.value], write.layout).copy_(tensor)
