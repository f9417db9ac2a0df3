"""Writes a body's instructions as lines of Triton. Imports codegen's leaf modules."""

from __future__ import annotations

import torch

from codegen import bounds
from codegen.body import Body, Step
from codegen.instructions import FULL, IN_BITS, UNIFORM
from codegen.monoids import COMBINE, identity
from codegen.onehot import ONE_HOT
from codegen.packed_source import BitWriter
from codegen.product import Product, product_lines
from codegen.promotion import HALF, TRITON_TYPES
from codegen.random_source import random_lines
from codegen.shared_rows import before_sums
from codegen.source_args import ArgumentList
from codegen.tile import Tile
from codegen.unloaded import along, loads_nothing

BF16_ROUNDING = "{0}.to(tl.bfloat16).to(tl.float32)"


def in_bfloat16(step: Step) -> bool:
    """True for a sum, difference or product of two bfloat16 numbers, or for one of them chosen or negated: where that is rounded
    again, the compiler takes the machine's bfloat16 instructions, which work on two at a time."""
    return step.text in ("{0} + {1}", "{0} - {1}", "{0} * {1}") and all(map(is_bfloat16, step.args)) or is_bfloat16(step)


def is_bfloat16(step: Step, depth: int = 3) -> bool:
    """True where a bfloat16 number is known to be held as a float32, looking through ``depth`` choices and negations."""
    if step.stage == "load":
        return step.access is not None and step.access.dtype is torch.bfloat16
    chosen = {"-{0}": step.args, "tl.where({0}, {1}, {2})": step.args[1:]}.get(step.text, ())
    return step.text == BF16_ROUNDING or depth > 0 and bool(chosen) and all(is_bfloat16(arg, depth - 1) for arg in chosen)


class InstructionWriter(BitWriter):
    """Knows each step's name; writes a step, wherever the caller is in the kernel."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList) -> None:
        super().__init__(body, tile, arguments)
        self._names: dict[int, str] = {}
        self._emitted: set[int] = set()
        self._before_sums = before_sums(body, tile)
        self._wide = {id(arg) for step in body.steps if step.stage != "store" and not in_bfloat16(step) for arg in step.args}

    def _name(self, step: Step) -> str:
        return self._names.setdefault(id(step), f"t{len(self._names)}")

    def _masked(self, step: Step, name: str = "") -> str:
        """What a reduction takes, by its own or another ``name``, and nothing of what lies outside."""
        (value,) = step.args
        name = name or self._name(value)
        return name if self._inside else f"tl.where(m{self.tile.reduced_axis}, {name}, {identity(step.text, step.dtype)})"

    def _for_all_rows(self, step: Step) -> bool:
        """Is it one number, or an operand that is the same in every row, under no condition of the row's?"""
        alike = step.stage == "load" and step.level == FULL and not step.args
        return step.level == UNIFORM or alike and 0 not in self._terms(step)

    def _begin_column(self, step: Step) -> None:
        """Accumulators of columns, for rows that are walked."""
        kind = TRITON_TYPES[step.dtype]
        self._line(f"{self._name(step)}_acc = tl.full([B0, B1], {identity(step.text, step.dtype)}, {kind})")

    def _end_column(self, step: Step) -> None:
        self._line(f"{self._name(step)} = tl.reduce({self._name(step)}_acc, 0, _{step.text}, keep_dims=True)")

    def _count(self, step: Step) -> None:
        """Rows' elements into a column's accumulators."""
        name, (value,) = self._name(step), step.args
        counted = self._name(value)
        if self._guarded(0):
            counted = f"tl.where(m0, {counted}, {identity(step.text, step.dtype)})"
        self._line(f"{name}_acc = {COMBINE[step.text].format(f'{name}_acc', counted)}")

    def _emit(self, step: Step) -> None:
        self._emitted.add(id(step))
        if step.stage in ("scalar", "size"):
            self._names[id(step)] = self.arguments.number(step.stage, step.payload, step.dtype)
        elif step.stage == "load":
            self._load(step)
        elif step.stage == "gather":
            self._gather(step)
        elif step.text == IN_BITS:
            self._unpack(step, self._name(step), self._pointer(step))
        elif step.stage == "take":
            self._line(f"{self._name(step)} = tl.load({self._scattered(step, step.args)}, other=0){self._widened(step)}")
        elif step.stage == "coord" and self._compared(step):
            self._names[id(step)] = f"({self.position(step)})"
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
        elif step.stage == "check":
            self._check(step)
        elif step.stage == "reduce":
            self._line(f"{self._name(step)} = tl.reduce({self._masked(step)}, {along(step, self.tile)})")
        elif step.stage == "scan":
            self._scan(step)
        elif step.args:
            self._line(f"{self._name(step)} = {self._text(step).format(*self._operands(step))}")
        else:
            self._line(f"{self._name(step)} = tl.full([], {step.text}, {TRITON_TYPES[step.dtype]})")

    def _text(self, step: Step) -> str:
        """The expression; where float32 is computed with a value rounded to bfloat16, rounding is one instruction."""
        wide = step.level == FULL and id(step) in self._wide and not in_bfloat16(step.args[0])
        return "_bf16({0})" if wide and self.tile.packs and step.text == BF16_ROUNDING else step.text

    def _compared(self, place: Step) -> bool:
        """Does nothing but a `ONE_HOT` need the place, or an access to bits?"""
        return all(step.text == IN_BITS or step.text == ONE_HOT and step.args[0] is place for step in self.body.steps
                   if place in step.args)

    def _operands(self, step: Step) -> list[str]:
        """Names of what an expression takes. Where places along axis 1 are compared with a row's, each thread's lanes are, which
        do not change from block to block, with how far from the block's start that is."""
        names = [self._name(arg) for arg in step.args]
        placed = step.text == ONE_HOT and step.args[0].stage == "coord"
        if placed and self._starts.get(1) and self.position(step.args[0]) == "i1":
            shift = " - shift" if self.tile.peel > 1 or self.tile.covered else ""
            start = self._starts[1] + shift
            names[:2] = [self._arange(1), f"{names[1]} - ({start})" if " " in start else f"{names[1]} - {start}"]
        return names

    def _pointer(self, step: Step) -> str:
        assert step.access is not None
        return self.arguments.pointer(step.access)

    def _load(self, step: Step) -> None:
        offset, mask = self._place(step)
        assert step.access is not None
        widened = self._widened(step)
        if step.access.shift:
            offset += f" - {self.arguments.stride(step.access.shift)}"
        elif offset == "i1" and self._from_boundaries():
            offset = "(-shift) + at"
        elif id(step) in self._before_sums and set(self._terms(step)) == {1}:
            offset += f" + {self._arange(0)} * 0"
        if step.args:
            mask += " & " * bool(mask) + f"{self._name(step.args[0])}, other=0"
        where = f"{self._pointer(step)} + {offset}" + (f", mask={mask}" if mask else "") if offset else self._pointer(step)
        whole = self._whole_block(step, mask)
        if not whole:
            self._line(f"{self._name(step)} = tl.load({where}{self._hint(step)}){widened}")
            return
        self._line(f"if {whole}:")
        self._line(f"    {self._name(step)} = tl.load({self._pointer(step)} + {offset})")
        self._line("else:")
        self._line(f"    {self._name(step)} = tl.load({where})")
        if widened:
            self._line(f"{self._name(step)} = {self._name(step)}{widened}")

    def _from_boundaries(self) -> bool:
        """Are blocks along axis 1 counted from a boundary before the row? How far apart elements lie of what all rows share is
        then known, and none needs an address of its own."""
        tile = self.tile
        return tile.covered > 0 and not tile.mixed or tile.peel > 1 and (self._inside or tile.vectors)

    def _widened(self, step: Step) -> str:
        """What makes a loaded number one to compute with."""
        return ".to(tl.float32)" if step.access is not None and step.access.dtype in HALF else ""

    def _hint(self, step: Step) -> str:
        """What a load or store tells the caches, as further arguments."""
        return ""

    def _whole_block(self, step: Step, mask: str) -> str:
        """Whether a loop's block lies within what is reduced, where its load asks that; else nothing. Loads in a branch of their
        own are not put off until the first of them has been computed with: all of a thread's are under way together, as they are
        in loops that load ahead."""
        tile, axis = self.tile, self.tile.reduced_axis
        short = tile.looped and tile.stages == 1 and (tile.share or axis == 0) and not (tile.peel or tile.covered or tile.ragged)
        if not short or step.level != FULL or self.body.backwards:
            return ""
        within = {f"m{axis}": f"r + B{axis} <= {'end' if tile.share else self._extent(int(axis == 1))}"}
        if axis == 0:
            within["m1"] = f"{self._starts[1]} + B1 <= {self._extent(1)}"
        terms = mask.split(" & ")
        if f"m{axis}" not in terms or any(term not in within for term in terms):
            return ""
        return within[terms[0]] if len(terms) == 1 else " and ".join(f"({within[term]})" for term in terms)

    def _scan(self, step: Step) -> None:
        """Rows held whole, or in a loop over blocks, whose last element is what the next block starts from."""
        name, axis = self._name(step), self.tile.reduced_axis
        assert axis is not None
        value = self._masked(step)
        if self._inside or step.args[0].level != FULL:
            value = f"tl.broadcast_to({value}, [B0, B1])"
        self._line(f"{name} = tl.associative_scan({value}, {axis}, _{step.text}{', reverse=True' if step.payload else ''})")
        if self.tile.looped:
            self._line(f"{name} = {COMBINE[step.text].format(f'{name}_carry', name)}")
            end = "0" if step.payload else f"B{axis} - 1"
            last = f"tl.where({self._arange(axis)} == {end}, {name}, 0)"
            row = f"tl.reduce({last}, {axis}, _add, keep_dims=True)"
            self._line(f"{name}_carry = {f'tl.broadcast_to({row}, [B0, B1])' if loads_nothing(self.body.steps) else row}")

    def _multiply(self, step: Step) -> None:
        product = step.payload
        assert isinstance(product, Product)
        left, right = (self._name(factor) for factor in step.args)
        strides = ["" if stride == 1 else self.arguments.stride(stride) for stride in (*product.left, *product.right)]
        for line in product_lines(self._name(step), (left, right), strides, self.arguments.size("inner", product.inner)):
            self._line(line)

    def _gather(self, step: Step) -> None:
        assert step.access is not None
        interval, _ = step.payload  # type: ignore[misc]
        count = self.arguments.stride(interval[1] // interval[0])
        (index,) = (self._name(arg) for arg in step.args)
        offset, mask = self._place(step)
        along = f"{index} * {self.arguments.stride(step.access.index_stride)}"
        valid = f"{mask} & " * bool(mask) + f"({index} >= 0) & ({index} < {count})"
        self._line(f"{self._name(step)} = tl.load({self._pointer(step)} + {offset} + {along}, mask={valid}, other=0)")
        self._names[id(step)] += self._widened(step)  # where it is used: nothing has to wait for it before

    def _check(self, step: Step) -> None:
        """Stops at an index that is out of range, in those places where there is an element."""
        index, *others = map(self._name, step.args)
        self._names[id(step)] = index
        valid = f"({index} >= 0) & ({index} < {self.arguments.stride(step.payload)})"  # type: ignore[arg-type]
        valid = f"({valid})" + "".join(f" | ({index} == {other})" for other in others)
        masks = [f"m{number}" for number in sorted(self._axes(step.args[0])) if self._guarded(number)]
        mask = f", mask={' & '.join(masks)}" if masks else ""
        self._line(f'tl.device_assert({valid}, "{step.text}"{mask})')

    def _scattered(self, step: Step, indices: tuple[Step, ...]) -> str:
        """Pointer and mask of an access whose addresses depend on ``indices``."""
        offset, mask = self._place(step)
        valid = [mask] if mask else []
        for index, (stride, extent) in zip(indices, step.payload):  # type: ignore[call-overload]
            begin, more = bounds.parted(index) if stride == 1 else (index, 0)
            offset += f" + {self._name(begin)}" + (f" * {self._told(stride)}" if stride != 1 else "")
            offset += f" + {more}" if more else ""
            valid += bounds.checks(index, self._name(index), extent, self.arguments.stride(extent))
        return f"{self._pointer(step)} + {offset}, mask={' & '.join(valid) or 'True'}"

    def _at_an_end(self) -> str:
        """Whether a block along axis 1 holds the end of its row, where that is known to one number a program; else nothing.

        Blocks that cover rows off boundaries have no such branch: it costs their loops more than the stores do (on an H200,
        GELU's gradient over 8,191 rows of 5,003 in bfloat16: 102 us with it, 83 without)."""
        start = self._starts.get(1)
        if not start or self.tile.peel or self.tile.strips or self.tile.covered:
            return ""
        return f"{start} + B1 > {self._extent(1)} // {self.tile.ragged} * {self.tile.ragged}"

    def _store(self, step: Step) -> None:
        if step.text == IN_BITS:
            self._pack(step, self._name(step.args[0]), self._pointer(step))
            return
        if step.access is not None and step.access.scattered:
            where, mask = self._scattered(step, step.args[1:]).split(", mask=")
            call = "tl.atomic_add" if step.text == "add" else "tl.store"
            order = ', sem="relaxed"' if step.text == "add" else ""
            self._line(f"{call}({where}, {self._name(step.args[0])}, mask={mask}{order})")
            return
        offset, mask = self._place(step)
        if step.partial:
            share, axis = ("pid", 1) if step.across else ("share", self._kept_axis())
            apart = f" * {self._extent(2)}" if self.tile.axes[2] is not None else ""
            offset = f"{share} * {self._extent(axis)}{apart} + {offset}"
        value = step.args[0]
        where = f"{self._pointer(step)} + {offset}" if offset else self._pointer(step)
        if offset in ("base + at", "base + i1") and not self._inside and not self.tile.even:
            rows, hint = self._rows_guard(), self._hint(step)
            self._line(f"tl.store({where}, {self._name(value)}, mask={rows}w1{hint})")
            ends = self._at_an_end()
            self._line(f"if {ends}:" if ends else "# the rest of the vectors at the row's ends")
            self._indent += bool(ends)
            self._line(f"tl.store({where}, {self._name(value)}, mask={rows}m1 & (w1 == 0){hint})")
            self._indent -= bool(ends)
            return
        self._line(f"tl.store({where}, {self._name(value)}" + (f", mask={mask}" if mask else "") + f"{self._hint(step)})")
