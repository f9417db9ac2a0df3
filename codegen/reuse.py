"""Which operands a kernel's results may be written over. Imports codegen's leaf modules and `ir_nodes`.

A program that holds all it needs of some elements in registers may write its results to the same place: that is what an in-place
op does. One that walks its elements block by block holds a block at a time; where it walks them several times, each result must
come from the last walk, and need a number of a walk before. The result has to be computed from what it replaces: a program's
threads wait for one another where values pass between them, and nowhere else, so a thread could otherwise store an element that
another has yet to load. For elements that are picked by an index, they wait at a barrier (`settles`).
"""

from __future__ import annotations

from typing import Iterable

from codegen.body import Body, Step
from codegen.instructions import FULL, MemAccess
from ir_nodes.node import Buffer, Value

Reuses = tuple[tuple[Value, Value], ...]


def reuses(body: Body, looped: bool = False, shared: bool = False) -> Reuses:
    """What may be written over what is read: the same elements in the same order, read through nothing else but picks of a row
    by the program that owns it. ``looped``: rows are walked block by block; ``shared``: programs share a row."""
    plain = {buffer: steps for buffer, steps in touched_by(body).items()
             if buffer.index >= 0 and is_plain(steps, None if shared else body)}
    last = last_walk(body) if looped else 0
    found: list[tuple[Value, Value]] = []
    for buffer, steps in plain.items():
        if steps[0].stage == "store" and (not looped or all(step.phase == last for step in steps)):
            found += [(access_of(steps[0]).value, access_of(others[0]).value) for other, others in plain.items()
                      if others[0].stage == "load" and other.nbytes == buffer.nbytes and same_elements(others[0], steps[0])
                      and all(computed_from(store, others) for store in steps)
                      and all(step.phase <= last or not looped for step in others)]
    return tuple(found)


def touched_by(body: Body) -> dict[Buffer, list[Step]]:
    """Who touches a buffer, picks last."""
    touched: dict[Buffer, list[Step]] = {}
    for step in sorted(body.steps, key=lambda step: step.stage == "gather"):
        if step.access is not None:
            touched.setdefault(step.access.value.buffer, []).append(step)
    return touched


def settles(body: Body, found: Reuses) -> bool:
    """Must all threads have picked what they need before any of them stores? So it is where ``found`` lets results replace
    elements that are picked."""
    replaced = {value.buffer for _, value in found}
    return any(step.stage == "gather" and access_of(step).value.buffer in replaced for step in body.steps)


def last_walk(body: Body) -> int:
    """The number of a loop's last walk over the elements, counted from 0."""
    return max([step.phase for step in body.steps if step.stage == "store" and step.level == FULL]
               + [step.phase - 1 for step in body.steps if step.stage == "reduce"], default=0)


def computed_from(store: Step, loads: list[Step]) -> bool:
    """Is each of ``loads``, picks aside, needed for what is stored?"""
    needed = made_of([store])
    return all(load in needed for load in loads if load.stage == "load")


def made_of(steps: Iterable[Step]) -> set[Step]:
    """The steps and all that they take."""
    found: set[Step] = set()
    waiting = list(steps)
    while waiting:
        step = waiting.pop()
        if step not in found:
            found.add(step)
            waiting += step.args
    return found


def is_plain(steps: list[Step], body: Body | None) -> bool:
    """Is the buffer only loaded, or only stored to, always the same elements in the same order, of the whole space? From what is
    loaded, elements of a row of ``body`` may be picked, too."""
    first = steps[0]
    for step in steps:
        if first.stage == "load" and step.stage == "gather":
            if body is None or not picks(step, first, body):
                return False
        elif step.stage != first.stage or step.level != FULL or step.partial or not same_elements(step, first):
            return False
    return first.stage in ("load", "store")


def picks(step: Step, load: Step, body: Body) -> bool:
    """Does it pick one element of each row that ``load`` walks?"""
    interval, _ = step.payload  # type: ignore[misc]
    one, other = access_of(step), access_of(load)
    return body.reduced == (interval,) and (one.form, one.byte_offset, one.dtype) == (load.form, other.byte_offset, other.dtype)


def same_elements(one: Step, other: Step) -> bool:
    left, right = access_of(one), access_of(other)
    plain = not (left.shift or right.shift or left.scattered or right.scattered or left.index_stride or right.index_stride)
    return (plain and one.form == other.form and left.dtype.itemsize == right.dtype.itemsize
            and left.byte_offset == right.byte_offset == 0)


def access_of(step: Step) -> MemAccess:
    assert step.access is not None
    return step.access
