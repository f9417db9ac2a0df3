"""Which ops add up several products' results, so that one product may take the place of all. Imports
`join_products`, `parts`, `product_sums`, `ir_nodes`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Sequence

from barriers.passes.join_products import CAST
from barriers.passes.parts import behind, why_not_moved
from barriers.passes.product_sums import addends, scale_of
from ir_nodes import Graph, Node, Value

NOT_ONLY = "their products are not only added up"


@dataclass(slots=True)
class Summed:
    """``products`` whose results end in one sum; ``kept``: the one that is added first. Without the others ``rests`` stand for
    sums: for each the result of an op, and the other thing that it adds. ``gone``: nodes that nobody needs then."""

    products: list[Node]
    kept: Node
    rests: list[tuple[Value, Value]] = field(default_factory=list)
    gone: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class _Term:
    product: Node
    value: Value  # the product's result, or the copy of it in another dtype that is added
    cast: Node | None
    sum: Node  # that adds it


def summed(graph: Graph, products: Sequence[Node], place: Mapping[Node, int]) -> Summed | str:
    """How ``products`` are added up, each once and multiplied by nothing; as text, why one can't take the place of all."""
    known = [term for product in products if (term := _term(graph, product)) is not None]
    if len(known) < len(products):
        return NOT_ONLY
    kept = min(known, key=lambda one: place[one.sum])
    found = Summed(list(products), kept.product)
    left = {one.value: one for one in known if one is not kept}
    partial, stands, node = kept.value, kept.value, kept.sum  # what is added up so far, and what stands for it without the others
    while left:
        reason = _why_not(graph, node, partial)
        if reason:
            return reason
        (other,) = (one for one in addends(node) if one.value is not partial)
        result = node.writes[0].value
        if other.value in left:
            term = left.pop(other.value)
            if result.buffer is not stands.buffer and why_not_moved(graph, node.writes[0], behind(0)):
                return "the sum goes into memory that was there before"
            found.rests.append((result, stands))
            found.gone += [one for one in (term.product, term.cast, node) if one is not None]
        else:
            stands = result
        users = list(result.users)
        if left and (len(users) != 1 or graph.holds(result)):
            return "somebody else reads a part of their sum"
        partial, node = result, next(iter(users), node)
    return found


def _term(graph: Graph, product: Node) -> _Term | None:
    """What of the product's result is added where; None where something else becomes of it."""
    cast, last, user = None, product, _reader(graph, product)
    if user is not None and user.target == CAST:
        cast, last, user = user, user, _reader(graph, user)
    return _Term(product, last.writes[0].value, cast, user) if user is not None and addends(user) else None


def _reader(graph: Graph, node: Node) -> Node | None:
    """The only reader of what ``node`` makes, if nobody else could tell that it isn't made."""
    users = list(node.writes[0].value.users)
    return users[0] if len(users) == 1 and not why_not_moved(graph, node.writes[0], behind(0)) else None


def _why_not(graph: Graph, node: Node, partial: Value) -> str:
    """Why ``node`` is no sum of ``partial`` and something else that either may stand for."""
    both, write = addends(node), node.writes[0]
    if len(both) != 2 or scale_of(node) != 1 or [one.value for one in both].count(partial) != 1:
        return NOT_ONLY
    if any(not one.layout.is_contiguous or one.layout.numel != write.layout.numel or one.layout.offset for one in both):
        return "their products are added to a part of something, or to elements in another order"
    if any(one.layout.dtype is not write.layout.dtype or one.layout.flipped for one in both) or not write.layout.is_contiguous:
        return "a sum has another dtype than what it adds"
    return "" if write.layout.covers(write.value.buffer.nbytes) else "a sum is a part of something"
