"""What nodes were lowered to, kept for passes of one compilation that ask again. Imports codegen's lowering and `ir_nodes`."""

from __future__ import annotations

from typing import Mapping

from codegen.expressions import Unsupported
from codegen.instructions import Part
from codegen.lower import REDUCTIONS, lower
from codegen.lowering import FILLS
from codegen.pointwise import row_of
from codegen.pulled import Known
from codegen.tuning import Tuning
from ir_nodes.node import Arg, Node, Write
from ir_nodes.ops import info


class Lowered:
    """Remembers the parts of nodes. A node that a pass has changed since is lowered anew."""

    def __init__(self) -> None:
        self._parts: dict[Node, tuple[tuple[Arg, ...], tuple[Write, ...], list[Part]]] = {}

    def parts(self, node: Node, scratch: int, tuning: Tuning, known: Known) -> list[Part]:
        """As `codegen.lower.lower`."""
        args, writes, parts = self._parts.get(node, (None, None, []))
        if args is not node.args or writes is not node.writes:
            parts = lower(node, scratch, tuning, known)
            if stands_alone(node, parts):
                self._parts[node] = (node.args, node.writes, parts)
        return parts


def check(node: Node, left: Mapping[Node, str], lists: bool) -> None:
    """Raises Unsupported for what is ATen's; without ``lists``, ops over lists are."""
    if node in left:
        raise Unsupported(left[node])
    if not lists and info(node.target).kind in ("foreach", "optimizer"):
        raise Unsupported("an op over lists")


def stands_alone(node: Node, parts: list[Part]) -> bool:
    """Do the parts follow from the node alone, not from what others have become or from the machine? Then no fill is read in its
    maker's stead either, and no scratch memory is numbered."""
    filled = any(value.producer is not None and value.producer.name in FILLS for value in node.inputs())
    numbered = any(access.value.buffer.index < 0 for part in parts for _, access in part.accesses())
    reduces = node.name in REDUCTIONS and any(part.reduced is not None for part in parts)
    return not filled and not numbered and (reduces or row_of(node) is not None)
