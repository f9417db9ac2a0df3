"""Finds choices that are the same for all elements of a program, so that it computes what it chooses and nothing else. Imports
codegen's leaf modules.

A gradient of queries, keys and values side by side is one of three for each element. Where the three lie across what walks them,
programs go over squares, each within one of the three.
"""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

from codegen.body import Step
from codegen.instructions import work_of

WORTH = 32
"""Instructions that an element is spared from which on threads had better branch: loads behind a branch wait for it."""
RATIO = 15
"""Instructions of a quotient without a branch."""

Sides = tuple[list[Step], list[Step]]
"""What is computed for a choice's first value only, and for its second only, in order."""


def choices(steps: Sequence[Step], same: Callable[[Step], bool]) -> dict[Step, Sides]:
    """The choices among ``steps`` between much that nothing else needs. ``same``: is a condition one for the whole program, and
    may what is chosen be the result of a branch?"""
    users: dict[Step, list[Step]] = {}
    for step in steps:
        for arg in step.args:
            users.setdefault(arg, []).append(step)
    found: dict[Step, Sides] = {}
    for step in steps:
        if step.stage == "expr" and step.text == "tl.where({0}, {1}, {2})" and same(step):
            sides = _alone(step, step.args[1], steps, users), _alone(step, step.args[2], steps, users)
            if sum(map(_work, (*sides[0], *sides[1]))) > WORTH:
                found[step] = sides
    return found


def outside(steps: Sequence[Step], chosen: Mapping[Step, Sides]) -> list[Step]:
    """Those of the ``steps`` that are not computed for a choice among them."""
    within = {one for step in steps for side in chosen.get(step, ()) for one in side}
    return [step for step in steps if step not in within]


def _alone(choice: Step, value: Step, steps: Sequence[Step], users: Mapping[Step, Sequence[Step]]) -> list[Step]:
    """What makes ``value`` for the ``choice`` and nothing else, in order."""
    mine: dict[Step, None] = {}
    for step in reversed(steps):
        readers = users.get(step, ())
        chosen = step is value and len(readers) == 1 and readers[0] is choice and step is not choice.args[0]
        if step.stage != "store" and (chosen or readers and step is not value and all(reader in mine for reader in readers)):
            mine[step] = None
    return list(reversed(mine))


def _work(step: Step) -> int:
    return work_of(step.text) + RATIO * step.text.count("_ratio(") if step.stage == "expr" else 0
