"""What a group of parts touches in memory, and when two of them collide. Imports codegen's leaf modules and `ir_nodes`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from codegen.forms import Form
from codegen.index_maps import disjoint
from codegen.instructions import FULL, Instr, MemAccess, Part
from ir_nodes.node import Value


@dataclass(slots=True, eq=False)
class Footprint:
    """One way in which a group touches a buffer."""

    form: Form | None  # over the full space
    dtype: torch.dtype
    access: MemAccess
    gathers: bool
    written: dict[Value, None] = field(default_factory=dict)

    def collides(self, other: "Footprint") -> bool:
        """True where two programs could touch one byte, one of them writing."""
        if not (self.written or other.written) or not self.access.overlaps(other.access):
            return False
        regular = not (self.access.scattered or other.access.scattered) and self.dtype is other.dtype
        same = regular and self.form == other.form and self.access.byte_offset == other.access.byte_offset
        if same and (self.gathers or other.gathers):
            gather, writer = (self, other) if self.gathers else (other, self)
            return gather.access.value not in writer.written
        return not same and not self._interleaves(other)

    def _interleaves(self, other: "Footprint") -> bool:
        """True where both share rows, but no element of them, as the parts of a concatenation do."""
        distance, rest = divmod(other.access.byte_offset - self.access.byte_offset, self.dtype.itemsize)
        if self.dtype is not other.dtype or rest or self.gathers or other.gathers or self.access.shift or other.access.shift:
            return False
        return self.form is not None and other.form is not None and disjoint(self.form, other.form, distance)


def picked_by_index(part: Part) -> set[MemAccess]:
    """How ``part`` reads, element by element, what lies at places that other memory names: it has nothing in common with a
    kernel that walks the same. On an H200, a mean of 5,592 rows of 3,000 bfloat16 numbers and elements of any of its rows take
    510 us in one kernel; torch.compile has two, which take 13 and 177."""
    if part.facts.kinds.isdisjoint(("gather", "take")):
        return set()
    loaded: dict[Instr, bool] = {}
    for instr in part.instrs:
        loaded[instr] = instr.kind in ("load", "gather", "take") or any([loaded[arg] for arg in instr.args])
    return {instr.access for instr in part.instrs if instr.kind in ("gather", "take") and instr.level == FULL
            and instr.access is not None and any([loaded[arg] for arg in instr.args])}
