"""Writes a body laid out on a tile as the source of one Triton kernel. Imports codegen's leaf modules.

Sizes and strides become arguments; the text depends on structure only: which dimensions an operand moves along, which
strides are 1, in which order things happen.
"""

from __future__ import annotations

import torch

from codegen.addressing import IndexWriter
from codegen.body import Body, Step
from codegen.instructions import FULL
from codegen.online import ONLINE, final_lines, loop_lines
from codegen.product import Product, product_lines
from codegen.promotion import HALF, TRITON_TYPES
from codegen.random_source import random_lines
from codegen.source_args import ArgumentList
from codegen.tile import Tile

_HEADER = '''"""{title}"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


'''
_COMBINE = {
    "add": "{0} + {1}",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}


def identity(how: str, dtype: torch.dtype) -> str:
    """What combining with changes nothing."""
    if how == "add":
        return "0.0" if dtype.is_floating_point else "0"
    if dtype.is_floating_point:
        return 'float("-inf")' if how == "max" else 'float("inf")'
    info = torch.iinfo(dtype)
    return str(info.min if how == "max" else info.max)


class SourceWriter(IndexWriter):
    """Writes the instructions of one kernel."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList) -> None:
        super().__init__(body, tile, arguments)
        self._names: dict[int, str] = {}
        self._emitted: set[int] = set()

    def source(self, name: str, title: str) -> str:
        """The whole file."""
        self._prologue()
        self._passes()
        blocks = ["B0", "B1", "BK"] if self.tile.depth else ["B0", "B1"]
        parameters = ", ".join([*self.arguments.names(), *(f"{block}: tl.constexpr" for block in blocks)])
        return _HEADER.format(title=title) + f"@triton.jit\ndef {name}({parameters}):\n" + "\n".join(self._lines) + "\n"

    # Passes over the reduced dimensions

    def _passes(self) -> None:
        stores = [step for step in self.body.steps if step.stage == "store"]
        if not self.tile.looped:
            for step in self.body.steps:
                if step.stage != "store":
                    self._emit(step)
            for step in stores:
                self._store(step)
            return
        placed = self._store_passes(stores)
        reduces = [step for step in self.body.steps if step.stage == "reduce"]
        last = max([step.phase - 1 for step in reduces] + list(placed.values()), default=-1)
        for number in range(last + 1):
            self._outer(number)
            here = [step for step in reduces if step.phase - 1 == number]
            self._loop(here, [step for step in stores if placed.get(id(step)) == number])
        self._outer(last + 1)
        for step in stores:
            if id(step) not in placed:
                self._store(step)

    def _store_passes(self, stores: list[Step]) -> dict[int, int]:
        """The pass that each store over the full space belongs to: no earlier than the last that loads from its buffer."""
        full = [step for step in stores if step.level == FULL]
        last = max([step.phase for step in full] + [s.phase - 1 for s in self.body.steps if s.stage == "reduce"], default=0)
        loaded = {id(step.access.value.buffer) for step in self.body.steps if step.stage == "load" and step.access}
        return {id(step): last if id(step.access.value.buffer) in loaded else step.phase for step in full if step.access}

    def _outer(self, phase: int) -> None:
        """Emit what does not change along the reduced dimensions and is known after ``phase`` passes."""
        for step in self.body.steps:
            if step.level != FULL and step.phase <= phase and step.stage not in ("store", "reduce"):
                if id(step) not in self._emitted:
                    self._emit(step)

    def _loop(self, reduces: list[Step], stores: list[Step]) -> None:
        reduced = self.tile.reduced_axis
        assert reduced is not None
        for step in reduces:
            how = "add" if step.text == ONLINE else step.text
            kind = TRITON_TYPES[step.dtype]
            self._line(f"{self._name(step)}_acc = tl.full([B0, B1], {identity(how, step.dtype)}, {kind})")
        start, end = ("begin", "end") if self.tile.share else ("0", self._extent(reduced))
        stages = f", num_stages={self.tile.stages}" if self.tile.stages > 1 else ""
        self._line(f"for r in tl.range({start}, {end}, B{reduced}{stages}):")
        self._indent += 1
        self._index(reduced, "r", end)
        wanted = self._slice([*reduces, *stores])
        for step in self.body.steps:
            if id(step) in wanted and step.level == FULL and step.stage not in ("store", "reduce"):
                self._emit(step)
        joined = {id(step.args[1]) for step in reduces if step.text == ONLINE}
        for step in reduces:
            if id(step) not in joined:
                self._accumulate(step)
        for step in stores:
            self._store(step)
        self._indent -= 1
        for step in reduces:
            self._finish(step, reduced)

    def _accumulate(self, step: Step) -> None:
        name = self._name(step)
        if step.text != ONLINE:
            self._line(f"{name}_acc = {_COMBINE[step.text].format(f'{name}_acc', self._masked(step))}")
            return
        highest = step.args[1]
        for line in loop_lines(name, f"{self._name(highest)}_acc", self._masked(highest), str(step.payload)):
            self._line(line)

    def _finish(self, step: Step, axis: int) -> None:
        """The result from the lanes' accumulators."""
        name = self._name(step)
        self._emitted.add(id(step))
        if step.text != ONLINE:
            self._line(f"{name} = tl.reduce({name}_acc, {axis}, _{step.text}, keep_dims=True)")
            return
        for line in final_lines(name, self._name(step.args[1]), str(step.payload), axis):
            self._line(line)

    def _slice(self, sinks: list[Step]) -> set[int]:
        """Steps over the full space that the sinks need within this pass."""
        wanted: set[int] = set()
        stack = [arg for sink in sinks for arg in sink.args]
        while stack:
            step = stack.pop()
            if id(step) not in wanted and step.level == FULL:
                wanted.add(id(step))
                stack.extend(step.args)
        return wanted

    # Instructions

    def _name(self, step: Step) -> str:
        return self._names.setdefault(id(step), f"t{len(self._names)}")

    def _masked(self, step: Step) -> str:
        (value,) = step.args
        return f"tl.where(m{self.tile.reduced_axis}, {self._name(value)}, {identity(step.text, step.dtype)})"

    def _emit(self, step: Step) -> None:
        self._emitted.add(id(step))
        if step.stage in ("scalar", "size"):
            self._names[id(step)] = self.arguments.number(step.stage, step.payload, step.dtype)
        elif step.stage == "load":
            self._load(step)
        elif step.stage == "gather":
            self._gather(step)
        elif step.stage == "take":
            widened = ".to(tl.float32)" if step.access and step.access.dtype in HALF else ""
            self._line(f"{self._name(step)} = tl.load({self._scattered(step, step.args)}, other=0){widened}")
        elif step.stage == "coord":
            self._line(f"{self._name(step)} = {self.position(step)}")
        elif step.stage in ("seed", "offset"):
            self._names[id(step)] = self.arguments.generator(step.stage, step.payload)
        elif step.stage == "random":
            for line in random_lines(self, step, self._name(step), *map(self._name, step.args)):
                self._line(line)
        elif step.stage == "dot":
            self._multiply(step)
        elif step.stage == "factor":
            self._names[id(step)] = self._pointer(step)
        elif step.stage == "reduce":
            masked = self._masked(step)
            self._line(f"{self._name(step)} = tl.reduce({masked}, {self.tile.reduced_axis}, _{step.text}, keep_dims=True)")
        elif step.args:
            self._line(f"{self._name(step)} = {step.text.format(*map(self._name, step.args))}")
        else:
            self._line(f"{self._name(step)} = tl.full([], {step.text}, {TRITON_TYPES[step.dtype]})")

    def _pointer(self, step: Step) -> str:
        assert step.access is not None
        return self.arguments.pointer(step.access)

    def _load(self, step: Step) -> None:
        offset, mask = self._place(step)
        assert step.access is not None
        widened = ".to(tl.float32)" if step.access.dtype in HALF else ""
        if step.access.shift:
            offset += f" - {self.arguments.stride(step.access.shift)}"
        if step.args:
            mask += f" & {self._name(step.args[0])}, other=0"
        where = f"{self._pointer(step)} + {offset}, mask={mask}" if offset else self._pointer(step)
        self._line(f"{self._name(step)} = tl.load({where}){widened}")

    def _multiply(self, step: Step) -> None:
        product = step.payload
        assert isinstance(product, Product)
        left, right = (self._name(factor) for factor in step.args)
        strides = [self.arguments.stride(stride) for stride in (*product.left, *product.right)]
        for line in product_lines(self._name(step), (left, right), strides, self.arguments.size("inner", product.inner)):
            self._line(line)

    def _gather(self, step: Step) -> None:
        assert step.access is not None
        interval, _ = step.payload  # type: ignore[misc]
        count = self.arguments.stride(interval[1] // interval[0])
        (index,) = (self._name(arg) for arg in step.args)
        offset, mask = self._place(step)
        widened = ".to(tl.float32)" if step.access.dtype in HALF else ""
        along = f"{index} * {self.arguments.stride(step.access.index_stride)}"
        valid = f"{mask} & ({index} >= 0) & ({index} < {count})"
        self._line(f"{self._name(step)} = tl.load({self._pointer(step)} + {offset} + {along}, mask={valid}, other=0){widened}")

    def _scattered(self, step: Step, indices: tuple[Step, ...]) -> str:
        """Pointer and mask of an access whose addresses depend on ``indices``."""
        offset, mask = self._place(step)
        for index, (stride, extent) in zip(map(self._name, indices), step.payload):  # type: ignore[call-overload]
            offset += f" + {index} * {self.arguments.stride(stride)}"
            mask += f" & ({index} >= 0) & ({index} < {self.arguments.stride(extent)})"
        return f"{self._pointer(step)} + {offset}, mask={mask}"

    def _store(self, step: Step) -> None:
        if step.access is not None and step.access.scattered:
            where, mask = self._scattered(step, step.args[1:]).split(", mask=")
            call = "tl.atomic_add" if step.text == "add" else "tl.store"
            order = ', sem="relaxed"' if step.text == "add" else ""
            self._line(f"{call}({where}, {self._name(step.args[0])}, mask={mask}{order})")
            return
        offset, mask = self._place(step)
        if step.partial:
            offset = f"share * {self._extent(self._kept_axis())} + {offset}"
        (value,) = step.args
        where = f"{self._pointer(step)} + {offset}" if offset else self._pointer(step)
        self._line(f"tl.store({where}, {self._name(value)}" + (f", mask={mask})" if mask else ")"))

