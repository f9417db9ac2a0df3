"""Writes loads and stores of masks that are kept as bits. Imports codegen's leaf modules.

Eight elements that follow one another along axis 1 share a byte, which is one access where a block holds them all.
"""

from __future__ import annotations

from codegen.addressing import IndexWriter
from codegen.body import Body, Step
from codegen.instructions import FULL
from codegen.source_args import ArgumentList
from codegen.tile import Tile
from ir_nodes.own import BITS


class Unpackable(Exception):
    """No block of a kernel holds the neighbours that share a byte, of a mask that it would store as bits."""


class BitWriter(IndexWriter):
    """Adds `_unpack` and `_pack`, and what runs of neighbours have in common."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList) -> None:
        super().__init__(body, tile, arguments)
        self._end = ""  # what indices along axis 1 stay below, where that is not the axis's extent

    def fraction(self, step: Step, count: int) -> tuple[str, str] | None:
        """The step's position where the block begins along axis 1, divided by ``count``, and how much more for every so-many-th
        element, where positions run along that axis from a multiple of ``count`` on and rows hold whole runs of so many; else
        None."""
        strides, axis = self.tile.strides[id(step)], self._axis(1)
        others = [strides[dim] for number in (0, 2) for dim in self._dims(number)]
        along = bool(axis.dims) and self._linear(strides, 1) and strides[axis.dims[-1]] == 1
        if not along or axis.extent % count or axis.block % count or any(stride % count for stride in others):
            return None
        start = self._starts[1]
        lanes = f"tl.arange(0, B1 // {count})" + ("[None, :]" if self.tile.axes[0] is not None else "")
        terms = [f"{index} * {self.arguments.stride(stride // count)}" for number in (0, 2) for index, stride in
                 self._pairs(strides, number) if stride]
        return " + ".join([*terms, *([f"({start}) // {count}"] if start else [])]) or "0", lanes

    def _index(self, number: int, start: str, end: str = "") -> None:
        if number == 1:
            self._end = end
        super()._index(number, start, end)

    def _unpack(self, step: Step, name: str, pointer: str) -> None:
        """Define ``name`` as the mask's element for each of the step's block."""
        (place,) = step.args
        run = self._bytes(step, place)
        if run is not None:
            where, mask = run
            byte = f"tl.load({pointer} + {where}{mask and f'{mask}, other=0'})"
            bits = f"tl.reshape(_to_eight({byte}), {self._shape(step, 'B1')})"
            self._line(f"{name} = (({bits} >> ({self._arange(1)} % {BITS})) & 1) != 0")
            return
        bounds = [f"m{number}" for number in sorted(self._terms(place)) if self._guarded(number)]
        mask = f", mask={' & '.join(bounds)}, other=0" if bounds else ""
        self._line(f"{name}_at = {self.position(place)}")
        self._line(f"{name} = ((tl.load({pointer} + {name}_at // {BITS}{mask}) >> ({name}_at % {BITS})) & 1) != 0")

    def _pack(self, step: Step, value: str, pointer: str) -> None:
        """Store ``value``. Raises Unpackable where no block holds neighbours that share a byte."""
        run = self._bytes(step, step.args[1])
        if run is None:
            raise Unpackable
        where, mask = run
        bits = f"tl.broadcast_to({value}, {self._shape(step, 'B1')}).to(tl.uint8) << ({self._arange(1)} % {BITS})"
        parted = f"tl.reshape({bits}, {self._shape(step, f'B1 // {BITS}, 2, 2, 2')})"
        self._line(f"tl.store({pointer} + {where}, _of_eight({parted}).to(tl.uint8){mask})")

    def _bytes(self, step: Step, place: Step) -> tuple[str, str] | None:
        """Where the bytes of a block lie, and the mask of an access to them as a further argument; None where its elements share
        bytes with those of other blocks, or are no neighbours."""
        cut = self.tile.share if self.tile.reduced_axis == 1 and not self.tile.mixed else 0
        run = self.fraction(place, BITS) if not (cut % BITS or self.tile.peel > 1 or self.tile.covered) else None
        if run is None:
            return None
        start, lanes = self._starts[1], run[1]
        at = f"({start}) // {BITS} + {lanes}" if start else lanes
        bounds = ["m0"] * (self._extent_down(step) == "B0" and self._guarded(0))
        bounds += [f"({at} < {self._end or self._extent(1)} // {BITS})"] * self._guarded(1)
        return " + ".join(run), f", mask={' & '.join(bounds)}" if bounds else ""

    def _shape(self, step: Step, along: str) -> str:
        """Of the step's block, with these extents in place of axis 1's."""
        rows = self._extent_down(step)
        return f"[{rows}, {along}]" if rows else f"[{along}]"

    def _extent_down(self, step: Step) -> str:
        """The block's extent along axis 0: of what there is one of for each column, 1. "" where there is no such axis."""
        if self.tile.axes[0] is None:
            return ""
        return "1" if self.tile.reduced_axis == 0 and step.level != FULL else "B0"
