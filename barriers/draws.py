"""Random draws that need nothing of their segment leave it, where the schedule would turn draws around. Imports `ir_nodes` only.

Draws from one generator keep the program's order, or numbers would change. But what a draw fills is often memory that nothing has
been computed into (the mask of a dropout): such a draw may run in its old place while the rest of its segment moves.
"""

from __future__ import annotations

from typing import Collection, Iterator, Sequence

from ir_nodes import BufferKind, Graph, Node, SegmentCall


def release_draws(graph: Graph, turned: Sequence[tuple[SegmentCall, SegmentCall]]) -> bool:
    """For each pair of calls, the first of which is to run first: take the second's free draws out of it, if both draw.

    Did anything change?
    """
    drawn: dict[SegmentCall, list[Node]] = {}
    others: set[SegmentCall] = set()  # calls that do more than draw
    wanted = {call for pair in turned for call in pair}
    for node in graph.nodes if wanted else ():
        for call in node.segment.chain() if node.segment is not None else ():
            if call in wanted:
                if generators(node):
                    drawn.setdefault(call, []).append(node)
                else:
                    others.add(call)
    changed = False
    for earlier, later in in_turn(turned, drawn):
        if not meets(drawn.get(earlier, []), drawn.get(later, [])) or later not in others:
            continue
        for node in drawn[later]:
            if node.segment is not None and is_free(node, later):
                node.segment, changed = None, True
    return changed


def in_turn(turned: Sequence[tuple[SegmentCall, SegmentCall]], drawn: Collection[SegmentCall]
            ) -> Iterator[tuple[SegmentCall, SegmentCall]]:
    """Every pair that ``turned`` asks for, also through others, whose first draws."""
    after: dict[SegmentCall, list[SegmentCall]] = {}
    for earlier, later in turned:
        after.setdefault(earlier, []).append(later)
    for start in list(drawn):
        reached: dict[SegmentCall, None] = {}
        stack = list(after.get(start, ()))
        while stack:
            call = stack.pop()
            if call not in reached and call is not start:
                reached[call] = None
                stack += after.get(call, ())
        yield from ((start, call) for call in reached if call in drawn)


def meets(one: Sequence[Node], other: Sequence[Node]) -> bool:
    """Does ``other`` draw first from a generator that ``one`` draws from?"""
    first = {index: node.index for node in reversed(other) for index in generators(node)}
    return any(first.get(index, node.index) < node.index for node in one for index in generators(node))


def generators(node: Node) -> list[int]:
    return [write.value.buffer.index for write in node.effects if write.value.buffer.kind is BufferKind.GENERATOR]


def is_free(node: Node, call: SegmentCall) -> bool:
    """Does it need nothing that ``call`` computes, but the generator?"""
    makers = (value.producer for value in node.inputs() if value.buffer.kind is not BufferKind.GENERATOR)
    return not any(maker is not None and maker.segment is not None and call in maker.segment.chain() for maker in makers)
