"""Whether a loss's gradient shares the kernel that reduces the logits, which are then read from memory once: each program walks
its row a second time while a cache holds it. Imports codegen's leaf modules and `ir_nodes`."""

from __future__ import annotations

from codegen import mixing
from codegen.group import Group, Unit
from ir_nodes import settings

FORWARD, GRADIENT = "_log_softmax", "_log_softmax_backward_data"
NAME = "one_pass_loss"

LITTLE = 4
"""The gradient may be there earlier where ATen makes less than one part in so many of its bytes between the two."""

STEPS = 16
"""So many kernels' parts are asked whether they sum the gradient's columns."""


def refused(left: Group, right: Group) -> str | None:
    """Why the gradient in one of the groups stays out of the other's kernel, which reduces what it is made of."""
    for forward, backward in ((left, right), (right, left)):
        gradient = _part_of(backward, GRADIENT) if forward.reduced else None
        logits = _part_of(forward, FORWARD) if gradient is not None else None
        if gradient is not None and logits is not None:
            return _reason(forward, logits, gradient)
    return None


def _part_of(group: Group, name: str) -> Unit | None:
    return next((unit for unit in group.units if unit.node.name == name), None)


def _reason(forward: Group, logits: Unit, gradient: Unit) -> str | None:
    if not settings.enabled(NAME):
        return f"{NAME} is switched off"
    if (gradient.made_by_aten - logits.made_by_aten) * LITTLE > forward.numel * 2:
        return "the gradient would be held while much else is computed"
    if not forward.mixes and _sums_columns(forward, gradient):
        return "the gradient's columns are summed where it is made, which reads no more than a kernel of its own for that would"
    return None


def _sums_columns(forward: Group, gradient: Unit) -> bool:
    """Does a kernel of the gradient's elements reduce its columns?"""
    columns = mixing.across(forward.reduced or (), forward.numel)
    seen, waiting = {gradient: None}, [gradient]
    while waiting and len(seen) < STEPS:
        for unit in waiting.pop().followers:
            if unit.part is not None and unit.part.numel == forward.numel and unit not in seen:
                if unit.part.reduced == columns:
                    return True
                seen[unit] = None
                waiting.append(unit)
    return False
