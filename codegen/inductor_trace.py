"""A run of nodes as a functional FX graph over strided tensors. Imports torch, `ir_nodes` and codegen's leaf modules only."""

from __future__ import annotations

import logging
import math
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from codegen.functional import NoFunctionalForm, Number, Reader, call
from codegen.views import NotAView, chain, read, whole, write
from ir_nodes.layout import Layout
from ir_nodes.node import Buffer, BufferKind, Node, Operand, ScalarInput, Value, Write

_aten = torch.ops.aten


class Untraceable(ValueError):
    """A node that torch's tracer does not take. ``node`` is to blame; the text says why."""

    def __init__(self, node: Node, cause: Exception) -> None:
        words = str(cause).strip().splitlines()
        known = isinstance(cause, (NotAView, NoFunctionalForm))
        super().__init__(str(cause) if known else f"{type(cause).__name__}: {words[0] if words else ''}")
        self.node = node


@dataclass(frozen=True, slots=True)
class Place:
    """A placeholder: ``buffer``'s memory seen as ``layout``."""

    buffer: Buffer
    layout: Layout


@dataclass(slots=True)
class Traced:
    """A run as FX.

    ``module`` takes one tensor for each of ``places``, then the numbers ``floats`` as float64[n] and ``ints`` as int64[n] where
    there are any. It writes to the places that the run changes, and returns nothing. ``constants`` are the numbers that were
    compiled in.
    """

    module: fx.GraphModule
    inputs: list[Tensor]
    mode: FakeTensorMode  # of the inputs
    places: list[Place]
    floats: list[int] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)


def trace(run: Sequence[Node], stored: Sequence[Value], numbers: Sequence[Any], device: torch.device) -> Traced:
    """``run`` in order; ``stored``: the values that must be in memory afterwards. Raises Untraceable."""
    tracer = _Tracer(run, stored, numbers, device)
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(_refusals_untold())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        mode = stack.enter_context(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))
        inputs = [_example(place.layout, device) for place in tracer.places]
        if tracer.floats:
            inputs.append(torch.empty(len(tracer.floats), dtype=torch.float64, device=device))
        if tracer.ints:
            inputs.append(torch.empty(len(tracer.ints), dtype=torch.int64, device=device))
        module = make_fx(tracer.body, decomposition_table=select_decomp_table())(*inputs)
    _write_back(module, tracer.targets)
    packs = [pack for pack in (tracer.ints, tracer.floats) if pack]
    for position, pack in zip(range(len(inputs) - 1, -1, -1), packs):
        with mode:
            _keep_used(module, inputs, position, pack)
    return Traced(module, inputs, mode, tracer.places, tracer.floats, tracer.ints, tracer.constants)


@contextmanager
def _refusals_untold() -> Iterator[None]:
    """Without the traceback that PyTorch logs where a Meta kernel does not take what ATen takes: `Untraceable` says why."""
    log, mine = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_told(record: logging.LogRecord) -> bool:
        return record.thread != mine or not record.getMessage().startswith("failed while attempting to run meta")

    log.addFilter(is_told)
    try:
        yield
    finally:
        log.removeFilter(is_told)


def _example(layout: Layout, device: torch.device) -> Tensor:
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=device)


def _write_back(module: fx.GraphModule, targets: Sequence[int]) -> None:
    """Turn each result into a write to its placeholder, which compilers do in place."""
    graph = module.graph
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    with graph.inserting_before(output):
        for position, result in zip(targets, output.args[0], strict=True):
            if result is holders[position]:
                continue
            copied = graph.call_function(_aten.copy_.default, (holders[position], result))
            copied.meta["val"] = holders[position].meta["val"]
    output.args = ((),)
    graph.lint()
    module.recompile()


def _keep_used(module: fx.GraphModule, inputs: list[Tensor], position: int, pack: list[int]) -> None:
    """Leave out of ``pack``, the numbers that input ``position`` holds, those that became constants."""
    holder = [node for node in module.graph.nodes if node.op == "placeholder"][position]
    used = sorted({user.args[2] for user in holder.users})
    for user in list(holder.users):
        user.args = (holder, 0, used.index(user.args[2]))
    pack[:] = [pack[index] for index in used]
    if used:
        inputs[position] = holder.meta["val"] = inputs[position].new_empty(len(used))
    else:
        module.graph.erase_node(holder)
        inputs.pop(position)
    module.recompile()


class _Tracer:
    """Runs nodes on whatever tensors it is given. ``made``: each value so far, as a tensor and the layout in which it is held."""

    def __init__(self, run: Sequence[Node], stored: Sequence[Value], numbers: Sequence[Any], device: torch.device) -> None:
        self.run, self.stored, self.numbers, self.device = run, stored, numbers, device
        self.places = _places(run, stored)
        index = {place.buffer: position for position, place in enumerate(self.places)}
        self.targets = [index[value.buffer] for value in stored]
        used = {arg: None for node in run for arg in _numbers(node.args)}
        self.floats = [arg.index for arg in used if arg.kind in ("float", "double")]
        self.ints = [arg.index for arg in used if arg.kind == "int"]
        self.constants: dict[int, Any] = {}
        self.made: dict[Value, tuple[Tensor, Layout]] = {}
        self.casts: dict[tuple[int, torch.dtype], Tensor] = {}

    def body(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        held = dict(zip((place.buffer for place in self.places), zip(inputs, (place.layout for place in self.places))))
        first = {value.buffer: value for value in reversed([v for node in self.run for v in node.inputs()])}
        mine = {write.value for node in self.run for write in node.writes}
        self.made = {value: held[value.buffer] for value in first.values() if value not in mine and value.buffer in held}
        extra = list(inputs[len(self.places) :])
        self.float_tensor = extra.pop(0) if self.floats else None
        self.int_tensor = extra.pop(0) if self.ints else None
        reader = Reader(self._operand, self._old, self._number, self.device)
        for node in self.run:
            try:
                results = call(node, reader)
                for result, one in zip(results, node.writes, strict=True):
                    self._store(one, result)
            except Exception as error:  # whatever a Meta kernel or a decomposition says
                raise Untraceable(node, error) from error
        return tuple(self._stored(value, position) for value, position in zip(self.stored, self.targets))

    def _stored(self, value: Value, position: int) -> Tensor:
        tensor, layout = self.made[value]
        return read(chain(layout, self.places[position].layout), tensor)

    def _operand(self, operand: Operand) -> Tensor:
        tensor, layout = self._value(operand.value, operand.layout)
        return read(chain(layout, operand.layout), tensor)

    def _old(self, one: Write) -> Tensor:
        if one.base is None:
            return _unwritten(one.layout, self.device)
        tensor, layout = self._value(one.base, one.layout)
        return read(chain(layout, one.layout), tensor)

    def _value(self, value: Value, seen: Layout) -> tuple[Tensor, Layout]:
        if value not in self.made:  # memory that nothing wrote
            if value.producer is not None or value.buffer.kind is not BufferKind.FRESH:
                raise NoFunctionalForm(f"{value} is used before it is made")
            layout = whole(seen, value.buffer.nbytes)
            self.made[value] = _unwritten(layout, self.device), layout
        return self.made[value]

    def _store(self, one: Write, result: Tensor | None) -> None:
        if result is None:
            raise NoFunctionalForm("a result that is not defined")
        if one.layout.flipped:
            raise NoFunctionalForm("a conjugate or negative view is written")
        nbytes = one.value.buffer.nbytes
        if one.layout.covers(nbytes):
            self.made[one.value] = result, one.layout
            return
        layout = whole(one.layout, nbytes)
        base, layout = self._value(one.base, one.layout) if one.base is not None else (_unwritten(layout, self.device), layout)
        self.made[one.value] = write(chain(layout, one.layout), base, result), layout

    def _number(self, arg: ScalarInput) -> Number:
        return Number(arg.kind, lambda dtype: self._tensor(arg, dtype), lambda: self._constant(arg))

    def _tensor(self, arg: ScalarInput, dtype: torch.dtype) -> Tensor:
        key = (arg.index, dtype)
        if key not in self.casts:
            packed, order = (self.int_tensor, self.ints) if arg.kind == "int" else (self.float_tensor, self.floats)
            assert packed is not None
            self.casts[key] = packed[order.index(arg.index)].to(dtype)
        return self.casts[key]

    def _constant(self, arg: ScalarInput) -> Any:
        value = self.numbers[arg.index]
        if arg.kind == "double" or isinstance(value, float) and not math.isfinite(value):
            raise NoFunctionalForm("a number that cannot be compiled in")
        self.constants[arg.index] = value
        return value


def _unwritten(layout: Layout, device: torch.device) -> Tensor:
    return torch.zeros(layout.size, dtype=layout.dtype, device=device)


def _places(run: Sequence[Node], stored: Sequence[Value]) -> list[Place]:
    """Memory that the run reads or leaves something in: as it is first seen, where that is all of it."""
    seen: dict[Buffer, Layout] = {}
    mine: set[Value] = set()

    def note(value: Value, layout: Layout) -> None:
        fresh = value.version == 0 and value.buffer.kind is BufferKind.FRESH
        if value not in mine and not fresh and value.buffer not in seen:
            seen[value.buffer] = whole(layout, value.buffer.nbytes)

    for node in run:
        try:
            for operand in node.reads:
                note(operand.value, operand.layout)
            for one in node.writes:
                if one.base is not None:
                    note(one.base, one.layout)
        except NotAView as error:
            raise Untraceable(node, error) from error
        mine.update(one.value for one in node.writes)
    for value in stored:
        layout = next(one.layout for one in value.producer.writes if one.value is value)  # type: ignore[union-attr]
        if value.buffer not in seen:
            seen[value.buffer] = whole(layout, value.buffer.nbytes)
    return [Place(buffer, layout) for buffer, layout in seen.items()]


def _numbers(arg: Any) -> list[ScalarInput]:
    if isinstance(arg, tuple):
        return [number for item in arg for number in _numbers(item)]
    return [arg] if isinstance(arg, ScalarInput) else []
