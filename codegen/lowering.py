"""Turns one node into instructions over an iteration space. Imports torch, `ir_nodes` and codegen's leaf modules.

`Lowering` is the vocabulary that op-specific code speaks: read an argument, compute, reduce, write a result.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Mapping, Sequence

import torch

from codegen import forms
from codegen.eighths import FLOAT8, of_bytes, rounding, to_bytes
from codegen.expressions import Unsupported
from codegen.forms import Form, Reduced
from codegen.instructions import FULL, KEPT, UNIFORM, Instr, MemAccess, Part
from codegen.promotion import COMPUTABLE, HALF, TRITON_TYPES, compute_dtype
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand, ScalarInput, Target, Value

FILLS: dict[str, str | int] = {
    "fill_": "value", "full": "fill_value", "full_like": "fill_value", "scalar_tensor": "s",
    **{name: 0 for name in ("zero_", "zeros", "zeros_like", "new_zeros")},
    **{name: 1 for name in ("ones", "ones_like", "new_ones")},
}  # fmt: skip
"""Ops that fill a tensor: the argument that holds the number, or the number."""


@lru_cache(maxsize=4096)
def argument_names(target: str) -> tuple[str, ...]:
    """The schema's argument names of "aten::add.out", in order."""
    name, _, overload = target.partition(".")
    try:
        schema = torch._C._get_schema(name, overload)
    except RuntimeError as error:
        raise Unsupported(f"no schema for {target}") from error
    return tuple(argument.name for argument in schema.arguments)


def arguments(node: Node) -> dict[str, Any]:
    """The node's arguments by schema name; an argument written in place appears as the operand it reads, if it reads one."""

    def seen(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(seen(item) for item in arg)
        if isinstance(arg, Target):
            write = node.writes[arg.index]
            return Operand(write.base, write.layout) if write.reads_old and write.base is not None else arg
        return arg

    return {name: seen(arg) for name, arg in zip(argument_names(node.target), node.args)}


def fill_of(operand: Operand) -> ScalarInput | int | float | None:
    """The one number that every element of ``operand`` is known to be, because an op filled its whole buffer with it."""
    node = operand.value.producer
    if node is None or node.name not in FILLS or len(node.writes) != 1:
        return None
    write = node.writes[0]
    if write.layout.dtype is not operand.layout.dtype or not write.layout.covers(operand.value.buffer.nbytes):
        return None
    known = FILLS[node.name]
    number = arguments(node).get(known) if isinstance(known, str) else known
    return number if isinstance(number, (ScalarInput, bool, int, float)) else None


def literal(number: bool | int | float) -> str:
    """A Python number as Triton source."""
    if isinstance(number, float) and not math.isfinite(number):
        return f'float("{number}")'
    return repr(number)


def byte_span(layout: Layout) -> tuple[int, int]:
    """First byte touched and the byte after the last, from the buffer's start."""
    end = layout.offset + forms.reach(tuple(zip(layout.size, layout.stride)))
    return layout.offset * layout.itemsize, end * layout.itemsize


class Lowering:
    """Builds the instructions of one part."""

    def __init__(self, node: Node, shape: tuple[int, ...], reduced: Reduced | None = None, kept: tuple[int, ...] = ()) -> None:
        numel = math.prod(shape)
        if numel == 0:
            raise Unsupported("an empty tensor")
        self.shape = shape
        self.kept_shape = kept
        self.part = Part(node, numel, reduced)

    def add(self, instr: Instr) -> Instr:
        """Append an instruction."""
        self.part.instrs.append(instr)
        return instr

    def access(self, value: Value, layout: Layout, level: int = FULL) -> MemAccess:
        """``layout`` of ``value`` broadcast to the space of ``level``. Raises Unsupported where that is impossible."""
        if layout.dtype not in COMPUTABLE:
            raise Unsupported(f"dtype {str(layout.dtype).removeprefix('torch.')}")
        if layout.flipped:
            raise Unsupported("a conjugate or negative view")
        shape = self.shape if level == FULL else self.kept_shape
        form = forms.broadcast(layout.size, layout.stride, shape)
        if form is None:
            raise Unsupported(f"shape {list(layout.size)} does not broadcast to {list(shape)}")
        return MemAccess(value, form, layout.dtype, layout.offset * layout.itemsize, level, *byte_span(layout))

    def load(self, operand: Operand, level: int = FULL) -> Instr:
        """The operand's elements in their compute dtype."""
        layout = operand.layout
        filled = fill_of(operand)
        if filled is not None:
            return self.cast(self.read(filled, compute_dtype(layout.dtype)), layout.dtype)
        if layout.dtype in FLOAT8:
            return self._of_bytes(layout.dtype, self.load(Operand(operand.value, replace(layout, dtype=torch.uint8)), level))
        access = self.access(operand.value, layout, level)
        rounded = layout.dtype if layout.dtype in HALF else None
        return self.add(Instr("load", compute_dtype(layout.dtype), level, access=access, rounded=rounded))

    def _of_bytes(self, dtype: torch.dtype, stored: Instr) -> Instr:
        value = self.expr(of_bytes(dtype), stored, dtype=torch.float32)
        value.rounded = dtype
        return value

    def scalar(self, number: ScalarInput, dtype: torch.dtype) -> Instr:
        """A number input as ``dtype``."""
        if number.kind == "complex":
            raise Unsupported("a complex number")
        if number.kind in ("float", "double"):
            held = torch.float64 if dtype is torch.float64 else torch.float32
        else:
            held = torch.int64
        return self.cast(self.add(Instr("scalar", held, UNIFORM, payload=number.index)), dtype)

    def size(self, value: int, dtype: torch.dtype = torch.float32) -> Instr:
        """An integer known when planning, passed as an argument, as ``dtype``."""
        return self.cast(self.add(Instr("size", torch.int64, UNIFORM, payload=value)), dtype)

    def read(self, arg: Any, dtype: torch.dtype | None = None, level: int = FULL) -> Instr:
        """Any argument that stands for numbers: operand, number input or constant. ``dtype`` None keeps an operand's own."""
        if isinstance(arg, Operand):
            loaded = self.load(arg, level)
            return loaded if dtype is None else self.cast(loaded, dtype)
        if isinstance(arg, ScalarInput):
            return self.scalar(arg, dtype or torch.float32)
        if isinstance(arg, (bool, int, float)):
            wanted = dtype or torch.float32
            value = bool(arg) if wanted is torch.bool else float(arg) if wanted.is_floating_point else int(arg)
            return self.expr(literal(value), dtype=wanted)
        raise Unsupported(f"argument {arg!r}")

    def expr(self, text: str, *args: Instr, dtype: torch.dtype) -> Instr:
        """``text`` over {0}, {1}, ..."""
        level = max((arg.level for arg in args), default=UNIFORM)
        return self.add(Instr("expr", dtype, level, args, text))

    def cast(self, value: Instr, dtype: torch.dtype) -> Instr:
        """``value`` held as ``compute_dtype(dtype)``, and rounded to ``dtype`` where that is a narrower float."""
        held = compute_dtype(dtype)
        if value.dtype is not held:
            value = self._convert(value, held)
        if dtype is not held and dtype.is_floating_point and value.rounded is not dtype:
            text = rounding(dtype) if dtype in FLOAT8 else f"{{0}}.to({TRITON_TYPES[dtype]}).to(tl.float32)"
            value = self.expr(text, value, dtype=held)
            value.rounded = dtype
        return value

    def _convert(self, value: Instr, held: torch.dtype) -> Instr:
        if value.kind == "expr" and not value.args:  # a literal: written again with the new type
            number = eval_literal(value.text)
            cast = bool(number) if held is torch.bool else float(number) if held.is_floating_point else int(number)
            return self.expr(literal(cast), dtype=held)
        if held is torch.bool:
            return self.expr("({0} != 0)", value, dtype=held)
        if held not in TRITON_TYPES:
            raise Unsupported(f"a cast to {str(held).removeprefix('torch.')}")
        converted = self.expr(f"{{0}}.to({TRITON_TYPES[held]})", value, dtype=held)
        if held is torch.float32 and value.dtype in (torch.bool, torch.uint8, torch.int8):
            converted.rounded = None
        return converted

    def reduce(self, how: str, value: Instr) -> Instr:
        """Combine over the reduced dimensions with "add", "max" or "min"."""
        return self.add(Instr("reduce", value.dtype, KEPT, (value,), how))

    def scan(self, how: str, value: Instr, backwards: bool = False) -> Instr:
        """``value`` combined with all before it along the reduced dimensions, or with all behind: "add", "mul", "max", "min" or
        "logaddexp"."""
        return self.add(Instr("scan", value.dtype, FULL, (value,), how, payload=backwards))

    def coord(self, dim: int) -> Instr:
        """The index along ``dim`` of the full space, int64-free: held as the kernel's index type."""
        lower = math.prod(self.shape[dim + 1 :])
        return self.place(forms.collapse((math.prod(self.shape[:dim]), self.shape[dim], lower), (0, 1, 0)))

    def place(self, form: Form) -> Instr:
        """The number that ``form`` gives each element of the full space, such as its position in a layout."""
        return self.add(Instr("coord", torch.int32, FULL, payload=form))

    def take(self, operand: Operand, rest: Layout, indices: Sequence[tuple[Instr, int, int]]) -> Instr:
        """The operand's elements at ``rest`` plus the stride times each index; ``indices`` are (index, stride, extent)."""
        access = replace(self.access(operand.value, rest), scattered=True)
        access.low, access.high = byte_span(operand.layout)
        rounded = rest.dtype if rest.dtype in HALF else None
        return self.add(Instr("take", compute_dtype(rest.dtype), FULL, tuple(index for index, _, _ in indices), access=access,
                              payload=tuple((stride, extent) for _, stride, extent in indices), rounded=rounded))

    def take_at(self, operand: Operand, places: Mapping[int, Instr]) -> Instr:
        """The operand's elements that have these indices along these of its dimensions, and the space's along others; zero where
        an index is out of range."""
        size, stride = operand.layout.size, operand.layout.stride
        rest = replace(operand.layout, size=tuple(1 if dim in places else one for dim, one in enumerate(size)),
                       stride=tuple(0 if dim in places else one for dim, one in enumerate(stride)))
        return self.take(operand, rest, [(place, stride[dim], size[dim]) for dim, place in places.items()])

    def put(self, target: Value, rest: Layout, indices: Sequence[tuple[Instr, int, int]], value: Instr, how: str) -> Instr:
        """"add" or "set" elements of ``target`` at such places."""
        access = replace(self.access(target, rest), scattered=True)
        access.low, access.high = 0, target.buffer.nbytes
        return self.add(Instr("put", value.dtype, FULL, (value, *(index for index, _, _ in indices)), how, access,
                              tuple((stride, extent) for _, stride, extent in indices)))

    def both(self, one: Instr | None, other: Instr) -> Instr:
        """True where both conditions hold; None always does."""
        return other if one is None else self.expr("({0} & {1})", one, other, dtype=torch.bool)

    def check(self, index: Instr, count: int, but: Instr | None = None, wrong: str = "an index is out of range") -> Instr:
        """``index``, which has to lie from 0 to below ``count`` or be ``but``: a kernel that finds another one stops and says
        what is ``wrong``."""
        if not settings.current().check_indices:
            return index
        text = f"{self.part.node.target}: {wrong}"
        return self.add(Instr("check", index.dtype, index.level, (index, but) if but else (index,), text, payload=count))

    def gather(self, operand: Operand, dim: int, index: Instr) -> Instr:
        """``operand[..., index, ...]`` per kept element, the full space's ``dim`` being the one indexed."""
        layout = operand.layout
        access = self.access(operand.value, layout, FULL)
        access.index_stride = layout.stride[dim]
        rounded = layout.dtype if layout.dtype in HALF else None
        lower = math.prod(self.shape[dim + 1 :])
        rest = forms.collapse(layout.size[:dim] + layout.size[dim + 1 :], layout.stride[:dim] + layout.stride[dim + 1 :])
        payload = ((lower, lower * self.shape[dim]), rest)
        return self.add(Instr("gather", compute_dtype(layout.dtype), KEPT, (index,), access=access, payload=payload,
                               rounded=rounded))

    def write(self, index: int, value: Instr, level: int = FULL) -> Instr:
        """Store ``value`` as ``node.writes[index]``, rounded to what that holds."""
        write = self.part.node.writes[index]
        return self.store(write.value, write.layout, value, level)

    def store(self, target: Value, layout: Layout, value: Instr, level: int = FULL) -> Instr:
        if layout.dtype in FLOAT8:
            stored = self.expr(to_bytes(layout.dtype), self.cast(value, torch.float32), dtype=torch.uint8)
            return self.store(target, replace(layout, dtype=torch.uint8), stored, level)
        access = self.access(target, layout, level)
        if any(stride == 0 for _, stride in access.form):
            raise Unsupported("a write through an overlapping view")
        value = self.cast(value, layout.dtype)
        return self.add(Instr("store", value.dtype, level, (value,), access=access))


def eval_literal(text: str) -> bool | int | float:
    """The number that `literal` wrote."""
    if text in ("True", "False"):
        return text == "True"
    stripped = text.removeprefix('float("').removesuffix('")')
    return float(stripped) if stripped != text or not stripped.lstrip("-").isdigit() else int(stripped)

