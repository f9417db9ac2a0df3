"""A kernel's index arithmetic: program to tile, tile to dimensions, dimensions to addresses. Imports codegen's leaf modules."""

from __future__ import annotations

from codegen.body import Body, Step
from codegen.division import divisible, is_flat, parted, places, runs_from
from codegen.instructions import KEPT
from codegen.source_args import ArgumentList
from codegen.tile import Axis, Tile


class IndexWriter:
    """Collects lines; knows each operand's offset and mask. ``body``, ``tile`` and ``arguments`` are the kernel's."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList) -> None:
        self.body, self.tile, self.arguments = body, tile, arguments
        self._lines: list[str] = []
        self._indent = 1
        self._starts: dict[int, str] = {}  # where this program's block of each axis begins
        self._inside = False  # True in a block that lies within its row, where axis 1 needs no mask

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    def _axis(self, number: int) -> Axis:
        axis = self.tile.axes[number]
        assert axis is not None
        return axis

    def _extent(self, number: int) -> str:
        extent = self._axis(number).extent
        text = self.arguments.size(f"n{number}", extent, literal=number == 1 == self.tile.reduced_axis)
        return text if self.tile.told is None else divisible(text, extent)

    def _arange(self, number: int) -> str:
        if self.tile.axes[0] is None:
            return f"tl.arange(0, B{number})"
        return f"tl.arange(0, B{number})[:, None]" if number == 0 else f"tl.arange(0, B{number})[None, :]"

    def _prologue(self) -> None:
        share = f" // {self.tile.cluster}" if self.tile.cluster > 1 else ""
        self._line("pid = tl.program_id(0)" + (".to(tl.int64)" if self.arguments.wide else "") + share)
        reduced = self.tile.reduced_axis
        if reduced is None and self.tile.axes[0] is not None:
            self._line(f"row = {self._parted('pid', 'across', 1)}")
            if self.tile.axes[2] is not None:
                self._line(f"i2 = {self._parted('row', 'down', 0)}")
                self._split(2)
            self._index(0, self._starts[0] if self.tile.axes[2] is not None else "row * B0")
            if self.tile.peel:
                self._align("row")
                self._line(f"begin = {self._starts[1] or '0'}")
            else:
                self._index(1, self._starts[1])
            return
        if reduced is None:
            if self.tile.peel:
                self._line("begin = pid * B1")
            elif not self.tile.words:
                self._index(1, "pid * B1")
            return
        if self.tile.covered:
            self._cover()
            return
        if self.tile.mixed:
            chunk = self.arguments.size("share_extent", self.tile.share)
            self._line(f"begin = pid * {chunk}")
            self._line(f"end = tl.minimum(begin + {chunk}, {self._extent(0)})")
            if not self.tile.strips:
                self._index(1, "")
            return
        kept, outer = 1 - reduced, self.tile.axes[2] is not None
        if outer or self.tile.share:
            self._line(f"across = ({self._extent(kept)} + B{kept} - 1) // B{kept}")
        if outer:
            self._line("i2 = pid // across" + (f" % {self._extent(2)}" if self.tile.share else ""))
            self._split(2)
        if self.tile.share:
            self._line("share = pid // " + (f"(across * {self._extent(2)})" if outer else "across"))
        self._index(kept, f"(pid % across) * B{kept}" if outer or self.tile.share else f"pid * B{kept}")
        if self.tile.share:
            self._line(f"begin = share * {self.arguments.size('share_extent', self.tile.share)}")
            self._line(f"end = tl.minimum(begin + share_extent, {self._extent(reduced)})")
            return
        self._align("pid")
        if not self.tile.looped and not self.tile.strips:
            self._index(reduced, "")

    def _parted(self, program: str, name: str, number: int) -> str:
        """Which of the axis' blocks ``program`` has decides where it starts; gives how often all of them lie before it."""
        lines, before, block = parted(self.arguments, program, name, self._axis(number), max(self.tile.peel - 1, 0) * number)
        self._lines += ["    " * self._indent + line for line in lines]
        self._starts[number] = f"{block} * B{number}" if block else ""
        return before

    def _cover(self) -> None:
        """A program's share of rows that start off 16-byte boundaries, all of them equally far."""
        share = "pid"
        if not self.tile.shares:
            self._line(f"i0 = pid * B0 + {self._arange(0)}")
            self._row_bounds()
        elif not self.tile.mixed:
            self._line(f"across = ({self._extent(1)} + {self.tile.covered - 1} + B1 - 1) // B1")
            self._line("share = pid // across")
            self._starts[1], share = "(pid % across) * B1", "share"
        width = self.tile.covered
        self._line(f"shift = ({share} * {self.arguments.stride(self.tile.row)}) % {width}  # the same for every row of it")
        if self.tile.strips:
            return
        self._vectors(width)

    def _vectors(self, width: int) -> None:
        """Masks of a block that begins on a boundary ``at`` which a row lies across: its elements (m1), vectors with any of them
        (v1), and with nothing else (w1)."""
        start = self._starts.get(1)
        self._line(f"at = {start} + {self._arange(1)}" if start else f"at = {self._arange(1)}")
        self._line("i1 = at - shift")
        self._line(f"m1 = (i1 >= 0) & (i1 < {self._extent(1)})")
        self._line(f"v1 = at // {width} * {width} < {self._extent(1)} + shift")
        self._line(f"w1 = (at // {width} * {width} >= shift) & (at // {width} * {width} + {width} <= {self._extent(1)} + shift)")
        self._split(1)

    def _rows(self) -> str:
        """The loop over the rows of a program's share."""
        if self.tile.covered:
            first = "pid" if self.tile.mixed else "share"
            return f"{first}, {self._extent(0)}, {self.arguments.size('shares', self.tile.shares)} * B0"
        return "begin, end, B0"

    def _row_index(self) -> None:
        """The rows of one step of that loop."""
        if not self.tile.covered:
            self._index(0, "r", "end")
            return
        self._line(f"i0 = r + {self._arange(0)} * {self.arguments.size('shares', self.tile.shares)}")
        self._row_bounds()

    def _row_bounds(self) -> None:
        """Which rows there are, and the boundary before each."""
        if self._guarded(0):
            self._line(f"m0 = i0 < {self._extent(0)}")
        self._line(f"base = (i0 * {self.arguments.stride(self.tile.row)}) // {self.tile.covered} * {self.tile.covered}")
        self._split(0)

    def _align(self, row: str) -> None:
        """Where rows start off 16-byte boundaries: how far the program's ``row`` does, and the boundary before."""
        if self.tile.peel > 1:
            stride = self.arguments.stride(self.tile.row)
            self._line(f"shift = ({row} * {stride}) % {self.tile.peel}  # rows start off 16-byte boundaries")
            self._line(f"base = (i0 * {stride}) // {self.tile.peel} * {self.tile.peel}")

    def _index(self, number: int, start: str, end: str = "") -> None:
        """Define the axis's index, its mask and the index along each of its dimensions."""
        self._starts[number] = start
        peeled = self.tile.peel > 1 and number == 1
        if peeled and self.tile.vectors and not self._inside:
            return self._vectors(self.tile.peel)
        if peeled and self._inside:
            self._line(f"at = {start} + {self._arange(1)}")
            self._line("i1 = at - shift")
        else:
            begin = f"{start} - shift" if peeled else start
            place = (f"{begin} + " if begin else "") + self._arange(number)
            self._line(f"i{number} = " + (f"tl.multiple_of({place}, [1, 1])" if number and self.tile.singly else place))
        if self._guarded(number):
            known = f" // {self.tile.ragged} * {self.tile.ragged}" if number == 1 and self.tile.even else ""
            bound = f"i{number} < {end or self._extent(number)}{known}"
            self._line(f"m{number} = " + (f"(i1 >= 0) & ({bound})" if peeled else bound))
        if self.tile.ragged:
            self._ends(number)
        self._split(number)

    def _ends(self, number: int) -> None:
        """Where rows start on boundaries and end off them: their starts, and masks of the vectors with any of a row's elements
        (v1) and with nothing else (w1)."""
        width = self.tile.ragged
        if number == 0:
            self._line(f"base = i0 * {self.arguments.stride(self.tile.row)} // {width} * {width}")
        elif not self._inside and not self.tile.even:
            self._line(f"v1 = i1 < ({self._extent(1)} + {width - 1}) // {width} * {width}")
            if any(step.stage == "store" and self._in_vectors(step) for step in self.body.steps):
                self._line(f"w1 = i1 < {self._extent(1)} // {width} * {width}")

    def _in_vectors(self, step: Step) -> bool:
        """True for a load or store of such rows that starts on a boundary."""
        access = step.access
        if not self.tile.ragged or step.stage not in ("load", "store") or access is None or step.partial:
            return False
        return not access.shift and not access.scattered and access.byte_offset % 16 == 0 and self.tile.follows(step)

    def _split(self, number: int) -> None:
        """Define the index along each of the axis's dimensions, where an operand needs it."""
        if not all(self._linear(strides, number) for strides in self.tile.strides.values()):
            for line in places(self.arguments, self.tile, number):
                self._line(line)

    def _linear(self, strides: tuple[int, ...], number: int) -> bool:
        """True where the operand runs along the axis with one stride."""
        return runs_from(self.tile, number, strides) == 0

    def _terms(self, step: Step) -> dict[int, list[str]]:
        """The operand's offset as summands per axis."""
        strides = self.tile.strides[id(step)]
        numbers = [number for number in (0, 1, 2) if self.tile.axes[number] is not None]
        out: dict[int, list[str]] = {}
        for number in numbers:
            pairs = self._pairs(strides, number)
            terms = [self._scaled(index, stride, number, strides) for index, stride in pairs if stride]
            if terms:
                out[number] = terms
        return out

    def _axes(self, step: Step) -> set[int]:
        """The axes along which the step's result differs."""
        own = set(self._terms(step)) if id(step) in self.tile.strides else set()
        return own.union(*(self._axes(arg) for arg in step.args))

    def position(self, step: Step) -> str:
        """What the step's form gives each element."""
        return " + ".join(term for terms in self._terms(step).values() for term in terms) or "tl.full([], 0, tl.int32)"

    def _dims(self, number: int) -> tuple[int, ...]:
        axis = self.tile.axes[number]
        return () if axis is None else axis.dims

    def _pairs(self, strides: tuple[int, ...], number: int) -> list[tuple[str, int]]:
        """(index, stride) of each summand of an operand's offset along an axis."""
        dims = self._dims(number)
        if dims and self._linear(strides, number):
            return [(f"i{number}", strides[dims[-1]])]
        start = runs_from(self.tile, number, strides) if is_flat(self.tile, number) else len(dims)
        run = [(f"r{dims[start]}", strides[dims[-1]])] if start + 1 < len(dims) else []
        return [*((f"x{dim}", strides[dim]) for dim in (dims[:start] if run else dims)), *run]

    def _scaled(self, index: str, stride: int, number: int, strides: tuple[int, ...]) -> str:
        if stride == 1:
            return index
        inner = self._axis(1)
        dense = number == 0 and inner.dims and self._linear(strides, 1) and strides[inner.dims[-1]] == 1
        if dense and stride == inner.extent and index == "i0":
            return f"{index} * {self._extent(1)}"
        return f"{index} * {self.arguments.stride(stride) if self.tile.told is None else self._told(stride)}"

    def _told(self, stride: int) -> str:
        """A stride, of which the compiler is told what divides it, where it knows of the index what neighbours have in common."""
        text = self.arguments.stride(stride)
        return text if self.tile.told is None and not is_flat(self.tile, 1) else divisible(text, stride)

    def _kept_axis(self) -> int:
        return 1 if self.tile.reduced_axis is None else 1 - self.tile.reduced_axis

    def _place(self, step: Step) -> tuple[str, str]:
        """(offset, mask) texts of a load or store; empty where it touches one element."""
        terms = self._terms(step)
        scattered = step.access is not None and step.access.scattered
        if step.stage in ("store", "gather") and not scattered:
            for number in self._store_axes(step):
                terms.setdefault(number, [] if terms else [f"i{number} * 0"])
        elif step.args:  # the block of a condition or an index may be wider than the operand's own
            kept = step.level == KEPT and self.tile.reduced_axis is not None
            for number in ((self._kept_axis(),) if kept else (0, 1)):
                if self.tile.axes[number] is not None:
                    terms.setdefault(number, [f"i{number} * 0"])
        offset = " + ".join(term for number in sorted(terms) for term in terms[number])
        if self.tile.peel > 1 and (self._inside or self.tile.vectors) and self.tile.follows(step):
            if not self._inside and step.stage in ("load", "store"):
                return "base + at", "v1"
            offset = "base + at"
        if self.tile.covered and step.stage in ("load", "store") and self.tile.follows(step):
            return "base + at", "" if self._inside else f"{self._rows_guard()}v1"
        if self._in_vectors(step):
            ends = "m1" if self.tile.even else "v1"
            return "base + i1", " & ".join(["m0"] * self._guarded(0) + [ends] * (not self._inside))
        offset = f"({offset})" if self.tile.singly and " + " in offset else offset  # one for all operands that are walked alike
        return offset, " & ".join(f"m{number}" for number in sorted(terms) if self._guarded(number))

    def _guarded(self, number: int) -> bool:
        """True where an index along the axis may lie outside. Programs that work on one row at a time all have one."""
        rows, reduced = self.tile.axes[0], self.tile.reduced_axis
        alone = rows is not None and rows.block == 1 and reduced != 0
        return number == 1 and not self._inside or number == 0 and not self.tile.peel and not alone

    def _rows_guard(self) -> str:  # what a mask of whole rows begins with
        return "m0 & " * self._guarded(0)

    def _store_axes(self, step: Step) -> list[int]:
        """Axes that a store's pointer block must have, so that it can take the value's shape."""
        if step.across:
            return [1]
        if self.tile.reduced_axis is not None and step.level == KEPT:
            return [self._kept_axis()]
        return [number for number in (0, 1) if self.tile.axes[number] is not None and not self._terms(step)]
