"""Lowers padding with what lies at the edges, mirrored or repeated, with its gradients. Imports torch, `ir_nodes` and codegen's
lowering modules."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

from codegen.bounds import add
from codegen.expressions import Unsupported
from codegen.instructions import Part
from codegen.lowering import Lowering, arguments
from codegen.pooling import MOST_WINDOWS, Place, sum_at
from codegen.reductions import operand_of
from ir_nodes.node import Node

_MIRRORED = "{1} - tl.abs({1} - tl.abs({0} - {2}))"
_REPEATED = "tl.minimum(tl.maximum({0} - {2}, 0), {1})"
"""Of the element at a padded place: place, last element, how many are before the first."""


def _widths(args: dict[str, Any], rank: int) -> dict[int, tuple[int, int]]:
    """For each padded dimension how many elements come before and behind; the argument begins with the last dimension."""
    padding = args["padding"]
    return {rank - 1 - number: (padding[2 * number], padding[2 * number + 1]) for number in range(len(padding) // 2)}


def _lower(text: str) -> Callable[[Node], list[Part]]:
    def lower(node: Node) -> list[Part]:
        args = arguments(node)
        source, lowering = operand_of(args["self"]), Lowering(node, node.writes[0].layout.size)
        places = {}
        for dim, (before, _) in _widths(args, len(lowering.shape)).items():
            numbers = (lowering.size(number, torch.int32) for number in (source.layout.size[dim] - 1, before))
            places[dim] = lowering.expr(text, lowering.coord(dim), *numbers, dtype=torch.int32)
        lowering.write(0, lowering.take_at(source, places))
        return [lowering.part]

    return lower


def _lower_backward(images: Callable[[Lowering, int, int, int], list[Place]]) -> Callable[[Node], list[Part]]:
    """The gradients of an element and of its ``images`` beyond the edges."""

    def lower(node: Node) -> list[Part]:
        args = arguments(node)
        grad, lowering = operand_of(args["grad_output"]), Lowering(node, node.writes[0].layout.size)
        places = {dim: images(lowering, dim, *widths) for dim, widths in _widths(args, len(lowering.shape)).items()}
        if math.prod(map(len, places.values())) > MOST_WINDOWS:
            raise Unsupported(f"elements that stand in more than {MOST_WINDOWS} places")
        lowering.write(0, sum_at(lowering, grad, places))
        return [lowering.part]

    return lower


def _mirrored(lowering: Lowering, dim: int, before: int, behind: int) -> list[Place]:
    """Along a dimension where an element went: to its place, and beyond an edge that it is near to."""
    _check(before, behind)
    place, last = lowering.coord(dim), lowering.shape[dim] - 1
    first = lowering.size(before, torch.int32)
    images: list[Place] = [(lowering.expr("{0} + {1}", place, first, dtype=torch.int32), None)]
    if before:
        near = lowering.expr("(({0} >= 1) & ({0} <= {1}))", place, first, dtype=torch.bool)
        images.append((lowering.expr("{1} - {0}", place, first, dtype=torch.int32), near))
    if behind:
        ends = (lowering.size(last - behind, torch.int32), lowering.size(last - 1, torch.int32))
        near = lowering.expr("(({0} >= {1}) & ({0} <= {2}))", place, *ends, dtype=torch.bool)
        mirror = lowering.size(2 * last + before, torch.int32)
        images.append((lowering.expr("{1} - {0}", place, mirror, dtype=torch.int32), near))
    return images


def _repeated(lowering: Lowering, dim: int, before: int, behind: int) -> list[Place]:
    """Along a dimension where an element went: to its place, and one at an edge to all places beyond that."""
    _check(before, behind)
    place, last = lowering.coord(dim), lowering.size(lowering.shape[dim] - 1, torch.int32)
    ends = ((lowering.expr("({0} == 0)", place, dtype=torch.bool), range(-before, 0)),
            (lowering.expr("({0} == {1})", place, last, dtype=torch.bool), range(1, behind + 1)))
    here = add(lowering, place, before)
    return [(here, None), *((add(lowering, here, step), at_end) for at_end, steps in ends for step in steps)]


def _check(before: int, behind: int) -> None:
    if before < 0 or behind < 0:
        raise Unsupported("padding that cuts elements off")


PADS = {
    **{f"reflection_pad{rank}d": _lower(_MIRRORED) for rank in (1, 2, 3)},
    **{f"replication_pad{rank}d": _lower(_REPEATED) for rank in (1, 2, 3)},
    **{f"reflection_pad{rank}d_backward": _lower_backward(_mirrored) for rank in (1, 2, 3)},
    **{f"replication_pad{rank}d_backward": _lower_backward(_repeated) for rank in (1, 2, 3)},
}
"""Keyed by `ir_nodes.node.Node.name`."""
