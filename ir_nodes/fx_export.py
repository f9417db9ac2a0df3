"""A graph as a `torch.fx.GraphModule` over plain tensors. Imports torch, `ir_nodes.call`, `ir_nodes.graph`, `ir_nodes.layout`,
`ir_nodes.node` and `ir_nodes.ops` only."""

from __future__ import annotations

import operator
from typing import Any, Callable, Mapping

import torch
from torch import fx

from ir_nodes import call, ops
from ir_nodes.graph import Graph
from ir_nodes.layout import Layout
from ir_nodes.node import Buffer, BufferKind, Node, Operand, Value, Write

_aten = torch.ops.aten


def to_fx(graph: Graph, device: torch.device | str = "cpu") -> fx.GraphModule:
    """A module that computes ``graph`` on tensors of ``device``.

    It takes `fx_inputs(graph, buffers)`, one tensor for each of ``graph.inputs()`` in that order, then one number for each
    of ``graph.scalars``. An input is 1-D, of the dtype in which the graph first sees the buffer. It returns a tuple:
    for each of ``graph.outputs()``, the whole buffer, 1-D of such a dtype. Nothing that
    is passed in is changed. Random generators are neither inputs nor outputs: random ops draw from the default one.
    """
    return _Export(graph, torch.device(device)).module()


def fx_inputs(graph: Graph, buffers: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that `to_fx(graph)` takes; ``buffers`` maps a buffer's index to its bytes, uint8[nbytes]."""
    dtypes = _dtypes(graph)
    return [buffers[value.buffer.index].view(dtypes[value.buffer]) for value in _plain(graph.inputs())]


def strided(flat: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """`torch.as_strided` that counts ``offset`` from the first element of ``flat``, not of its storage."""
    return torch.as_strided(flat, size, stride, flat.storage_offset() + offset)


def _plain(values: list[Value]) -> list[Value]:
    return [value for value in values if value.buffer.kind is not BufferKind.GENERATOR]


def _dtypes(graph: Graph) -> dict[Buffer, torch.dtype]:
    """The dtype of each buffer's flat tensor: the first seen, or uint8 where that does not divide the buffer."""
    dtypes: dict[Buffer, torch.dtype] = {}
    for node in graph.nodes:
        seen = [(operand.value.buffer, operand.layout) for operand in node.reads]
        seen += [(write.value.buffer, write.layout) for write in node.all_writes()]
        for buffer, layout in seen:
            whole = buffer.nbytes % layout.itemsize == 0
            dtypes.setdefault(buffer, layout.dtype if whole else torch.uint8)
    return dtypes


class _Export:
    """The fx graph under construction: ``flat`` maps each value made so far to the fx node of its buffer's 1-D tensor."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.graph, self.device = graph, device
        self.dtypes = _dtypes(graph)
        self.fx = fx.Graph()
        self.flat: dict[Value, fx.Node] = {
            value: self.fx.placeholder(f"b{value.buffer.index}") for value in _plain(graph.inputs())
        }
        self.numbers = [self.fx.placeholder(f"s{index}") for index in range(len(graph.scalars))]

    def module(self) -> fx.GraphModule:
        for node in self.graph.nodes:
            self._node(node)
        self.fx.output(tuple(self.flat[value] for value in _plain(self.graph.outputs())))
        self.fx.lint()
        return fx.GraphModule(torch.nn.Module(), self.fx)

    def _call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.fx.call_function(op, args, kwargs)

    def _node(self, node: Node) -> None:
        fresh = self._allocate(node)
        fill = call.Fill(
            operand=self._read,
            target=lambda write: self._window(fresh[write.value], write.value.buffer, write.layout),
            scalar=lambda number: self.numbers[number.index],
            device=self.device,
        )
        positional, keyword = call.arguments(node, fill)
        result = self._call(ops.overload(node.target), *positional, **keyword)
        for place, index in zip(_places(node), node.returns):
            if index is not None:
                self._store(node.writes[index], self._item(result, place), fresh)
        self.flat.update(fresh)

    def _allocate(self, node: Node) -> dict[Value, fx.Node]:
        """Tensors for what ``node`` writes, by value; values of one buffer share one, because the op sees one buffer."""
        fresh: dict[Value, fx.Node] = {}
        by_buffer: dict[Buffer, fx.Node] = {}
        whole = {index for index in node.returns if index is not None and self._replaces(node.writes[index])}
        for index, write in enumerate(node.writes):
            buffer = write.value.buffer
            if buffer not in by_buffer and index not in whole:
                by_buffer[buffer] = self._base(write)
            if buffer in by_buffer:
                fresh[write.value] = by_buffer[buffer]
        return fresh

    def _replaces(self, write: Write) -> bool:
        """True where the op's result, made flat, is the buffer."""
        layout = write.layout
        same = layout.dtype is self.dtypes[write.value.buffer]
        return same and layout.is_contiguous and layout.covers(write.value.buffer.nbytes)

    def _base(self, write: Write) -> fx.Node:
        if write.base is None:
            return self._unwritten(write.value.buffer)
        return self._call(_aten.clone.default, self._flat(write.base))

    def _unwritten(self, buffer: Buffer) -> fx.Node:
        dtype = self.dtypes[buffer]
        return self._call(_aten.zeros.default, [buffer.nbytes // dtype.itemsize], dtype=dtype, device=self.device)

    def _flat(self, value: Value) -> fx.Node:
        if value not in self.flat:  # memory that nothing wrote
            self.flat[value] = self._unwritten(value.buffer)
        return self.flat[value]

    def _read(self, operand: Operand) -> fx.Node:
        return self._window(self._flat(operand.value), operand.value.buffer, operand.layout)

    def _window(self, flat: fx.Node, buffer: Buffer, layout: Layout) -> fx.Node:
        dtype = self.dtypes[buffer]
        if layout.dtype is not dtype:
            usable = buffer.nbytes // layout.itemsize * layout.itemsize
            if usable != buffer.nbytes:
                flat = self._call(_aten.narrow.default, flat, 0, 0, usable // dtype.itemsize)
            flat = self._call(_aten.view.dtype, flat, layout.dtype)
        if layout.numel and not layout.is_contiguous:
            return self._call(strided, flat, layout.size, layout.stride, layout.offset)
        if layout.numel * layout.itemsize != buffer.nbytes:
            start = layout.offset if layout.numel else 0  # a window without elements may lie outside
            flat = self._call(_aten.narrow.default, flat, 0, start, layout.numel)
        return flat if len(layout.size) == 1 else self._call(_aten.view.default, flat, layout.size)

    def _item(self, result: fx.Node, place: tuple[int, ...]) -> fx.Node:
        for index in place:
            result = self._call(operator.getitem, result, index)
        return result

    def _store(self, write: Write, result: fx.Node, fresh: dict[Value, fx.Node]) -> None:
        if write.value in fresh:
            seen = self._window(fresh[write.value], write.value.buffer, write.layout)
            self._call(_aten.copy_.default, seen, result)
        else:
            fresh[write.value] = self._call(_aten.reshape.default, result, [-1])


def _places(node: Node) -> list[tuple[int, ...]]:
    """Where in the op's Python result each of ``node.returns`` stands."""
    specs = ops.schema(node.target).returns
    new = [index for index, spec in enumerate(specs) if spec.alias_info is None or not spec.alias_info.is_write]
    lists = [index for index in new if str(specs[index].type).startswith("List")]
    places: list[tuple[int, ...]] = []
    for index in new:
        outer = () if len(specs) == 1 else (index,)
        many = len(node.returns) - len(new) + 1 if index in lists else 0
        places += [(*outer, item) for item in range(many)] if index in lists else [outer]
    if len(lists) > 1:
        raise ValueError(f"{node.target} returns {len(lists)} lists, whose lengths the node does not tell apart")
    return places
