"""Which groups may share a kernel: early returns, each with its reason. Imports codegen's leaf modules and `ir_nodes`.

A kernel's programs run in no order, so within one kernel an element may be written and read only by the program that owns
it. Hence the one rule on memory: two accesses of a group that overlap, one of them a write, must visit the same elements in
the same order. Everything else is about one common iteration space and about size.
"""

from __future__ import annotations

from typing import Collection

from codegen import across, draws, forms, mixing, one_pass
from codegen.aligned import KNOWN
from codegen.footprint import Footprint
from codegen.forms import Form
from codegen.group import MAX_DIMS, MAX_NODES, MAX_OPERANDS, Group, Joint, Touched, Unit
from codegen.instructions import KEPT
from codegen.strips import lanes_drawn
from codegen.tuning import HOPPER
from ir_nodes.node import Value
from ir_nodes.ops import info

DRAWN = 1 << 20
"""Random numbers from which a kernel of their own is worth its launch."""
LANE, EMPTY = 9.0, 17.0
"""Bytes of memory that move while a row's kernel draws for one lane, with an element and without. On an H200, 64 Mi elements of
dropout, sum and norm in bfloat16: 148 us in rows of 768, 159 to 171 in rows of 640 and of 1,024 to 8,192 (184 to 188 in two
kernels), but 224, 267 and 388 in rows of 384, 320 and 264, which no strips fit (193, 202, 274)."""


SHORT = 128
"""Elements of a row up to which it does not matter whether rows start on boundaries."""
LONG = 1 << 15
"""Elements of a row that take one program longer than many programs a launch of their own."""
LONE = 1_000_000
"""Instructions of a program among few from which elementwise ops are a kernel of their own, whose programs fill the machine: four
microseconds of a multiprocessor, more than the launch costs. On an H200, a softmax over columns of a cosine of a product over
4,026 x 1,000 with its gradient takes 95 us, 234 in one kernel; one of a cosine over 396 x 5,120 in a longer program 98, 128."""
BYTES = 40
"""Bytes that an H200 moves while such a program takes one instruction, of two warps that issue one in each cycle together: what
one kernel spares is weighed against that. On an H200, a log softmax over columns of 5,120 and what it is mixed with take 399 us
with their gradient in three kernels, 270 in two."""


def joint_space(left: Group, right: Group) -> Joint | str:
    """One iteration space for both groups, or why there is none."""
    if left.reduced is None and right.reduced is not None:
        left, right = right, left
    kept, crossed = (*left.kept_units, *right.kept_units), (*left.crossed, *right.crossed)
    split = left.split or right.split
    if mixing.can_mix(left, right):
        rows, columns = (left, right) if left.reduced and left.reduced[0][0] == 1 else (right, left)
        crossed = (*rows.crossed, *mixing.column_units(columns))
        return Joint(rows.numel, rows.reduced, tuple(rows.kept_units), False, crossed)
    if right.reduced is not None:
        if left.reduced != right.reduced or left.numel != right.numel:
            return "they reduce different dimensions"
        return Joint(left.numel, left.reduced, kept, split, crossed)
    if right.numel == left.numel:
        return Joint(left.numel, left.reduced, kept, split, crossed)
    if left.reduced is not None and right.numel == left.kept:
        return Joint(left.numel, left.reduced, (*kept, *right.units), split, crossed)
    if left.crossed and right.numel * left.kept == left.numel:
        return Joint(left.numel, left.reduced, kept, split, (*crossed, *right.units))
    return f"their index spaces differ ({left.numel} and {right.numel} elements)"


def can_fuse(left: Group, right: Group) -> Joint | str:
    """How the two groups become one kernel, or the reason why they do not."""
    if not left.fusible or not right.fusible:
        return "one of them is run by ATen"
    if left.stage != right.stage:
        return "the schedule keeps their segments apart, or one may begin before the other is recorded"
    if (left.wants or right.wants) and left.wants != right.wants and _belongs_elsewhere(left, right):
        return "it is made again for another kernel"
    if len(left.units) + len(right.units) > MAX_NODES:
        return f"more than {MAX_NODES} nodes in one kernel"
    if left.draws and right.draws:
        return "each draws random numbers"
    if left.scans | right.scans == 3:
        return "they scan in opposite directions"
    joint = joint_space(left, right)
    if left.operands + right.operands > MAX_OPERANDS and _distinct(left, right, joint) > MAX_OPERANDS:
        return f"more than {MAX_OPERANDS} operands in one kernel"
    if isinstance(joint, str):
        return joint
    if left.multiplies + right.multiplies + (joint.reduced is not None) > 1:
        return "a matrix product's tiles suit no other product and no reduction"
    if joint.reduced is not None and joint.numel >= DRAWN and (left.draws or right.draws):
        slow = _draws_slowly(left, right, joint)
        if slow:
            return slow
    if joint.crossed:
        mixed = mixing.refused([*left.units, *right.units], dict.fromkeys(joint.crossed), dict.fromkeys(joint.kept_units))
        if mixed is not None:
            return mixed
    if joint.reduced is not None and (left.reduced is None or right.reduced is None) and _works_alone(left, right, joint):
        return "a few programs that reduce long rows would compute what many could"
    if joint.reduced is not None and _only_picks(left, right, joint):
        return "one picks an element of each of a few long rows, which many programs walk for the other"
    apart = one_pass.refused(left, right) if joint.reduced is not None else None
    apart = apart or across.refused(left, right, joint) or _lie_off(left, right)
    return apart or _memory_reason(left, right, joint) or _split_reason(left, right, joint) or joint


def _lie_off(left: Group, right: Group) -> str:
    """Why two groups are better apart of which neither makes for the other what has an element for each of its own; "": they are
    not. Rows of 511 of 512 numbers start off boundaries in memory, and what could be read as one run would be read so."""
    cuts = forms.merge_cuts(left.cuts, right.cuts) if left.numel == right.numel else None
    if not cuts or cuts[0] < SHORT or cuts[0] % KNOWN == 0 or all(_inmost(side) % KNOWN for side in (left, right)):
        return ""
    if any(one.loads.get(value, 0) >= one.numel for one, two in ((left, right), (right, left)) for value in two.stores):
        return ""
    return "rows of one would begin off the boundaries that the other's lie on"


def _inmost(group: Group) -> int:
    """Elements of a row that its operands run along."""
    return group.cuts[0] if group.cuts else group.numel


def _draws_slowly(left: Group, right: Group, joint: Joint) -> str:
    """Why random numbers would delay rows that are reduced by more than memory between two kernels takes; "": they would not."""
    row = forms.reduced_extent(joint.reduced or ())
    parts = [unit.part for unit in (left if left.draws else right).units if unit.part is not None and unit.part.draws]
    if any(draws.calls_for_each(part, row) for part in parts):
        return "each of its random numbers takes a call of its own, which delays rows that are reduced more than memory does"
    drawing = joint.numel / row * (row * LANE + (lanes_drawn(row) - row) * EMPTY)
    sides = [{buffer: max(min(foot.access.value.buffer.nbytes, joint.numel * foot.dtype.itemsize) for foot in feet.values())
              for buffer, feet in group.touched.items()} for group in (left, right)]
    both, crossing = sides[0] | sides[1], sides[0].keys() & sides[1].keys()
    inner = {id(value.buffer) for value in _hidden(dict.fromkeys((*left.units, *right.units)))} - crossing
    moved = sum(nbytes for buffer, nbytes in both.items() if buffer not in inner) + sum(both[buffer] for buffer in crossing)
    if drawing <= moved:
        return ""
    return "its random numbers delay rows of this length by more than the memory between two kernels takes"


def _works_alone(left: Group, right: Group, joint: Joint) -> bool:
    """Do few programs, which see whole rows, have so much to compute for each element that others had better do it?"""
    extent = forms.reduced_extent(joint.reduced or ())
    columns = (joint.reduced or ((1, 1),))[0][0] > 1 and not left.scans | right.scans
    each = extent * HOPPER.narrow_width if columns else extent
    few = HOPPER.has_few(joint.numel // extent) if columns else joint.numel // extent * 32 <= HOPPER.programs
    if joint.split or each < LONE // 500 or not few:
        return False
    units = [unit for group in (left, right) for unit in group.units if unit not in joint.kept_units]
    parts = [unit.part for unit in units if unit.part is not None and info(unit.node.target).kind == "pointwise"]
    return each * sum(part.facts.work for part in parts) > LONE + _spared(left, right) // BYTES


def _only_picks(left: Group, right: Group, joint: Joint) -> bool:
    """Is nothing reduced in rows so few and long that programs had better share them?"""
    extent = forms.reduced_extent(joint.reduced or ())
    if joint.split or extent <= LONG or 4 * joint.numel > HOPPER.programs * extent or left.reduced and right.reduced:
        return False
    rows = left if left.reduced is not None else right
    return all(unit.part.facts.kinds.isdisjoint(("reduce", "scan")) for unit in rows.units if unit.part is not None)


def _spared(left: Group, right: Group) -> int:
    """Bytes that a kernel of both need not move."""
    hidden = _hidden(dict.fromkeys((*left.units, *right.units)))
    passed = [(value, nbytes) for one, two in ((left, right), (right, left)) for value, nbytes in two.loads.items()
              if value in one.stores]
    read = sum(min(nbytes, right.loads[value]) for value, nbytes in left.loads.items() if value in right.loads)
    return read + sum(nbytes * (2 if value in hidden else 1) for value, nbytes in passed)


def _belongs_elsewhere(left: Group, right: Group) -> bool:
    """Does one of the two wait for a node that the other does not hold?"""
    nodes = {unit.node for group in (left, right) for unit in group.units}
    return any(node not in nodes for group in (left, right) for node in group.wants)


def _hidden(inside: Collection[Unit]) -> set[Value]:
    """Values that only these units need."""
    return {value for unit in inside if not unit.lasts and unit.followers and all(other in inside for other in unit.followers)
            for value in unit.makes}


def _distinct(left: Group, right: Group, joint: Joint | str) -> int:
    """Operands in memory: what a value is read or written through, but for values that stay inside. Where columns are reduced
    beside rows, what follows them is a kernel of its own: the larger number of the two."""
    inside = dict.fromkeys((*left.units, *right.units))
    hidden = _hidden(inside)
    crossed = () if isinstance(joint, str) else joint.crossed
    behind = dict.fromkeys(unit for unit in crossed if unit.part is not None and unit.part.reduced is None)
    kernels = [behind, [unit for unit in inside if unit not in behind]] if behind else [inside]
    return max(len({(access.value.buffer.index, access.form, access.dtype, access.byte_offset) for unit in units if unit.part
                    for _, access in unit.part.accesses() if access.value not in hidden}) for units in kernels)


def _memory_reason(left: Group, right: Group, joint: Joint) -> str | None:
    cuts: tuple[int, ...] | None = forms.reduced_cuts(joint.reduced or (), joint.numel)
    sides: list[Touched] = []
    for group in (left, right):
        moved = group if group.numel == joint.numel else embedded(group, joint)
        cuts = None if cuts is None or moved is None else forms.merge_cuts(cuts, moved.cuts)
        if moved is None or cuts is None:
            return "their operands' dimensions do not nest"
        sides.append(moved.touched)
    if cuts is not None and len(cuts) + 1 > MAX_DIMS:
        return f"more than {MAX_DIMS} dimensions that do not merge"
    for buffer in sides[0].keys() & sides[1].keys():
        for one in sides[0][buffer].values():
            if any(one.collides(two) for two in sides[1][buffer].values()):
                return "one writes memory that the other touches in another order"
    return None


def embedded(group: Group, joint: Joint) -> Group | None:
    """What the pointwise ``group`` touches once it runs over the kept elements of a reduction; None where that does not nest."""
    moved = Group(group.units, group.level, joint.numel, joint.reduced)
    crossed = group.units[0] in joint.crossed

    def placed(form: Form) -> Form | None:
        return mixing.embedded(form, joint.reduced or (), joint.numel, crossed, KEPT)

    for form in (*group.patterns, *(foot.form or () for feet in group.touched.values() for foot in feet.values())):
        full = placed(form)
        cuts = None if full is None else forms.merge_cuts(moved.cuts, forms.cuts(full))
        if cuts is None:
            return None
        moved.cuts = cuts
    for buffer, feet in group.touched.items():
        moved.touched[buffer] = {key: Footprint(placed(foot.form or ()), foot.dtype, foot.access, foot.gathers, foot.written)
                                 for key, foot in feet.items()}
    return moved


def _split_reason(left: Group, right: Group, joint: Joint) -> str | None:
    if not joint.split:
        return None
    if left.scans or right.scans:
        return "one reduction is split over programs, the other needs whole rows"
    late: dict[Value, None] = {}  # what follows from a reduction
    placed = dict.fromkeys(joint.kept_units)
    for unit in sorted((*left.units, *right.units), key=lambda unit: unit.position):
        part = unit.part
        if part is None:
            continue
        reads = [access.value for mode, access in part.accesses() if mode == "r"]
        if part.waits and part.reduced is not None:
            return "one reduction is split over programs, the other needs whole rows"
        follows = any(value in late for value in reads)
        if unit not in placed and follows:
            return "the reduction is split over programs, so its result is not known inside the kernel"
        late.update((access.value, None) for mode, access in part.accesses() if mode == "w"
                    and (follows or part.reduced is not None and access.level == KEPT))
    return None
