"""Which ops add up several products' results, so that one product may take the place of all. Imports `product_sums`, `parts`,
`ir_nodes`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Sequence

from barriers.passes.parts import behind, why_not_moved
from barriers.passes.product_sums import addends, scale_of
from ir_nodes import Graph, Node, Value

CAST = "aten::copy_"


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
    terms = [_term(graph, product) for product in products]
    known = [one for one in terms if isinstance(one, _Term)]
    if len(known) < len(terms):
        return next(one for one in terms if isinstance(one, str))
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
        if left and (len(users) != 1 or (result.buffer.live and graph.last(result.buffer) is result)):
            return "somebody else reads a part of their sum"
        partial, node = result, next(iter(users), node)
    return found


def _term(graph: Graph, product: Node) -> _Term | str:
    """What of the product's result is added where; as text, why nothing is."""
    value, cast = product.writes[0].value, None
    for _ in range(2):
        write = value.producer.writes[0] if value.producer is not None else product.writes[0]
        if len(value.users) != 1 or why_not_moved(graph, write, behind(0)):
            return "their products are not only added up"
        (user,) = value.users
        if addends(user):
            return _Term(product, value, cast, user)
        if user.target != CAST or cast is not None:
            return "their products are not only added up"
        value, cast = user.writes[0].value, user
    return "their products are not only added up"


def _why_not(graph: Graph, node: Node, partial: Value) -> str:
    """Why ``node`` is no sum of ``partial`` and something else that either may stand for."""
    both, write = addends(node), node.writes[0]
    if len(both) != 2 or scale_of(node) != 1 or [one.value for one in both].count(partial) != 1:
        return "their products are not only added up"
    if any(not one.layout.is_contiguous or one.layout.numel != write.layout.numel or one.layout.offset for one in both):
        return "their products are added to a part of something, or to elements in another order"
    if any(one.layout.dtype is not write.layout.dtype or one.layout.flipped for one in both) or not write.layout.is_contiguous:
        return "a sum has another dtype than what it adds"
    return "" if write.layout.covers(write.value.buffer.nbytes) else "a sum is a part of something"
