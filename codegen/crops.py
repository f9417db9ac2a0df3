"""Reads what a part of a value was made of where only that part is read: a shifted sequence, an image's neighbours within its
padding; and what the whole was made of where few elements read each. Imports codegen's leaf modules and `ir_nodes`.

What reads the whole value as it was stored shares the kernel of who makes it; a part lies otherwise and would have to be loaded.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.expressions import Unsupported
from codegen.forms import touched
from codegen.instructions import FULL, Instr, MemAccess, Part, rewritten
from codegen.limits import check_part
from codegen.lowering import Lowering
from codegen.pulled import Known, Puller, identity_mapper, read_once
from codegen.reordering import stores
from codegen.taken import MOST_WORK, PLAIN
from ir_nodes.ops import info

_LIBRARIES = ("matmul", "convolution", "attention")


def read_crops(part: Part, known: Known) -> Part:
    """The part with loads of parts of cheap values replaced by what makes these; the same part where there are none."""
    if part.reduced is not None or part.draws:
        return part
    found = [instr for instr in part.instrs if instr.kind == "load"
             and (_is_crop(part, instr, known) or _is_spread(part, instr, known))]
    if not found:
        return part

    def made_here(instr: Instr) -> list[Instr] | None:
        return _pulled(part, instr, known) if instr in found else None

    try:
        made = rewritten(part, made_here)
        check_part(made)
    except Unsupported:
        return part
    return made


def _taken_from(instr: Instr) -> MemAccess | None:
    """How it loads a value that nobody holds, under no condition; None where it does something else."""
    access = instr.access
    plain = instr.kind == "load" and not instr.args and access is not None and access.level == FULL
    return access if plain and access is not None and not access.value.buffer.live else None


def _is_crop(part: Part, instr: Instr, known: Known) -> bool:
    """Does it load a part of a value that was made of others, each element once, and could the value be spared so?"""
    access = _taken_from(instr)
    maker = known.parts.get(access.value) if access is not None else None
    if access is None or maker is None or maker.numel <= part.numel or touched(access.form) != part.numel:
        return False
    padded = any(one.kind == "take" or one.kind == "load" and one.args for one in maker.instrs)
    return read_once(access.value) or padded and len(stores(maker)) == 1


def _is_spread(part: Part, instr: Instr, known: Known) -> bool:
    """Does it load all of a value, each element for a few, and is that made of no more memory with little work? Of what is there
    or a library makes: a kernel that sums rows has their number at hand, and makes such a value of it as well."""
    access = _taken_from(instr)
    maker = known.parts.get(access.value) if access is not None else None
    if access is None or maker is None or part.numel <= maker.numel:
        return False
    if touched(access.form) != maker.numel or not read_once(access.value):
        return False
    loads = [one for mode, one in maker.accesses() if mode == "r"]
    there = all(one.value.producer is None or info(one.value.producer.target).kind in _LIBRARIES for one in loads)
    loaded = sum(touched(one.form) * one.dtype.itemsize for one in loads)
    return (there and maker.facts.kinds <= PLAIN and loaded <= access.value.buffer.nbytes
            and part.numel * maker.facts.work <= MOST_WORK * maker.numel)


def _pulled(part: Part, instr: Instr, known: Known) -> list[Instr] | None:
    """What makes the elements that ``instr`` loads, or None where they had better be loaded."""
    access = instr.access
    assert access is not None
    lowering = Lowering(part.node, (part.numel,))
    lowering.part = replace(part, instrs=[])
    made = Puller(lowering, known, None).operand(access, instr.dtype, instr.rounded, identity_mapper)
    plain = len(lowering.part.instrs) == 1 and made.access is not None and made.access.value is access.value
    return None if plain or made.dtype is not instr.dtype else lowering.part.instrs
