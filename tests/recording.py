"""Records a PyTorch program that runs eagerly on the CPU into an IR graph, so that a test has both the graph and the truth.
Imports torch and `ir_nodes` only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ir_nodes import Access, Buffer, BufferKind, Graph, Layout, ops

_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


def flat(arg: Any) -> list[Any]:
    """Every item of nested lists and tuples."""
    return [leaf for item in arg for leaf in flat(item)] if isinstance(arg, (list, tuple)) else [arg]


def layout_of(tensor: torch.Tensor) -> Layout:
    return Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's whole storage, uint8[nbytes]."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


@dataclass
class Recording:
    """A graph, the bytes that its inputs held, the numbers that it takes and the bytes that it must leave, by buffer."""

    graph: Graph
    inputs: dict[int, torch.Tensor]
    scalars: list[Any]
    expected: dict[int, torch.Tensor] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """``with Recorder() as recorder: ...; recording = recorder.finish([tensors that are held at the end])``."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording(Graph(), {}, [])
        self._buffers: dict[int, Buffer] = {}
        self._keep: list[torch.Tensor] = []  # so that no storage address is used twice
        self._generator: Buffer | None = None

    def finish(self, held: Sequence[torch.Tensor]) -> Recording:
        result = self.recording
        for tensor in held:
            self._buffer(tensor).live = True
        if self._generator is not None:
            self._generator.live = True
            result.expected[self._generator.index] = torch.default_generator.get_state()
        by_index = {self._buffer(tensor).index: tensor for tensor in held}
        for value in result.graph.outputs():
            if value.buffer is not self._generator:
                result.expected[value.buffer.index] = bytes_of(by_index[value.buffer.index])
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":
            return func(*args, **(kwargs or {}))
        target = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        bound = self._bind(target, args, kwargs or {})
        for tensor in (leaf for leaf in flat(bound) if isinstance(leaf, torch.Tensor)):
            self._buffer(tensor)
        if ops.info(target).random and self._generator is None:
            state = torch.default_generator.get_state()
            self._generator = self._add(state, BufferKind.GENERATOR)
        result = func(*args, **(kwargs or {}))
        self._record(target, bound, result)
        return result

    def _record(self, target: str, bound: list[Any], result: Any) -> None:
        schema = ops.schema(target)
        views = any(spec.alias_info is not None and not spec.alias_info.is_write for spec in schema.returns)
        results = result if len(schema.returns) != 1 else (result,)
        new = [
            leaf
            for spec, item in zip(schema.returns, results or ())
            if spec.alias_info is None
            for leaf in flat(item)
        ]
        for tensor in (leaf for leaf in new if isinstance(leaf, torch.Tensor)):
            self._fresh(tensor)
        if views or ops.split(target)[1] in _EMPTY or not isinstance(result, (torch.Tensor, list, tuple, type(None))):
            return
        args = [self._access(target, index, arg) for index, arg in enumerate(bound)]
        outs = [self._made(leaf) for leaf in new]
        effects = []
        if ops.info(target).random:
            effects = [Access(self._generator, Layout.contiguous(torch.uint8, (self._generator.nbytes,)), "rw")]
        self.recording.graph.record(target, args, outs, effects)

    def _bind(self, target: str, args: Any, kwargs: Any) -> list[Any]:
        bound = []
        for index, spec in enumerate(ops.schema(target).arguments):
            given = args[index] if index < len(args) else kwargs.get(spec.name, spec.default_value)
            bound.append(given)
        return bound

    def _access(self, target: str, index: int, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return tuple(self._access(target, index, item) for item in arg)
        if isinstance(arg, torch.Tensor):
            return Access(self._buffer(arg), layout_of(arg), ops.written_mode(target, index))
        if isinstance(arg, float):
            self.recording.scalars.append(arg)
            return self.recording.graph.add_scalar("float")
        return arg

    def _made(self, leaf: Any) -> Access | None:
        return Access(self._buffer(leaf), layout_of(leaf), "w") if isinstance(leaf, torch.Tensor) else None

    def _fresh(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._buffers:
            self._keep.append(tensor.detach())
            self._buffers[key] = self.recording.graph.add_buffer(tensor.untyped_storage().nbytes())

    def _buffer(self, tensor: torch.Tensor) -> Buffer:
        key = tensor.untyped_storage()._cdata
        if key not in self._buffers:
            self._keep.append(tensor.detach())
            self._buffers[key] = self._add(bytes_of(tensor), BufferKind.INPUT)
        return self._buffers[key]

    def _add(self, data: torch.Tensor, kind: BufferKind) -> Buffer:
        buffer = self.recording.graph.add_buffer(data.numel(), kind)
        self.recording.inputs[buffer.index] = data
        return buffer
