"""The tile that a body's iteration space is laid out as: common dimensions, the two axes they form, block sizes and warps.
Imports codegen's leaf modules; `codegen.layout` makes tiles."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.aligned import walked
from codegen.body import Body, Step
from codegen.cached_rows import Walk
from codegen.forms import touched
from codegen.tuning import power_of_two

Strides = dict[int, tuple[int, ...]]
"""Per step (by id) its stride along each dimension."""


@dataclass(frozen=True, slots=True)
class Axis:
    """``dims`` (positions in `Tile.dims`, outermost first) walked by one index, ``block`` of them per program."""

    dims: tuple[int, ...]
    extent: int
    block: int


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """``axes`` are (axis 0, axis 1, outer axis); axis 0 is None for a flat pointwise body. Each program has one index of the
    outer axis, if there is one. ``reduced_axis``: 0, 1 or None.

    ``looped``: the reduced axis is walked block by block. ``share``: how many summands each program of a split reduction
    takes; 0 where a program sees all of them.

    ``peel``: 0 where every block is masked. Otherwise a program has one row, and blocks that lie within it need no mask; above 1,
    rows start off 16-byte boundaries and are walked in blocks that don't: so many elements lie between two boundaries. ``row``:
    the stride from row to row of the operands that are walked so.
    """

    dims: tuple[int, ...]
    strides: Strides
    axes: tuple[Axis | None, Axis, Axis | None]
    reduced_axis: int | None
    looped: bool
    share: int
    num_warps: int
    stages: int = 1  # how many steps ahead the loop loads
    depth: int = 0  # summands of a matrix product that one step of its loop takes
    shares: int = 0  # how many programs share a reduction
    peel: int = 0
    vectors: bool = False  # with ``peel`` above 1: blocks at a row's ends load whole vectors, too
    covered: int = 0  # as ``peel``, for programs that take every ``shares``-th row and mask whole vectors
    ragged: int = 0  # above 1: rows start on 16-byte boundaries and end off them; so many elements lie between two
    row: int = 0
    packs: bool = True  # does the machine round two floats to bfloat16 at a time?
    overlaps: bool = False  # may programs be placed before the kernel before this one has ended?
    near: int = 0  # neighbours that share a maximum in a loop that sums exponentials, or 0: all of a block do
    mixed: bool = False  # programs walk ``share`` rows each, and sum columns beside
    registers: int = 0  # of a thread at most; 0: as many as the compiler takes
    strips: int = 0  # so many blocks along axis 1 hold a row, two or more; 0: one does, or it is walked
    walk: Walk | None = None  # how a row is walked twice that its multiprocessor's cache holds
    told: int | None = None  # the axis of which the compiler is told what lies side by side; blocks begin at multiples of 16
    singly: bool = False  # most operands lie off boundaries: a thread's elements lie a warp apart, not side by side
    words: int = 0  # so far apart lie the strips' elements, which share a call of Philox; 0: they follow one another

    def follows(self, step: Step) -> bool:
        """True where the operand's rows lie ``row`` elements apart and run along axis 1."""
        return walked(self.dims, self.strides[id(step)], self.axes) == self.row

    @property
    def even(self) -> bool:
        """Do rows that start on boundaries end on such, too, of which the compiler has to be told?"""
        return self.ragged > 0 and self.axes[1].extent % self.ragged == 0

    @property
    def cluster(self) -> int:
        """How many programs hold a row together."""
        return max(self.walk.programs, 1) if self.walk is not None else 1

    def shape(self) -> tuple[object, ...]:
        """What two tiles of one body may differ in."""
        return (self.axes, self.looped, self.num_warps, self.stages, self.depth, self.peel, self.ragged, self.near, self.strips,
                self.walk)


def addressed(body: Body) -> list[Step]:
    """Steps that have an address pattern."""
    return [step for step in body.steps if step.stage in ("load", "store", "gather", "take", "coord", "random", "dot")]


def rows_by_index(step: Step, strides: Strides) -> bool:
    """Are rows, or parts of them, read or written where an index says, their numbers side by side?"""
    return step.access is not None and step.access.scattered and 1 in strides.get(id(step), ())


def reached(step: Step, body: Body, strides: Strides) -> int:
    """How many of the body's elements the step moves: all where an index chooses rows."""
    return body.numel if rows_by_index(step, strides) else touched(step.form)


def warps_for(elements: int, per_lane: int, most: int = 16) -> int:
    """Warps of which each thread has ``per_lane`` of so many elements, and ``most`` warps at most."""
    return max(1, min(most, power_of_two(elements // (32 * per_lane))))
