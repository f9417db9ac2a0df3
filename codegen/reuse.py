"""Which operands a kernel's results may be written over. Imports codegen's leaf modules and `ir_nodes`.

A program that holds all it needs of some elements in registers may write its results to the same place: that is what an in-place
op does. A kernel that walks its elements several times would read its own results, so it is never asked; one that walks them
once, block by block, holds a block at a time. The result has to be computed from what it replaces: a program's threads wait for
one another where values pass between them, and nowhere else, so a thread could otherwise store an element that another has yet
to load.
"""

from __future__ import annotations

from codegen.body import Body, Step
from codegen.instructions import FULL, MemAccess
from ir_nodes.node import Buffer, Value


def reuses(body: Body) -> tuple[tuple[Value, Value], ...]:
    """What may be written over what is read: the same elements in the same order, read through nothing else."""
    touched: dict[Buffer, list[Step]] = {}
    for step in body.steps:
        if step.access is not None:
            touched.setdefault(step.access.value.buffer, []).append(step)
    plain = {buffer: steps for buffer, steps in touched.items() if buffer.index >= 0 and is_plain(steps)}
    found: list[tuple[Value, Value]] = []
    for buffer, steps in plain.items():
        if steps[0].stage == "store":
            found += [(access_of(steps[0]).value, access_of(others[0]).value) for other, others in plain.items()
                      if others[0].stage == "load" and other.nbytes == buffer.nbytes and same_elements(others[0], steps[0])
                      and all(computed_from(store, others) for store in steps)]
    return tuple(found)


def walks_once(body: Body) -> bool:
    """Does a kernel that walks its elements in a loop need but one pass, so that it is done with each block before the next?"""
    return all(step.phase == 0 if step.level == FULL else step.phase <= 1 for step in body.steps
               if step.level == FULL or step.stage in ("reduce", "scan"))


def computed_from(store: Step, loads: list[Step]) -> bool:
    """Is each of ``loads`` needed for what is stored?"""
    seen: set[int] = set()
    stack = [store]
    while stack:
        step = stack.pop()
        if id(step) not in seen:
            seen.add(id(step))
            stack.extend(step.args)
    return all(id(load) in seen for load in loads)


def is_plain(steps: list[Step]) -> bool:
    """Is the buffer only loaded, or only stored to, always the same elements in the same order, of the whole space?"""
    first = steps[0]
    return first.stage in ("load", "store") and all(
        step.stage == first.stage and step.level == FULL and not step.partial and same_elements(step, first) for step in steps)


def same_elements(one: Step, other: Step) -> bool:
    left, right = access_of(one), access_of(other)
    plain = not (left.shift or right.shift or left.scattered or right.scattered or left.index_stride or right.index_stride)
    return (plain and one.form == other.form and left.dtype.itemsize == right.dtype.itemsize
            and left.byte_offset == right.byte_offset == 0)


def access_of(step: Step) -> MemAccess:
    assert step.access is not None
    return step.access
