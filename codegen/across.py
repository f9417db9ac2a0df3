"""Whether a kernel that walks rows would read an operand that lies across them. Imports codegen's leaf modules.

A convolution leaves the channels of a pixel side by side, a norm over images reduces the pixels of a channel. A kernel that reads
both by rows fetches a whole sector of memory for each element of the first. What computes elementwise with such an operand is a
kernel of its own instead, which goes over squares. (On an H200, sums over 8 x 64 x 224 x 224: 0.48 ms in one kernel.) Where
results are many, the kernel that reduces goes over squares itself (`codegen.reduced_squares`).

A mean over the first and the last dimension of 7,281 x 1,152 x 4 finds its rows in pieces of four elements. What computes with
the mean elementwise would fetch and store them so once more (0.91 ms; 0.65 in two kernels).
"""

from __future__ import annotations

import itertools
import operator

import torch

from codegen import forms
from codegen.body import reduced_flags
from codegen.footprint import Footprint
from codegen.forms import Form
from codegen.group import Group, Joint
from codegen.reduced_squares import NARROWEST

SECTOR = 32
"""Bytes that memory gives at a time."""
SQUARES = 4096
"""Results whose squares are enough for all of the machine."""
TABLES = 1
"""Such numbers, of each group of channels of each image, that are loaded for each element at most. (Beside a sum for each channel
of the gradient of a norm over groups of 32 x 128 x 64 x 64, which has four: 509 us on an H200.) Masks do not count: what two hide
of 64 x 80 x 3,000 takes 122 us with the sum of what they hide, 150 apart."""
LARGE, SHORT, HELD, FEW = 1 << 20, 256, 8192, 64
"""Elements of a kernel that is worth another launch, of rows of which a program holds several, so that it reads squares, of rows
that a program may hold in registers, and of neighbours that have one number. (The gradient of the largest of 20, summed for each
of 128 channels: 174 us on an H200 in one kernel, some 60 in two.)"""


def refused(left: Group, right: Group, joint: Joint) -> str | None:
    """Why the groups, one of which reduces rows, stay apart, or None."""
    if joint.reduced is None or joint.crossed or joint.numel < LARGE:
        return None
    rows, other = (left, right) if left.reduced is not None else (right, left)
    if other.reduced is not None or other.numel != joint.numel:
        return None
    if forms.reduced_extent(joint.reduced) < SHORT:
        return _beside_short(rows, other, joint)
    if rows is left and rows.totals and (along := _fast(rows, joint)) and not _fast(other, joint) <= along:
        return "its operands lie in another order than those that the other sums as a whole, which is walked in one"
    if rows is not left and _repeats(other, joint):
        return "one of its operands has one number for every few elements of the long rows that the other sums"
    if _looks_up(other, joint):
        return "it reads numbers that differ between results and along what the other sums: each element would load them anew"
    if rows is left and _in_pieces(rows, joint):
        return "the rows that one of them reduces lie in pieces smaller than what memory gives at a time, and would be read twice"
    own, others = _ways(rows, other, joint), _ways(other, rows, joint)
    if True in own or True not in others or False not in (*own, *others, *_read_by_both(rows, other, joint)):
        return None
    many = joint.numel // forms.reduced_extent(joint.reduced) >= SQUARES
    if rows is not left and many and _stays_inside(other, rows) and _run_along_results(other, joint):
        return None
    return "one of its operands lies across the rows that the other reduces: each element would be fetched with its neighbours"


def _beside_short(rows: Group, other: Group, joint: Joint) -> str | None:
    """Why what neither makes ``rows``, which are short, nor is made of them stays apart. (On an H200, the largest of every 4 of
    64 x 3,136 x 192 queries beside keys that are stored turned: 311 us.)"""
    shared = rows.touched.keys() & other.touched.keys()
    if any(foot.written for buffer in shared for group in (rows, other) for foot in group.touched[buffer].values()):
        return None
    turned = (position for position in _fast(other, joint) - _fast(rows, joint) if _results_between(position, joint) >= NARROWEST)
    return "one of its operands lies across neighbouring results of the other" if any(turned) else None


def _results_between(position: int, joint: Joint) -> int:
    """How many results lie between two elements of the space that are ``position`` apart; 0 where that is along a reduction."""
    between = position
    for low, high in joint.reduced or ():
        if low <= position < high:
            return 0
        between = between * low // high if high <= position else between
    return between


def _fast(group: Group, joint: Joint) -> set[int]:
    """The dimensions along which memory that the group touches runs, by how many elements of the space lie between two."""
    found: set[int] = set()
    for form in (foot.form for feet in group.touched.values() for foot in feet.values() if _is_whole(foot, joint)):
        assert form is not None
        positions = itertools.accumulate((size for size, _ in form[:0:-1]), operator.mul, initial=1)
        found.add(min((stride, position) for (_, stride), position in zip(reversed(form), positions))[1])
    return found


def _in_pieces(rows: Group, joint: Joint) -> bool:
    """Are the rows too long to be held, and does memory have a part of a sector of them here and another there?"""
    (low, high), *more = sorted(joint.reduced or ())
    if low != 1 or not more or forms.reduced_extent(joint.reduced or ()) <= HELD:
        return False
    widths = (foot.dtype.itemsize for feet in rows.touched.values() for foot in feet.values() if _is_whole(foot, joint))
    return high * max(widths, default=SECTOR) < SECTOR


def _repeats(group: Group, joint: Joint) -> bool:
    """Does the group read what has one number for a few neighbours in rows that no program holds? Each element's place is found
    by division then, and what is there loaded by itself."""
    (low, high), *_ = sorted(joint.reduced or ())
    if low != 1 or forms.reduced_extent(joint.reduced or ()) <= HELD:
        return False
    ends = (foot.form[-1] for feet in group.touched.values() for foot in feet.values() if foot.form and not foot.written)
    return any(stride == 0 and 1 < size < FEW and size < high for size, stride in ends)


def _looks_up(group: Group, joint: Joint) -> bool:
    """Does the group load many tables' numbers for each element of something large, or anew for every few elements? What is made
    of nothing but tables that run on had better be made where it is summed than stored. (Distances of 2,048 points from 512
    codes of 64 numbers, with their gradients: 104 us on an H200, 282 where differences are stored.)"""
    read = [foot for feet in group.touched.values() for foot in feet.values() if not foot.written]
    costly = any(_is_whole(foot, joint) or foot.form and foot.form[-1][0] < FEW for foot in read)
    return costly and sum(_goes_both_ways(foot, joint) for foot in read) > TABLES


def _goes_both_ways(foot: Footprint, joint: Joint) -> bool:
    """Is it a table, small against the joint space, whose numbers differ between results and along what is reduced? No mask."""
    form = foot.form
    if form is None or foot.dtype is torch.bool or foot.gathers or foot.written or FEW * forms.touched(form) > joint.numel:
        return False
    return len({flag for _, flag in _moving(form, joint) or ()}) == 2


def _ways(group: Group, other: Group, joint: Joint) -> set[bool | None]:
    """Of the memory that only ``group`` touches, not what lies between the two: does it lie across the rows?"""
    alone = (feet for buffer, feet in group.touched.items() if buffer not in other.touched)
    return {_lies_across(foot, joint) for feet in alone for foot in feet.values()}


def _read_by_both(left: Group, right: Group, joint: Joint) -> set[bool | None]:
    """Of the memory that both read and neither writes, the same."""
    shared = (left.touched[buffer] | right.touched[buffer] for buffer in left.touched.keys() & right.touched.keys())
    read = (feet for feet in shared if not any(foot.written for foot in feet.values()))
    return {_lies_across(foot, joint) for feet in read for foot in feet.values()}


def _lies_across(foot: Footprint, joint: Joint) -> bool | None:
    """Does each element of a row lie in a sector of its own? None for what has not an element for each or for two."""
    form = foot.form
    if form is None or foot.gathers or 2 * forms.touched(form) < joint.numel:
        return None
    moving = _moving(form, joint)
    if moving is None:
        return None
    steps = [stride for stride, flag in moving if flag]
    return bool(steps) and min(steps) * foot.dtype.itemsize >= SECTOR


def _moving(form: Form, joint: Joint) -> list[tuple[int, bool]] | None:
    """The form's strides, but 0, each with whether it is one along what is reduced; None where dimensions do not nest."""
    reduced = joint.reduced or ()
    cuts = forms.merge_cuts(forms.reduced_cuts(reduced, joint.numel), forms.cuts(form))
    if cuts is None:
        return None
    dims = forms.dims_of(cuts, joint.numel)
    return [(stride, flag) for stride, flag in zip(forms.strides_over(form, dims), reduced_flags(dims, reduced)) if stride]


def _stays_inside(group: Group, other: Group) -> bool:
    """Does nobody but the two need what the group makes?"""
    inside = {*group.units, *other.units}
    return all(not unit.lasts and inside.issuperset(unit.followers) for unit in group.units)


def _run_along_results(group: Group, joint: Joint) -> bool:
    """Does all memory that the group touches, and that lies across the rows, run along neighbouring results?"""
    feet = [foot for found in group.touched.values() for foot in found.values() if _lies_across(foot, joint)]
    return all(any(step == 1 and size >= NARROWEST for size, step in foot.form or ()) for foot in feet)


def _is_whole(foot: Footprint, joint: Joint) -> bool:
    """Is there an element of it for each of the joint space?"""
    return foot.form is not None and not foot.gathers and forms.touched(foot.form) == joint.numel
