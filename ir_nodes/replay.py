"""Runs nodes in an order of their own on copies of a recording's inputs. Imports torch, `ir_nodes.call`, `ir_nodes.graph`,
`ir_nodes.layout`, `ir_nodes.node` and `ir_nodes.ops` only.

Unlike `reference`, it works as engines do: all values of a buffer share its memory, on the physical device. So an order that
overwrites what is still needed, or reads what is not made yet, shows in its numbers.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

import torch

from ir_nodes import call, ops
from ir_nodes.graph import Graph
from ir_nodes.layout import Layout
from ir_nodes.node import BufferKind, Node, ScalarInput

_POISON = 0xFF  # a NaN in every float dtype


class Replay:
    """Memory for one run of ``graph``.

    ``inputs``: the bytes of each input buffer by index, uint8[nbytes] on ``device``; they are copied. ``scalars``: one number
    for each of ``graph.scalars``. Random numbers come from states of its own; the user's generators stay as they are.
    """

    def __init__(self, graph: Graph, inputs: Mapping[int, torch.Tensor], scalars: Sequence[Any], device: torch.device) -> None:
        self.graph, self.scalars, self.device = graph, scalars, device
        self.memory = {index: data.clone() for index, data in inputs.items()}
        self.states: dict[int, torch.Tensor] = {}

    def run(self, nodes: Sequence[Node]) -> Iterator[tuple[Node, list[torch.Tensor]]]:
        """Run ``nodes`` in this order. Gives for each what it left in each of its writes, as bytes."""
        last = {index: node for node in nodes for index in buffers_of(node)}
        for node in nodes:
            self.execute(node)
            yield node, [self.window(write.value.buffer.index, write.layout, flip=False).clone(
                memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for write in node.writes]
            for index in buffers_of(node):
                if last[index] is node:
                    self.memory.pop(index, None)

    def execute(self, node: Node) -> None:
        fill = call.Fill(
            operand=lambda operand: self.window(operand.value.buffer.index, operand.layout),
            target=lambda write: self.window(write.value.buffer.index, write.layout),
            scalar=self.number,
            device=self.device,
        )
        positional, keyword = call.arguments(node, fill)
        result = self.call(node, positional, keyword)
        for index, tensor in zip(node.returns, call.new_results(node, result)):
            if index is not None and tensor.numel():
                write = node.writes[index]
                self.window(write.value.buffer.index, write.layout).copy_(tensor)

    def call(self, node: Node, positional: list[Any], keyword: dict[str, Any]) -> Any:
        if ops.info(node.target).kind in ops.COLLECTIVE:
            return self.stand_in(node)
        function = ops.overload(node.target)
        drawn = [write.value.buffer for write in node.effects if write.value.buffer.kind is BufferKind.GENERATOR]
        if not drawn:
            return function(*positional, **keyword)
        on_cpu = self.device.type == "cpu"
        generator = torch.default_generator if on_cpu else torch.cuda.default_generators[self.device.index or 0]
        users = generator.get_state()
        index = drawn[0].index
        generator.set_state(self.states[index]) if index in self.states else generator.manual_seed(index)
        try:
            return function(*positional, **keyword)
        finally:
            self.states[index] = generator.get_state()
            generator.set_state(users)

    def stand_in(self, node: Node) -> list[Any]:
        """Other ranks take no part in a replay: what a collective leaves is a number that depends on all that it reads."""
        seen = [self.window(one.value.buffer.index, one.layout, flip=False) for one in node.reads]
        targets = [self.window(write.value.buffer.index, write.layout, flip=False) for write in node.writes]
        seen += [target for target, write in zip(targets, node.writes) if write.reads_old]
        mark = sum(int(one.contiguous().reshape(-1).view(torch.uint8).sum()) for one in seen if one.numel()) % 100
        for target in targets if ops.info(node.target).kind == "collective" else ():
            target.fill_(mark)
        return [target for target, index in zip(targets, node.returns) if index is not None]

    def number(self, number: ScalarInput) -> Any:
        value = self.scalars[number.index]
        return torch.tensor(value, dtype=torch.float64) if number.kind == "double" else value

    def window(self, index: int, layout: Layout, flip: bool = True) -> torch.Tensor:
        data = self.memory.get(index)
        if data is None:
            nbytes = self.graph.buffers[index].nbytes
            data = self.memory[index] = torch.full((nbytes,), _POISON, dtype=torch.uint8, device=self.device)
        seen = torch.empty(0, dtype=layout.dtype, device=self.device)
        seen = seen.set_(data.untyped_storage(), layout.offset, layout.size, layout.stride)
        if not (layout.flipped and flip):
            return seen
        return torch.conj(seen) if layout.dtype.is_complex else torch._neg_view(seen)


def buffers_of(node: Node) -> dict[int, None]:
    """The buffers in memory that ``node`` reads or writes."""
    found = {operand.value.buffer.index: None for operand in node.reads}
    return found | {write.value.buffer.index: None for write in node.writes}


def first_difference(
    graph: Graph, one: Sequence[Node], other: Sequence[Node], inputs: Mapping[int, torch.Tensor], scalars: Sequence[Any],
    device: torch.device,
) -> tuple[Node, int] | None:
    """Run two orders of the same nodes: the first node of ``other`` that leaves other bits than in ``one``, and which write.

    Only what somebody reads, or owns in the end, counts. It holds everything that ``one`` makes, so it takes memory.
    """
    made = dict(Replay(graph, inputs, scalars, device).run(one))
    ends = set(graph.outputs())
    for node, found in Replay(graph, inputs, scalars, device).run(other):
        wanted = made.pop(node)
        for index, write in enumerate(node.writes):
            if (write.value.users or write.value in ends) and not torch.equal(found[index], wanted[index]):
                return node, index
    return None
